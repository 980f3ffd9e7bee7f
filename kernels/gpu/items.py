"""The step's list of items: which block of rank rows each tile of rows has to meet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.rows import ALIGN, RankRows

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Items:
    """One item is one block of ALIGN rank rows of one adapter, for one tile of rows that has a row of that adapter.

    A block never mixes adapters, since each starts on a multiple of ALIGN. A decode step of one tile has one item a block; a step
    of several tiles repeats a block for each tile that needs it, and no tile meets the adapters of another.

    Attributes:
        tile_start: int32 [tiles + 1], where the items of each tile start.
        tile: int32 [P], tile of each item, ascending.
        slot: int32 [P], slot of its adapter; ascending within a tile.
        rank: int32 [P], first rank row of the block inside the adapter; ascending within an adapter.
    """

    tile_start: Int32
    tile: Int32
    slot: Int32
    rank: Int32


def build_items(rows: RankRows, *, tile_rows: int) -> Items:
    """Builds the items of a step.

    Args:
        rows: The step's rows and list, aligned to ALIGN.
        tile_rows: Rows of a tile.

    Returns:
        The items by tile, then in the order of the list; the order inside a tile does not depend on that of its rows.
    """
    block_slot, block_rank = rows.list_slot[::ALIGN], rows.list_rank[::ALIGN]
    num_tiles = -(-rows.row_slot.size // tile_rows)
    if num_tiles == 1:
        ends = np.array([0, block_slot.size], dtype=np.int32)
        return Items(ends, np.zeros(block_slot.size, dtype=np.int32), block_slot, block_rank)
    most = int(rows.row_slot.max(initial=0))
    present = np.zeros((num_tiles, most + 2), dtype=np.bool_)  # the last column takes the rows without an adapter
    present[np.arange(rows.row_slot.size) // tile_rows, rows.row_slot] = True
    tile, block = np.nonzero(present[:, block_slot])
    tile_start = np.searchsorted(tile, np.arange(num_tiles + 1))
    return Items(tile_start.astype(np.int32), tile.astype(np.int32), block_slot[block], block_rank[block])
