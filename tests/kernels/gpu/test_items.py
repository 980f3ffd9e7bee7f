from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.items import build_items
from kernels.gpu.metadata import StepMetadata
from kernels.rows import build_rank_rows

ROWS = st.lists(st.integers(-1, 5), min_size=1, max_size=70)
RANKS = st.lists(st.integers(0, 40), min_size=6, max_size=6)


@given(ROWS, RANKS, st.sampled_from([16, 64]))
def test_each_tile_meets_the_blocks_of_its_own_adapters_in_the_order_of_the_list(row_slot, ranks, tile_rows):
    rows = build_rank_rows(row_slot, np.array(ranks, dtype=np.int32))
    items = build_items(rows, tile_rows=tile_rows)
    tiles = [set(row_slot[start : start + tile_rows]) - {-1} for start in range(0, len(row_slot), tile_rows)]
    expected = [
        (tile, slot, first) for tile, slots in enumerate(tiles) for slot in sorted(slots) for first in range(0, ranks[slot], 16)
    ]
    assert list(zip(items.tile.tolist(), items.slot.tolist(), items.rank.tolist(), strict=True)) == expected
    assert items.tile_start.tolist() == [sum(tile < end for tile, _, _ in expected) for end in range(len(tiles) + 1)]


def test_a_step_overwrites_the_last_behind_the_same_addresses():
    metadata = StepMetadata(max_rows=40, max_items=9, max_tiles=3, device=torch.device("cpu"))
    addresses = [part.data_ptr() for part in (metadata.row_slot, metadata.item_slot, metadata.num_items)]
    for row_slot in ([0, 1, -1] * 12, [1], [-1, 0]):
        rows = build_rank_rows(row_slot, {0: 5, 1: 17})
        items = build_items(rows, tile_rows=16)
        metadata.fill(rows.row_slot, items)
        count = int(metadata.num_items[0])
        assert metadata.row_slot[: len(row_slot)].tolist() == row_slot
        assert count == items.slot.size
        for section, values in (
            (metadata.item_tile, items.tile),
            (metadata.item_slot, items.slot),
            (metadata.item_rank, items.rank),
            (metadata.tile_start, items.tile_start),
        ):
            assert section[: values.size].tolist() == values.tolist()
    assert addresses == [part.data_ptr() for part in (metadata.row_slot, metadata.item_slot, metadata.num_items)]


def test_every_section_starts_where_wide_loads_may():
    metadata = StepMetadata(max_rows=5, max_items=3, max_tiles=2, device=torch.device("cpu"))
    sections = (metadata.row_slot, metadata.item_tile, metadata.item_slot, metadata.item_rank, metadata.tile_start)
    assert {(part.data_ptr() - metadata.row_slot.data_ptr()) % 128 for part in sections} == {0}
