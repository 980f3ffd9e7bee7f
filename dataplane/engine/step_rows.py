"""How many rank rows steps walk, counted for a histogram."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kernels.rows import BASE, aligned_rank

RANK_ROW_BOUNDS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Upper bounds of the buckets; one more bucket takes what is above them."""


class StepRows:
    """Counts since the engine's start. Owned by the step loop.

    Attributes:
        total: Rank rows of all steps.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(RANK_ROW_BOUNDS) + 1)
        self.total = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Steps in each bucket."""
        return tuple(self._counts)

    def observe(self, slots: Iterable[int], largest_rank: npt.NDArray[np.int32]) -> None:
        """Takes a step: the distinct slots of its rows, and the largest rank by slot."""
        rows = sum(aligned_rank(int(largest_rank[slot])) for slot in slots if slot != BASE)
        self._counts[bisect.bisect_left(RANK_ROW_BOUNDS, rows)] += 1
        self.total += rows
