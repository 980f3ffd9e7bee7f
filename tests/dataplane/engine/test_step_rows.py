"""Rank rows of steps are counted by bucket."""

from __future__ import annotations

import numpy as np

from dataplane.engine.step_rows import RANK_ROW_BOUNDS, StepRows
from kernels.rows import BASE


def test_each_adapter_of_a_step_counts_once_with_its_padding_and_the_base_counts_nothing() -> None:
    rows = StepRows()
    ranks = np.array([1, 16, 17, 4000], dtype=np.int32)
    for slots in ({BASE}, {0, BASE}, {0, 1, 2}, {3, 1, 0, 2}):
        rows.observe(slots, ranks)
    assert rows.total == 0 + 16 + (16 + 16 + 32) + (16 + 16 + 32 + 4000)
    assert len(rows.counts) == len(RANK_ROW_BOUNDS) + 1
    assert {bound: rows.counts[place] for place, bound in enumerate(RANK_ROW_BOUNDS) if rows.counts[place]} == {
        0: 1, 16: 1, 64: 1, 4096: 1,
    }  # fmt: skip
