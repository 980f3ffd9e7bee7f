"""Which blocks of the gathered buffers hold which adapter. Integers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placed:
    """The blocks of one adapter.

    Attributes:
        epoch: Epoch of the slot when its rows were gathered.
        start: First block.
        size: Number of blocks.
    """

    epoch: int
    start: int
    size: int

    @property
    def end(self) -> int:
        """First block after it."""
        return self.start + self.size


class Placement:
    """Contiguous ranges of blocks for the active adapters, kept from step to step so that only newcomers are copied.

    An adapter that leaves the batch keeps its range until another needs the room: when it comes back nothing is copied. The range
    that a step computes ends at the highest active block, so active adapters high up move down once there are more holes than
    `slack` of what is needed and four more: a hole costs 1.4 ms a step, a copied block some 3 ms once (SmolLM2-135M).
    Owned by one `CpuLowRank`.

    Args:
        capacity: Blocks in all.
        slack: Share of holes that is tolerated, relative to the blocks in use.
    """

    def __init__(self, capacity: int, *, slack: float = 0.25) -> None:
        self.capacity = capacity
        self._slack = slack
        self._placed: dict[int, Placed] = {}

    def __getitem__(self, slot: int) -> Placed:
        return self._placed[slot]

    def drop(self, slot: int) -> None:
        """Forgets a slot's range; unknown slots are ignored."""
        self._placed.pop(slot, None)

    def update(self, active: Mapping[int, tuple[int, int]]) -> tuple[list[int], int]:
        """Places all active adapters.

        Args:
            active: slot -> (epoch, blocks that it needs); together at most `capacity` blocks.

        Returns:
            The slots whose rows must be copied to their (new) range, and the end of the highest active range.
        """
        needed = sum(size for _, size in active.values())
        assert needed <= self.capacity, f"{needed} blocks of {self.capacity}"
        copies = [slot for slot, (epoch, size) in active.items() if not self._holds(slot, epoch, size)]
        for slot in copies:
            self.drop(slot)
        kept = {slot for slot in active if slot not in copies}
        for slot in sorted(copies, key=lambda slot: -active[slot][1]):
            epoch, size = active[slot]
            start = self._hole(size, kept, self.capacity)
            if start is None:  # enough room, but in pieces: start over
                return self._replace(active), needed
            self._occupy(slot, Placed(epoch, start, size))
            kept.add(slot)
        end = max((self._placed[slot].end for slot in active), default=0)
        if end > needed * (1 + self._slack) + 4:
            end = self._compact(active, copies, kept)
        return copies, end

    def _holds(self, slot: int, epoch: int, size: int) -> bool:
        placed = self._placed.get(slot)
        return placed is not None and placed.epoch == epoch and placed.size == size

    def _hole(self, size: int, kept: set[int], limit: int) -> int | None:
        """Returns the lowest start of a range below `limit` that no kept adapter overlaps."""
        start = 0
        for placed in sorted((self._placed[slot] for slot in kept), key=lambda placed: placed.start):
            if placed.start - start >= size:
                break
            start = placed.end
        return start if start + size <= limit else None

    def _occupy(self, slot: int, placed: Placed) -> None:
        for other, range_ in list(self._placed.items()):
            if range_.start < placed.end and placed.start < range_.end:
                del self._placed[other]
        self._placed[slot] = placed

    def _compact(self, active: Mapping[int, tuple[int, int]], copies: list[int], kept: set[int]) -> int:
        while True:
            highest = max(active, key=lambda slot: self._placed[slot].end)
            epoch, size = active[highest]
            kept.discard(highest)
            start = self._hole(size, kept, self._placed[highest].start)
            kept.add(highest)
            if start is None:
                return self._placed[highest].end
            del self._placed[highest]
            self._occupy(highest, Placed(epoch, start, size))
            if highest not in copies:
                copies.append(highest)

    def _replace(self, active: Mapping[int, tuple[int, int]]) -> list[int]:
        self._placed.clear()
        start = 0
        for slot, (epoch, size) in active.items():
            self._placed[slot] = Placed(epoch, start, size)
            start += size
        return list(active)
