"""Bounds of numbers in JSON schemas, written so that llguidance lets no number through that they exclude.

The library takes the excluded number where an exclusive bound is whole, is nearer to 0, and the other lies before the next whole
number (`2 < x < 2.5` takes 2, `-0.5 < x < 0` takes -0). There the bound becomes a float just beyond it. Bounds of integers become
inclusive integers.
"""

from __future__ import annotations

import json
import math
import sys
from fractions import Fraction
from typing import Any, Self

_LARGEST = 1 << 53
"""Integers beyond it are not all floats, and the library holds bounds as floats."""
_SATURATED = (1 << 63) - 1
"""From here on it takes the largest integer of 64 bits for any bound."""
_TINY = 1e-30
"""Takes the place of the float next to 0, which would have 324 digits; a text has no smaller number without an exponent."""
_STEPS = 4
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SAME = ("anyOf", "allOf", "oneOf", "not", "if", "then", "else")
"""Keywords whose schemas are about the same value as the schema around them."""
_OTHERS = (
    "prefixItems", "additionalProperties", "additionalItems", "items", "contains", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


class _Real(float):
    """A float that remembers what was written."""

    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number


def with_exact_ranges(schema: str) -> str:
    """Returns a schema that allows the same.

    Raises:
        ValueError: It is no JSON, nests too deeply, or has a bound that cannot be enforced; the message names it.
    """
    try:
        parsed = json.loads(schema, parse_float=_Real, parse_constant=_refuse_constant)
        return json.dumps(_rewritten(parsed, "$", is_whole=False))
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _rewritten(schema: Any, at: str, *, is_whole: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    is_whole = _is_whole(schema, is_whole=is_whole)
    for key in _MAPS:
        if isinstance(inner := schema.get(key), dict):
            result[key] = {name: _rewritten(one, f"{at}.{key}.{name}", is_whole=False) for name, one in inner.items()}
    for key in (*_SAME, *_OTHERS):
        inner, is_same = schema.get(key), is_whole and key in _SAME
        if isinstance(inner, list):
            result[key] = [_rewritten(one, f"{at}.{key}[{place}]", is_whole=is_same) for place, one in enumerate(inner)]
        elif isinstance(inner, dict):
            result[key] = _rewritten(inner, f"{at}.{key}", is_whole=is_same)
    for key in (*_BOUNDS, "multipleOf"):
        if isinstance(number := schema.get(key), int | float) and abs(number) > sys.float_info.max:
            raise ValueError(f"{at}.{key} is too large to be enforced")
    for key in ("const", "enum"):
        _check_written(schema.get(key), f"{at}.{key}")
    _bound(schema, result, is_whole=is_whole)
    return result


def _check_written(value: Any, at: str) -> None:
    """Refuses a number that the library would write as another, since it holds it as a float."""
    if isinstance(value, dict):
        for name, one in value.items():
            _check_written(one, f"{at}.{name}")
    elif isinstance(value, list):
        for place, one in enumerate(value):
            _check_written(one, f"{at}[{place}]")
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"{at} is an integer beyond 2^53, which would be written as another; give it as a string")
    elif isinstance(value, _Real) and not (math.isfinite(value) and Fraction(repr(float(value))) == Fraction(value.text)):
        raise ValueError(f"{at} has more digits than a float holds, and would be written as another number")


def _is_whole(schema: dict[str, Any], *, is_whole: bool) -> bool:
    """Whether all numbers that a schema allows are integers; without a type it is as in the schema around it."""
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    return "integer" in types and "number" not in types if isinstance(types, list) else is_whole


def _bound(schema: dict[str, Any], result: dict[str, Any], *, is_whole: bool) -> None:
    """Replaces both bounds of each side by the tighter of them."""
    for closed, opened, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        keys = [key for key in (closed, opened) if key in schema]
        if not keys or any(isinstance(schema[key], bool) or not isinstance(schema[key], int | float) for key in keys):
            continue  # what is no number the library refuses
        tightest = max(keys, key=lambda key: (sign * _exact(schema[key]), key == opened))
        bound, is_open = sign * _exact(schema[tightest]), tightest == opened
        result.pop(closed, None)
        result.pop(opened, None)
        if is_whole:
            result[closed] = sign * _next_integer(bound, is_open=is_open)
        elif is_open and bound >= 0 and bound.denominator == 1:
            result[opened] = sign * _next_float(float(bound))
        else:
            result[tightest] = schema[tightest]


def _exact(number: float) -> Fraction:
    return Fraction(number.text) if isinstance(number, _Real) else Fraction(number)


def _next_integer(bound: Fraction, *, is_open: bool) -> int:
    """Returns the least integer from a bound on that a float holds."""
    least = math.floor(bound) + 1 if is_open else math.ceil(bound)
    if not _LARGEST < abs(least) < _SATURATED:
        return least
    number = float(least)
    return int(number if number >= least else math.nextafter(number, math.inf))


def _next_float(number: float) -> float:
    """Returns a float just above a number: a few steps, since the library reads long decimals with an error of a step or two."""
    if number == 0:
        return _TINY
    for _ in range(_STEPS):
        number = math.nextafter(number, math.inf)
    return number
