"""JSON of strangers: size and depth bounded, no duplicate key, no number that is not finite."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from veneer.artifact.faults import Faults, quote

_MAX_NUMBER_CHARS = 64
# A string (closed or not, so that each match succeeds and the scan stays linear), or one bracket.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


class _NumberError(ValueError):
    pass


def parse_object(data: bytes, where: str, *, max_depth: int, faults: Faults) -> dict[str, Any] | None:
    """Reads a JSON object.

    Args:
        data: The text, UTF-8 without byte order mark; the caller has bounded its size.
        where: Name of the file for messages.
        max_depth: Nesting allowed; the object itself is depth 1.
        faults: Receives what is wrong.

    Returns:
        The object, or None when it cannot be used at all. Duplicate keys are noted as faults; the last value stands.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        faults.add(where, f"is not UTF-8 text: {error.reason} at byte {error.start}")
        return None
    if _depth_exceeds(text, max_depth):
        faults.add(where, f"is nested deeper than {max_depth} levels")
        return None

    def pairs_hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for key, value in pairs:
            if key in merged:
                faults.add(where, f"has the key {quote(key)} twice")
            merged[key] = value
        return merged

    try:
        value = json.loads(
            text, object_pairs_hook=pairs_hook, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_parse_constant
        )
    except _NumberError as error:
        faults.add(where, str(error))
        return None
    except (ValueError, RecursionError) as error:
        faults.add(where, f"is not JSON: {error}")
        return None
    if not isinstance(value, dict):
        faults.add(where, f"must be a JSON object, not {type(value).__name__}")
        return None
    return value


def _depth_exceeds(text: str, max_depth: int) -> bool:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        first = text[match.start()]
        if first in "[{":
            depth += 1
            if depth > max_depth:
                return True
        elif first in "]}":
            depth -= 1
    return False


def _parse_int(text: str) -> int:
    if len(text) > _MAX_NUMBER_CHARS:
        raise _NumberError(f"has a number of {len(text)} digits; at most {_MAX_NUMBER_CHARS} are allowed")
    return int(text)


def _parse_float(text: str) -> float:
    if len(text) > _MAX_NUMBER_CHARS:
        raise _NumberError(f"has a number of {len(text)} characters; at most {_MAX_NUMBER_CHARS} are allowed")
    value = float(text)
    if not math.isfinite(value):
        raise _NumberError(f"has the number {text}, which is too large")
    return value


def _parse_constant(text: str) -> NoReturn:
    raise _NumberError(f"has {text}; numbers must be finite")
