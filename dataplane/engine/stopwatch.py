"""Where the time of steps goes."""

from __future__ import annotations

import time


class Stopwatch:
    """Sums up seconds by part. Owned by one thread; others may read `seconds`, since each part is written whole.

    Attributes:
        seconds: Seconds by part, since it was made.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def start(self) -> None:
        """Begins to count; what passed since the last call counts for nothing."""
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """Adds what passed since the last call to a part."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now
