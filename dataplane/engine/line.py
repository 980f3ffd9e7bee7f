"""The waiting requests of one tenant, in the order in which they are tried. Integers only."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator

from dataplane.engine.sequence import Sequence


class Line:
    """Higher priorities come first; within one, first come is first. Owned by the tenant's account.

    Priorities order the requests of one tenant. Nothing that compares tenants looks at them, so they move nobody else.
    """

    __slots__ = ("_levels", "_order")

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, Sequence]] = {}
        self._order: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __bool__(self) -> bool:
        return bool(self._levels)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.submit.request_id in self._levels.get(sequence.submit.priority, ())

    def __iter__(self) -> Iterator[Sequence]:
        if len(self._order) == 1:
            return iter(self._levels[self._order[0]].values())
        return itertools.chain.from_iterable(self._levels[priority].values() for priority in self._order)

    def push(self, sequence: Sequence, *, front: bool = False) -> None:
        """Takes a request in behind those of its priority, or with `front` before them."""
        submit = sequence.submit
        level = self._levels.get(submit.priority)
        if level is None:
            level = self._levels[submit.priority] = OrderedDict()
            self._order = sorted(self._levels, reverse=True)
        level[submit.request_id] = sequence
        if front:
            level.move_to_end(submit.request_id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Takes a request out."""
        priority = sequence.submit.priority
        level = self._levels[priority]
        del level[sequence.submit.request_id]
        if not level:
            del self._levels[priority]
            self._order.remove(priority)
