"""What a plane and the process that renders its chat template say to each other.

A message is two lengths (unsigned, four bytes each, network order), a header in JSON, and a body of UTF-8. The plane sends an
order first and gets one answer for it; then, for each rendering, a conversation and gets one answer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PREFIX = struct.Struct("!II")
MAX_HEADER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Order:
    """What a process renders, and within which limits.

    Attributes:
        source: The template.
        variables: What it may read beside the messages.
        controls: Tokens that contents must not write; empty: contents are not traced.
        always_places: The places of the template's control tokens are told also where contents have none.
        max_characters: Longest prompt.
        max_cpu_s: Processor time of one rendering, and of reading the template.
        memory_bytes: Memory on top of what the process has when it begins.
    """

    source: str
    variables: Mapping[str, str]
    controls: Sequence[str]
    always_places: bool = False
    max_characters: int = 8 << 20
    max_cpu_s: float = 1.0
    memory_bytes: int = 256 << 20

    @property
    def max_body_bytes(self) -> int:
        """Longest body of an answer."""
        return 4 * self.max_characters


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an order or a conversation.

    Attributes:
        kind: `ready` (the template was read), `text` (the body is the prompt), `refused` (by the template), `untraceable`,
            `failed`, or a limit: `characters`, `memory`.
        words: Details, for people.
        controls: Of a text, as `veneer.chat.template.Rendered` has them.
        text: Of a text.
    """

    kind: str
    words: str = ""
    controls: tuple[tuple[int, int], ...] | None = None
    text: str = ""


def pack_order(order: Order) -> bytes:
    """Writes an order."""
    return _pack(asdict(order), b"")


def unpack_order(header: bytes) -> Order:
    """Reads an order."""
    return Order(**json.loads(header))


def pack_messages(messages: Sequence[tuple[str, str]]) -> bytes:
    """Writes a conversation: roles and lengths in the header, the contents behind each other in the body."""
    contents = [content.encode() for _, content in messages]
    header = {"roles": [role for role, _ in messages], "sizes": list(map(len, contents))}
    return _pack(header, b"".join(contents))


def unpack_messages(header: bytes, body: bytes) -> list[dict[str, str]]:
    """Reads a conversation."""
    fields = json.loads(header)
    messages = []
    start = 0
    for role, size in zip(fields["roles"], fields["sizes"], strict=True):
        messages.append({"role": role, "content": body[start : start + size].decode()})
        start += size
    return messages


def pack_answer(answer: Answer) -> bytes:
    """Writes an answer."""
    return _pack({"kind": answer.kind, "words": answer.words, "controls": answer.controls}, answer.text.encode())


def unpack_answer(header: bytes, body: bytes) -> Answer:
    """Reads an answer; the process is not trusted with more than a text.

    Raises:
        ValueError: It is none.
    """
    fields = json.loads(header)
    if not isinstance(fields, dict):
        raise ValueError("an answer is an object")  # noqa: TRY004  one family of faults
    controls = fields.get("controls")
    spans = None if controls is None else tuple((int(start), int(end)) for start, end in controls)
    return Answer(str(fields.get("kind")), str(fields.get("words")), spans, body.decode())


def _pack(header: Mapping[str, Any], body: bytes) -> bytes:
    written = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return b"".join((PREFIX.pack(len(written), len(body)), written, body))
