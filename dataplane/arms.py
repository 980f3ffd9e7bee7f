"""Which arm of a traffic split answers a request: a pure function of the split and the request's unit."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from veneer.errors import InternalError

_POINT_BITS: Final = 24
"""Of the points by which the control plane assigns units to arms."""
_DRAWN_BITS: Final = 128


def draw_arm(weights: Sequence[int], points: Sequence[tuple[int, ...]], *, salt: bytes, unit: str, sticky: bool) -> int:
    """Returns the index of the arm that a unit gets.

    A point is drawn by HMAC-SHA-256 of the unit and looked up among the points of the arms. The control plane gives every arm its
    points, in proportion to its weight; whatever the order of the arms, the same split gives a unit the same arm. Splits with
    different secrets are independent.

    Arms without points are of a split that was set by a release before these were kept: their spans are consecutive, in the order
    of the arms, as wide as their weights.

    Args:
        weights: Weight of each arm, at least 1.
        points: Points of each arm: start, end, start, end and so on; an end is not part of its span. Empty: see above.
        salt: Secret of the split.
        unit: Key of the unit, or the request's identifier when there is no unit.
        sticky: True when `unit` is the caller's unit key; units and request identifiers never share points.

    Raises:
        InternalError: The points of the arms leave out the point of this unit.
    """
    if len(weights) == 1:
        return 0
    message = (b"unit\0" if sticky else b"request\0") + unit.encode()
    drawn = int.from_bytes(hmac.digest(salt, message, hashlib.sha256)[: _DRAWN_BITS // 8], "big")
    if not all(points):
        return _by_weight(weights, drawn)
    point = drawn >> _DRAWN_BITS - _POINT_BITS
    for index, spans in enumerate(zip(one[::2], one[1::2], strict=True) for one in points):
        if any(start <= point < end for start, end in spans):
            return index
    raise InternalError("the arms of the split do not serve all units")


def _by_weight(weights: Sequence[int], drawn: int) -> int:
    point = drawn * sum(weights) >> _DRAWN_BITS
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    raise AssertionError("the point lies below the sum of the weights")
