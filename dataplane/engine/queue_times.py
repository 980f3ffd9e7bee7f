"""How long requests waited in the engine until they first ran, counted for a histogram. Standard library only."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
"""Upper bounds of the buckets, in seconds; one more bucket takes what is above them."""


class QueueTimes:
    """Counts since the engine's start. Owned by the step loop.

    Attributes:
        total_s: Sum of all waits.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    @property
    def counts(self) -> tuple[int, ...]:
        """Waits in each bucket."""
        return tuple(self._counts)

    def observe(self, came: Iterable[float], now: float) -> None:
        """Takes requests that run for the first time, by when they came."""
        for queued_at in came:
            wait_s = now - queued_at
            self._counts[bisect.bisect_left(BOUNDS_S, wait_s)] += 1
            self.total_s += wait_s
