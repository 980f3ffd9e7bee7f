"""Checks messages against the rules that their `.proto` files declare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import protovalidate
from google.protobuf.message import Message

from veneer.errors import InvalidArgumentError, Violation

_VALIDATOR = protovalidate.Validator()  # compiles the rules of a message type once, at its first message


def validate(message: Message) -> None:
    """Checks one message.

    Raises:
        InvalidArgumentError: With every violation of the declared rules.
    """
    found = _VALIDATOR.collect_violations(message)
    if found:
        raise InvalidArgumentError.of([_violation(one.proto) for one in found])


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
