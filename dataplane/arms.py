"""Which arm of a traffic split answers a request: a pure function of the split's secret and the request's unit."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence


def draw_arm(weights: Sequence[int], *, salt: bytes, unit: str, sticky: bool) -> int:
    """Returns the index of the arm that a unit gets.

    A point in [0, sum(weights)) is drawn by HMAC-SHA-256 and looked up among the cumulative weights. So a unit keeps its arm
    while the weights stay, moving x % of the weight between neighbouring arms moves x % of the units, and splits with different
    secrets are independent.

    Args:
        weights: Weight of each arm, at least 1.
        salt: Secret of the split.
        unit: Key of the unit, or the request's identifier when there is no unit.
        sticky: True when `unit` is the caller's unit key; units and request identifiers never share points.
    """
    if len(weights) == 1:
        return 0
    message = (b"unit\0" if sticky else b"request\0") + unit.encode()
    point = int.from_bytes(hmac.digest(salt, message, hashlib.sha256)[:16], "big") * sum(weights) >> 128
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    raise AssertionError("the point lies below the sum of the weights")
