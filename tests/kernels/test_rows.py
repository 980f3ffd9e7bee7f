from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.rows import BASE, HOLE, aligned_rank, build_rank_rows


@given(st.lists(st.integers(-1, 5)), st.lists(st.integers(0, 40), min_size=6, max_size=6), st.sampled_from([1, 8, 16, 32]))
def test_each_active_adapter_is_listed_once_to_its_largest_rank_on_an_aligned_start(row_slot, ranks, align):
    rows = build_rank_rows(row_slot, np.array(ranks, dtype=np.int32), align=align)
    listed = rows.list_slot[rows.list_slot != HOLE].tolist()
    active = sorted(set(row_slot) - {BASE})
    assert listed == [slot for slot in active for _ in range(ranks[slot])]
    assert rows.list_slot.size == sum(aligned_rank(ranks[slot], align) for slot in active)
    assert rows.is_empty == (not listed)
    for slot in set(listed):
        positions = np.flatnonzero(rows.list_slot == slot)
        assert positions[0] % align == 0
        assert rows.list_rank[positions].tolist() == list(range(ranks[slot]))


def test_the_list_does_not_depend_on_the_order_of_the_rows():
    forwards = build_rank_rows([3, -1, 1, 3], {1: 5, 3: 17})
    backwards = build_rank_rows([3, 1, -1, 3], {1: 5, 3: 17})
    assert forwards.list_slot.tolist() == backwards.list_slot.tolist()
    assert forwards.list_rank.tolist() == backwards.list_rank.tolist()
    assert forwards.list_slot.size == 48


def test_a_hole_meets_no_row():
    rows = build_rank_rows([-1, 0], {0: 3})
    assert HOLE not in rows.row_slot
    assert HOLE in rows.list_slot
    assert BASE not in rows.list_slot
