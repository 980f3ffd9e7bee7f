"""The step's list of rank rows: which row of the batch meets which rank rows of which adapter.

Every form of the low-rank product walks one flat list a step. An entry names one rank row of one active adapter; row `t` of
the batch meets entry `j` when both name the same slot, and the entry is live at (layer, slice) when the adapter has that many
rank rows there. So mixed ranks, missing layers, missing modules and base rows are all the same case, and the number of
operations of a step does not depend on its mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BASE = -1
"""Slot of a row that has no adapter."""

HOLE = -2
"""Slot of a list entry that pads; differs from BASE so that a base row never meets it."""

ABSENT = -1
"""Offset of a gain or shift that an adapter does not have."""

ALIGN = 16
"""Each adapter's entries start on a multiple of this: the K step of bf16 matrix instructions, so that none mixes two adapters."""

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RankRows:
    """One step's rows and list; the whole model uses the same.

    Attributes:
        row_slot: int32 [T], slot of each row of the batch, BASE for rows without an adapter.
        list_slot: int32 [J], slot of each entry, HOLE for padding.
        list_rank: int32 [J], rank row inside the adapter; 0 in holes.
    """

    row_slot: Int32
    list_slot: Int32
    list_rank: Int32

    @property
    def is_empty(self) -> bool:
        """Whether no row has an adapter, so that nothing has to run."""
        return self.list_slot.size == 0


def aligned_rank(rank: int, align: int = ALIGN) -> int:
    """Returns the list entries that an adapter of this largest rank takes, its padding included."""
    return -(-rank // align) * align


def build_rank_rows(row_slot: npt.ArrayLike, slot_rank: Mapping[int, int] | Int32, *, align: int = ALIGN) -> RankRows:
    """Builds the list of a step: each distinct active adapter once, to its largest rank, padded to a multiple of `align`.

    Args:
        row_slot: [T], slot of each row, BASE for rows without an adapter.
        slot_rank: Largest rank over all layers and slices of each slot (`Descriptors.largest_rank`, or a mapping).
        align: Multiple on which each adapter's entries start.

    Returns:
        The list with adapters in ascending order of slot, so that it does not depend on the order of the rows. An adapter whose
        largest rank is 0 takes no entry.
    """
    rows = np.asarray(row_slot, dtype=np.int32)
    slots = np.unique(rows[rows >= 0])
    ranks = np.array([slot_rank[slot] for slot in slots.tolist()], dtype=np.int32)
    sizes = -(-ranks // align) * align
    list_rank = np.arange(sizes.sum(), dtype=np.int32) - np.repeat(np.cumsum(sizes) - sizes, sizes).astype(np.int32)
    hole = list_rank >= np.repeat(ranks, sizes)
    list_slot = np.where(hole, np.int32(HOLE), np.repeat(slots, sizes))
    list_rank[hole] = 0
    return RankRows(row_slot=rows, list_slot=list_slot, list_rank=list_rank)
