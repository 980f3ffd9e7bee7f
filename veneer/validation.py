"""Checks messages against the rules that their `.proto` files declare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import protovalidate
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from veneer.errors import InvalidArgumentError, Violation

_VALIDATOR = protovalidate.Validator()  # compiles the rules of a message type once, at its first message
_STORED: Final = "veneer.controlplane."
"""Package whose texts go to the database, which holds no NUL character. A prompt may have one."""
_NUL: Final = "must not hold a NUL character"
_SECOND_NS: Final = 1_000_000_000


def validate(message: Message) -> None:
    """Checks one message.

    Raises:
        InvalidArgumentError: With every violation of the declared rules, and, of a message of the control plane's API, every text
            that holds a NUL character and every time that is none.
    """
    found = [_violation(one.proto) for one in _VALIDATOR.collect_violations(message)]
    if message.DESCRIPTOR.full_name.startswith(_STORED):
        found += _not_kept(message, "")
    if found:
        raise InvalidArgumentError.of(found)


def _not_kept(message: Message, prefix: str) -> Iterator[Violation]:
    """What of a message cannot be kept: texts that hold a NUL character, and times that are none."""
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING:
            if any("\0" in text for text in (value if field.is_repeated else [value])):
                yield Violation(path, _NUL)
        elif field.message_type is None:
            continue
        elif field.message_type.GetOptions().map_entry:
            if any(isinstance(part, str) and "\0" in part for pair in value.items() for part in pair):
                yield Violation(path, _NUL)
        elif field.message_type.full_name == "google.protobuf.Timestamp":
            if not 0 <= value.nanos < _SECOND_NS:
                yield Violation(f"{path}.nanos", "must be 0 to 999999999")
        else:
            for one in value if field.is_repeated else [value]:
                yield from _not_kept(one, f"{path}.")


def _violation(proto: Any) -> Violation:
    elements = proto.field.elements if proto.field is not None else ()
    return Violation(_path(elements) or "message", proto.message or proto.rule_id)


def _path(elements: Iterable[Any]) -> str:
    """Field path as people write it: `sampling.stop[1]`."""
    parts = []
    for element in elements:
        subscript = element.subscript
        parts.append(element.field_name if subscript is None else f"{element.field_name}[{subscript.value}]")
    return ".".join(parts)
