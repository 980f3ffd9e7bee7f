"""Room in the arena: which units an image takes, and where its blocks are cut. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """Adjacent units that hold adjacent blocks of one image.

    Attributes:
        first_unit: First unit of the arena.
        num_units: Number of units.
        first_block: First block of the image that lies here.
        num_blocks: Number of blocks that lie here, one after the other from the start of the first unit.
    """

    first_unit: int
    num_units: int
    first_block: int
    num_blocks: int


class Units:
    """Free and taken units of an arena. Owned by one `Residency`.

    An image takes the smallest hole that holds it whole; if there is none, a few holes from the largest down, cut between blocks,
    so that one offset reaches a whole block.

    Args:
        num_units: Units in all.
        unit_bytes: Bytes of one unit.
    """

    def __init__(self, num_units: int, *, unit_bytes: int) -> None:
        self.num_units = num_units
        self.unit_bytes = unit_bytes
        self._holes: dict[int, int] = {0: num_units} if num_units else {}

    def copy(self) -> Units:
        """Returns a copy on which to try what would fit."""
        other = Units(0, unit_bytes=self.unit_bytes)
        other.num_units, other._holes = self.num_units, dict(self._holes)
        return other

    @property
    def free(self) -> int:
        """Units that nobody has."""
        return sum(self._holes.values())

    @property
    def used(self) -> int:
        """Units that somebody has."""
        return self.num_units - self.free

    @property
    def largest_hole(self) -> int:
        """Units of the largest hole; against `free` it measures fragmentation."""
        return max(self._holes.values(), default=0)

    def needed(self, blocks: Sequence[int]) -> int:
        """Returns the units that an image with blocks of these sizes in bytes takes when it lies in one piece; at least one."""
        return max(1, -(-sum(blocks) // self.unit_bytes))

    def take(self, blocks: Sequence[int]) -> tuple[Extent, ...] | None:
        """Takes room for an image with blocks of these sizes in bytes, or returns None and takes nothing."""
        size = self.needed(blocks)
        fitting = [(length, start) for start, length in self._holes.items() if length >= size]
        if fitting:
            _, start = min(fitting)
            extents: tuple[Extent, ...] | None = (Extent(start, size, 0, len(blocks)),)
        else:
            extents = self._cut(blocks)
        for extent in extents or ():
            self._remove(extent)
        return extents

    def give(self, extents: Sequence[Extent]) -> None:
        """Gives back what `take` returned."""
        for extent in extents:
            self._holes[extent.first_unit] = extent.num_units
        merged: dict[int, int] = {}
        end = last = -1
        for start, length in sorted(self._holes.items()):
            assert start >= end, "units were given back twice"
            if start == end:
                merged[last] += length
            else:
                merged[start], last = length, start
            end = start + length
        self._holes = merged

    def _cut(self, blocks: Sequence[int]) -> tuple[Extent, ...] | None:
        extents: list[Extent] = []
        first = 0
        for length, start in sorted(((length, start) for start, length in self._holes.items()), reverse=True):
            used, last = 0, first
            while last < len(blocks) and used + blocks[last] <= length * self.unit_bytes:
                used += blocks[last]
                last += 1
            if last > first:
                extents.append(Extent(start, -(-used // self.unit_bytes), first, last - first))
            first = last
            if first == len(blocks):
                return tuple(extents)
        return None

    def _remove(self, extent: Extent) -> None:
        start = extent.first_unit
        length = self._holes.pop(start)
        if length > extent.num_units:
            self._holes[start + extent.num_units] = length - extent.num_units
