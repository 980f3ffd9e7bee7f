"""Which copy goes first when room is needed, on the device and in host memory. Integers only."""

from __future__ import annotations

import heapq
from collections.abc import Generator
from typing import NamedTuple, Protocol

_MAX_DOUBLINGS = 32


class Policy(Protocol):
    """Says what a copy is worth. Owned by one `Victims`.

    Attributes:
        era: Worths are compared within one era only; when it changes, all are asked for anew.
    """

    era: int

    def note(self, version: str, *, uses: int = 1) -> None:
        """Notes uses of a version, whether there is a copy or not; 0 when it only came, or a use of it has ended."""

    def worth(self, version: str, *, size: int, cost: int) -> int:
        """Returns what a copy is worth that takes `size` of the room and costs `cost` to bring again."""


class Usage:
    """Worth is uses, each halved in a half-life, times what the copy costs to bring again, over what it takes of the room.

    What was not used yet counts as used once, when it came.
    Uses are remembered of versions without a copy too. So what is asked for once does not push out what is asked for often,
    however much comes at once, and what was pushed out in vain is known when it comes back.

    A half-life is counted in uses. Instead of halving all scores, what a use adds doubles: 2^(n / half-life) at the nth use,
    between the powers of two along a straight line. Scores thus keep their order when time passes. After 32 doublings all are cut
    by as many bits, which begins an era.

    Args:
        half_life: Uses of any version after which a use counts half.
        max_versions: Versions remembered at most; beyond, the half that was used least is forgotten.
    """

    def __init__(self, *, half_life: int, max_versions: int = 1 << 16) -> None:
        self.era = 0
        self._half_life = half_life
        self._max_versions = max_versions
        self._scores: dict[str, int] = {}
        self._num_uses = 0

    def note(self, version: str, *, uses: int = 1) -> None:
        """See `Policy.note`."""
        if not uses:
            return
        if self._num_uses == _MAX_DOUBLINGS * self._half_life:
            self._begin_era()
        self._scores[version] = self._scores.get(version, 0) + uses * self._gain()
        self._num_uses += 1
        if len(self._scores) > self._max_versions:
            self._forget_half()

    def worth(self, version: str, *, size: int, cost: int) -> int:
        """See `Policy.worth`."""
        return (self._scores.get(version, self._gain()) * cost << 32) // size

    def _gain(self) -> int:
        doublings, part = divmod(self._num_uses, self._half_life)
        return (self._half_life + part) << doublings

    def _begin_era(self) -> None:
        self.era += 1
        self._num_uses = 0
        self._scores = {version: rest for version, score in self._scores.items() if (rest := score >> _MAX_DOUBLINGS)}

    def _forget_half(self) -> None:
        kept = heapq.nlargest(self._max_versions // 2, self._scores, key=self._scores.__getitem__)
        self._scores = {version: self._scores[version] for version in kept}


class Recency:
    """Worth is the time at which a version came or was used last, whatever its size.

    Args:
        max_versions: Versions remembered at most.
    """

    def __init__(self, *, max_versions: int = 1 << 16) -> None:
        self.era = 0
        self._max_versions = max_versions
        self._used_at: dict[str, int] = {}
        self._clock = 0

    def note(self, version: str, *, uses: int = 1) -> None:  # noqa: ARG002 - one more use is as late as two
        """See `Policy.note`."""
        self._clock += 1
        self._used_at.pop(version, None)
        self._used_at[version] = self._clock
        if len(self._used_at) > self._max_versions:
            del self._used_at[next(iter(self._used_at))]

    def worth(self, version: str, *, size: int, cost: int) -> int:  # noqa: ARG002 - as above
        """See `Policy.worth`."""
        return self._used_at.get(version, 0)


class _Copy(NamedTuple):
    serial: int
    size: int
    cost: int


class Victims:
    """The copies that there are, and the order in which they go. Owned by who owns the copies, and called under its lock.

    A heap in which entries that are out of date stay until they come up: adding, using and taking a copy away cost the
    logarithm of their number, and so does each copy that `in_order` is asked for.

    Args:
        policy: Says what a copy is worth.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._era = policy.era
        self._copies: dict[str, _Copy] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._copies)

    def note(self, version: str, *, uses: int = 1) -> None:
        """Notes uses of a version, whether there is a copy or not; see `Policy.note`."""
        self._policy.note(version, uses=uses)
        if self._policy.era != self._era:
            self._era = self._policy.era
            self._rank_all()
        elif copy := self._copies.get(version):
            self._rank(version, size=copy.size, cost=copy.cost)

    def add(self, version: str, *, size: int, cost: int = 1) -> None:
        """Notes that there is a copy, or that its size or cost is another now.

        Args:
            version: The version.
            size: What it takes of the room; at least 1.
            cost: What it costs to bring again.
        """
        self._rank(version, size=max(1, size), cost=cost)

    def discard(self, version: str) -> None:
        """Notes that there is no copy any more."""
        self._copies.pop(version, None)

    def in_order(self) -> Generator[str]:
        """Yields the versions of all copies, worth least first, of equals the one noted longest ago.

        Nothing may be noted, added or discarded before the generator is exhausted or closed.
        """
        seen: list[tuple[int, int, str]] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._is_valid(entry):
                    seen.append(entry)
                    yield entry[2]
        finally:
            for entry in seen:
                heapq.heappush(self._heap, entry)

    def _is_valid(self, entry: tuple[int, int, str]) -> bool:
        copy = self._copies.get(entry[2])
        return copy is not None and copy.serial == entry[1]

    def _rank(self, version: str, *, size: int, cost: int) -> None:
        self._serial += 1
        self._copies[version] = _Copy(self._serial, size, cost)
        heapq.heappush(self._heap, (self._policy.worth(version, size=size, cost=cost), self._serial, version))
        if len(self._heap) > 2 * len(self._copies) + 64:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def _rank_all(self) -> None:
        self._heap.clear()
        for version, copy in sorted(self._copies.items(), key=lambda item: item[1].serial):
            self._rank(version, size=copy.size, cost=copy.cost)
