"""How much of something came in the last seconds."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable


class Window:
    """A sum over the last seconds, in slots of one. Owned by the event loop.

    What came is counted until the window's length after the end of the second in which it came: never for too short.

    Args:
        length_s: Length of the window.
        clock: Monotonic seconds.
    """

    def __init__(self, length_s: int = 60, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._length_s = length_s
        self._clock = clock
        self._slots: deque[tuple[int, int]] = deque()
        self._total = 0

    @property
    def total(self) -> int:
        """What came in the last seconds."""
        first = math.floor(self._clock()) - self._length_s
        while self._slots and self._slots[0][0] < first:
            self._total -= self._slots.popleft()[1]
        return self._total

    def add(self, amount: int) -> None:
        """Something comes now."""
        if amount <= 0:
            return
        second = math.floor(self._clock())
        self._total += amount
        if self._slots and self._slots[-1][0] == second:
            amount += self._slots.pop()[1]
        self._slots.append((second, amount))

    def wait_s(self, amount: int) -> float:
        """Seconds until so much of it has left the window; the whole length when it never holds as much."""
        left = amount
        for second, count in self._slots:
            left -= count
            if left <= 0:
                return max(second + self._length_s + 1 - self._clock(), 0.0)
        return float(self._length_s)
