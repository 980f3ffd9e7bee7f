"""The base model's tokenizer, and what each token adds to the text.

`decode` of the `tokenizers` package is the truth: the streaming detokenizer must give the same text piece by piece. That is
possible exactly for the two decoders of the model families that are served; a tokenizer with another decoder is refused at start.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from veneer.errors import FailedPreconditionError


class TokenizerError(FailedPreconditionError):
    """The model folder's tokenizer is missing, broken or of a kind that cannot be streamed exactly."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What each token id adds to the text; empty for special and unknown ids.

    Attributes:
        raw: Bytes per id. Under byte fallback, only ids in `byte_ids` hold part of a character.
        byte_ids: Ids of single bytes (`<0xE4>`), empty for byte-level tokenizers. A run of them is text if the whole run is
            UTF-8, else one replacement character a byte.
        strip_start: Leading spaces that the decoder takes off the whole text.
        skipped: Ids that the decoder passes over as if they were not there.
    """

    raw: tuple[bytes, ...]
    byte_ids: frozenset[int]
    strip_start: int
    skipped: frozenset[int]


class Tokenizer:
    """Text to ids and back. Immutable; any thread may call it.

    Attributes:
        pieces: What each id adds to the text.
        special_tokens: Ids of the special tokens by their content; they add nothing to the text.
        max_token_bytes: Most bytes of text that one token can stand for; None where the tokenizer may drop some of the text.
        reads_disguises: Other texts than its own may become a control token, e.g. in capitals: the normalizer makes them alike.

    Args:
        path: The model folder's tokenizer.json.
        controls: Tokens that `encode_chat` reads only where it is told that they stand.

    Raises:
        TokenizerError: It cannot be read or streamed.
    """

    def __init__(self, path: Path, *, controls: Sequence[str] = ()) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise TokenizerError(f"{path.name} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.pieces = _pieces(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special_tokens = {token.content: id_ for id_, token in added if token.special and token.content}
        self._special_sizes = _sizes_by_start(self.special_tokens)
        self.max_token_bytes = _max_token_bytes(self._tokenizer)
        self.reads_disguises = reads_disguises(self._tokenizer, controls)
        self._hidden = HiddenControls(self._tokenizer, controls) if controls else None

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Returns the token ids of `text`; the package releases the interpreter lock meanwhile."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def special_token_in(self, text: str) -> str:
        """Returns the longest special token that stands in a text; empty: none does.

        Looked up place by place: a vocabulary may have thousands of special tokens.
        """
        special, sizes = self.special_tokens, self._special_sizes
        found = (
            text[start : start + size]
            for start, first in enumerate(text)
            for size in sizes.get(first, ())
            if text[start : start + size] in special
        )
        return max(found, key=len, default="")

    def encode_chat(self, text: str, controls: Sequence[tuple[int, int]] | None) -> tuple[int, ...]:
        """Returns the token ids of a rendered conversation.

        Args:
            text: The prompt.
            controls: (start, end) of the control tokens in it, in order; the same text elsewhere is ordinary text. None: all that
                the text has are such, so that the ids are those of `encode`.
        """
        if controls is None:
            return self.encode(text, add_special_tokens=False)
        assert self._hidden is not None, "places of control tokens are given where the tokenizer knows which tokens these are"
        return self._hidden.encode(text, controls)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token by its exact name, or None."""
        return self._tokenizer.token_to_id(token)


class HiddenControls:
    """A tokenizer that knows control tokens under secret names alone.

    All else is as in the tokenizer that it was made of: the names stand in the place of the tokens among the added tokens and in
    the vocabulary, with the same flags, so that a text is normalized and cut around them as ever. The text of a control token is
    ordinary text, and no merge makes it one token.

    Args:
        tokenizer: The tokenizer.
        controls: Its control tokens; each is an added token.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, controls: Sequence[str]) -> None:
        # Private-use characters and digits: no normalizer changes them, and a caller cannot guess the middle.
        secret = secrets.token_hex(16)
        self._names = {token: f"\U000f0000{secret}{place}\U000f0001" for place, token in enumerate(controls)}
        parts: dict[str, Any] = json.loads(tokenizer.to_str())
        for added in parts["added_tokens"]:
            added["content"] = self._names.get(added["content"], added["content"])
        _rename(parts["model"], self._names)
        parts["post_processor"] = parts["decoder"] = None
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(parts))
        self._ids: dict[int, int] = {}
        for token, name in self._names.items():
            here, there = self._tokenizer.token_to_id(name), tokenizer.token_to_id(token)
            assert here is not None and there is not None, "control tokens are added tokens"  # noqa: PT018
            if here != there:
                self._ids[here] = there

    def encode(self, text: str, controls: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Returns the ids of a text with control tokens at these places, and nowhere else."""
        pieces: list[str] = []
        last = 0
        for start, end in controls:
            pieces += (text[last:start], self._names[text[start:end]])
            last = end
        ids = self._tokenizer.encode("".join((*pieces, text[last:])), add_special_tokens=False).ids
        return tuple(self._ids.get(id_, id_) for id_ in ids) if self._ids else tuple(ids)


