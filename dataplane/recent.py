"""When requests asked for versions last."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

_LATELY_S = 600.0
_JUST_NOW_S = 30.0  # the next request is likely
_MAX_REMEMBERED = 1 << 16


class Recent:
    """The versions that requests asked for, and when. Owned by the event loop.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked: OrderedDict[str, float] = OrderedDict()

    def note(self, version: str) -> bool:
        """Notes that a request asks for a version; returns whether another did in the last ten minutes."""
        now_s = self._clock()
        before_s = self._asked.pop(version, -math.inf)
        self._asked[version] = now_s
        if len(self._asked) > _MAX_REMEMBERED:
            self._asked.popitem(last=False)
        return now_s - before_s < _LATELY_S

    def was_asked_just_now(self, version: str) -> bool:
        """Whether a request asked for a version in the last half minute."""
        return self._clock() - self._asked.get(version, -math.inf) < _JUST_NOW_S

    def lately(self) -> Iterator[str]:
        """Yields the versions that were asked for in the last ten minutes, the last first."""
        since_s = self._clock() - _LATELY_S
        for version, asked_s in reversed(self._asked.items()):
            if asked_s < since_s:
                return
            yield version
