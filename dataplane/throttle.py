"""How many bytes loads ahead of requests may take: a bucket that fills with time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Throttle:
    """A bucket of bytes. Owned by the event loop.

    Every load takes its bytes; only loads ahead wait until the bucket is not empty. So what requests wait for comes first, and
    what is left of the rate is for loads ahead.

    Args:
        bytes_per_s: Rate at which the bucket fills; 0 for no limit.
        burst_s: How many seconds of it the bucket holds, and for how many at most loads ahead pay for what others took.
        clock: Monotonic seconds.
    """

    def __init__(self, bytes_per_s: float, *, burst_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._depth = bytes_per_s * burst_s
        self._clock = clock
        self._level = self._depth
        self._seen_s = clock()

    def take(self, num_bytes: int, *, ahead: bool) -> None:
        """Takes bytes, whether they are there or not; those of a load ahead are owed in full."""
        self._fill()
        level = self._level - num_bytes
        self._level = level if ahead else max(level, min(self._level, -self._depth))

    def wait_s(self) -> float:
        """Returns for how long a load ahead has to wait now."""
        if not self._bytes_per_s:
            return 0.0
        self._fill()
        return max(0.0, -self._level / self._bytes_per_s)

    def _fill(self) -> None:
        now_s = self._clock()
        self._level = min(self._depth, self._level + (now_s - self._seen_s) * self._bytes_per_s)
        self._seen_s = now_s