def _sizes_by_start(tokens: Iterable[str]) -> dict[str, frozenset[int]]:
    """Returns how long tokens are, by their first character."""
    sizes: dict[str, set[int]] = {}
    for token in tokens:
        sizes.setdefault(token[0], set()).add(len(token))
    return {first: frozenset(ones) for first, ones in sizes.items()}


def reads_disguises(tokenizer: tokenizers.Tokenizer, controls: Sequence[str]) -> bool:
    """Says whether a normalizer that changes more than spaces stands before a control token is recognised."""
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    step = parts.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = step["normalizers"] if step["type"] == "Sequence" else [step]
    if all(one["type"] == "Prepend" or (one["type"] == "Replace" and one["pattern"] == {"String": " "}) for one in steps):
        return False
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    normalized = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.normalized}
    return any(token in normalized or token in vocab for token in controls)


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Renames tokens of a model's vocabulary, as tokenizer.json has it, and drops the merges that made them."""
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): id_ for token, id_ in vocab.items()}
    else:  # pairs of token and score
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "merges" in model:
        pairs = (one.split(" ") if isinstance(one, str) else one for one in model["merges"])
        model["merges"] = [[left, right] for left, right in pairs if names.keys().isdisjoint((left, right, left + right))]


def _pieces(tokenizer: tokenizers.Tokenizer) -> Pieces:
    decoder: dict[str, Any] = json.loads(tokenizer.to_str()).get("decoder") or {}
    special = frozenset(id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    names = [tokenizer.id_to_token(id_) for id_ in range(size)]
    skipped = special | {id_ for id_, name in enumerate(names) if name is None}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        table = _byte_level_table()
        raw = tuple(b"" if id_ in skipped else _byte_level(name, table) for id_, name in enumerate(names))
        return Pieces(raw, frozenset(), 0, skipped)
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds:
        return _byte_fallback(names, skipped, steps)
    raise TokenizerError(f"tokenizer.json: decoder {kinds} is not supported; byte-level and byte-fallback tokenizers are")


def _max_token_bytes(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Returns a bound that holds for tokenizers that keep every byte: no normalizer, and pre-tokenizers that only cut."""
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    step = parts.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", [step])
    keeps = all(
        one.get("type") in ("ByteLevel", "Digits") or (one.get("type") == "Split" and one.get("behavior") != "Removed")
        for one in steps
    )
    added = tokenizer.get_added_tokens_decoder().values()
    if parts.get("normalizer") is not None or not keeps or any(token.lstrip or token.rstrip for token in added):
        return None
    return max((len(name.encode()) for name in tokenizer.get_vocab(with_added_tokens=True)), default=1)


def _byte_fallback(names: list[str | None], skipped: frozenset[int], steps: list[dict[str, Any]]) -> Pieces:
    strip_start = 0
    replacements: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None:
                raise TokenizerError("tokenizer.json: a decoder that replaces by a regular expression is not supported")
            replacements.append((pattern, step["content"]))
        elif step["type"] == "Strip":
            if step["content"] != " " or step["stop"]:
                raise TokenizerError("tokenizer.json: a decoder that strips anything but leading spaces is not supported")
            strip_start += step["start"]
    raw: list[bytes] = []
    byte_ids: set[int] = set()
    for id_, name in enumerate(names):
        if name is None or id_ in skipped:
            raw.append(b"")
            continue
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            try:
                raw.append(bytes([int(name[3:5], 16)]))
                byte_ids.add(id_)
                continue
            except ValueError:
                pass
        for pattern, content in replacements:
            name = name.replace(pattern, content)
        raw.append(name.encode())
    return Pieces(tuple(raw), frozenset(byte_ids), strip_start, skipped)


def _byte_level_table() -> dict[str, int]:
    """Returns the byte that each letter of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves; the others, in order, for the letters from U+0100 on.
    Source: the byte-to-unicode table of GPT-2's tokenizer.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(0x100 + place): byte for place, byte in enumerate(list(others))}


def _byte_level(name: str | None, table: dict[str, int]) -> bytes:
    if name is None:
        return b""
    try:
        return bytes(table[letter] for letter in name)
    except KeyError:  # an added token with letters outside the table stands for its own text
        return name.encode()
