"""Filling the step buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataplane.engine.batch import StepBuffers
from dataplane.engine.messages import Sampling
from dataplane.engine.plan import Decodes, Picks, Plan, PlannedRows
from dataplane.model.attention import PagedKv

CPU = torch.device("cpu")
SAMPLING = Sampling(max_tokens=4)


@pytest.fixture
def kv(plain: Any) -> PagedKv:
    return PagedKv(plain.config, num_pages=20, page_size=4, dtype=torch.float32, device=CPU)


@pytest.fixture
def buffers() -> StepBuffers:
    return StepBuffers(max_step_tokens=16, max_sequences=4, max_pages=5, device=CPU)


def rows(seat: int, start: int, ids: tuple[int, ...], **fields: Any) -> PlannedRows:
    values = {
        "slot": -1, "count": len(ids), "new_pages": (), "num_pages_before": 0, "sampling": SAMPLING, "sample_index": 0,
        "history": None,
    }  # fmt: skip
    return PlannedRows(seat=seat, start=start, ids=ids, **(values | fields))


def plan(*parts: PlannedRows) -> Plan:
    return Plan(parts, sum(part.count for part in parts), frozenset())


def test_rows_before_an_adapter_starts_have_no_slot(buffers: StepBuffers, kv: PagedKv) -> None:
    step = buffers.fill(
        plan(
            rows(0, 0, (5,), slot=-1, new_pages=(7,), num_base=1),
            rows(1, 0, (11, 12, 13, 14, 15), slot=3, new_pages=(4, 8), num_base=3),
            rows(2, 4, (1, 2), slot=2, new_pages=(6,), num_pages_before=1),
        ),
        kv,
    )
    assert step.row_slot.tolist() == [-1, -1, -1, -1, 3, 3, 2, 2]


def test_rows_positions_and_cache_rows_follow_the_plan(buffers: StepBuffers, kv: PagedKv) -> None:
    buffers.fill(plan(rows(0, 0, (9,) * 6, new_pages=(7, 3), sampling=None)), kv)
    step = buffers.fill(
        plan(
            rows(0, 6, (5,), slot=2, num_pages_before=2),
            rows(1, 0, (11, 12, 13, 14, 15), slot=3, new_pages=(4, 8)),
            rows(2, 0, (1, 2), new_pages=(6,), sampling=None),
        ),
        kv,
    )
    batch = step.batch
    assert batch.ids.tolist() == [5, 11, 12, 13, 14, 15, 1, 2]
    assert batch.positions.tolist() == [6, 0, 1, 2, 3, 4, 0, 1]
    assert batch.kv_rows.tolist() == [
        kv.row_of(page, at) for page, at in ((3, 2), (4, 0), (4, 1), (4, 2), (4, 3), (8, 0), (6, 0), (6, 1))
    ]
    assert step.row_slot.tolist() == [2, 3, 3, 3, 3, 3, -1, -1]
    assert (batch.num_decode, batch.decode_lengths.tolist(), batch.decode_pages.tolist()) == (1, [7], [[7, 3]])
    assert [(c.first_row, c.num_rows, c.context, c.pages.tolist()) for c in batch.chunks] == [(1, 5, 0, [4, 8]), (6, 2, 0, [6])]
    assert batch.sample_rows is not None
    assert batch.sample_rows.tolist() == [0, 5]
    assert len(step.picks) == 2


def test_page_lists_are_padded_with_page_zero_whatever_a_seat_held_before(buffers: StepBuffers, kv: PagedKv) -> None:
    buffers.fill(plan(rows(1, 0, (9,) * 16, new_pages=(2, 3, 4, 5))), kv)
    step = buffers.fill(plan(rows(0, 0, (1,), new_pages=(6,)), rows(1, 0, (1,), new_pages=(7,))), kv)
    assert step.batch.decode_pages.tolist() == [[6], [7]]
    buffers.fill(plan(rows(0, 1, (1,) * 8, new_pages=(8, 9), num_pages_before=1)), kv)
    step = buffers.fill(plan(rows(0, 9, (1,)), rows(1, 1, (1,))), kv)
    assert step.batch.decode_pages.tolist() == [[6, 8, 9], [7, 0, 0]]


def test_rows_of_sequences_that_decode_come_first_and_name_their_seats(buffers: StepBuffers, kv: PagedKv) -> None:
    buffers.fill(plan(rows(0, 0, (9,) * 4, new_pages=(7,)), rows(3, 0, (8,) * 6, new_pages=(5, 2))), kv)
    greedy = Sampling(max_tokens=9, temperature=0.0)
    picks = Picks(np.array([3, 0]), [greedy, SAMPLING], np.array([4, 1]), {})
    decodes = Decodes(picks, np.array([-1, 2], dtype=np.int32), np.array([6, 4]), ((0, 1, 9),))
    others = rows(1, 0, (6,), new_pages=(3,)), rows(2, 0, (1, 2), slot=1, new_pages=(6,))
    step = buffers.fill(Plan(others, 5, frozenset(), decodes), kv)
    batch = step.batch
    assert step.decode_seats.tolist() == [3, 0]
    assert batch.ids[2:].tolist() == [6, 1, 2]
    assert batch.positions.tolist() == [6, 4, 0, 0, 1]
    assert batch.kv_rows.tolist() == [kv.row_of(page, at) for page, at in ((2, 2), (9, 0), (3, 0), (6, 0), (6, 1))]
    assert (batch.num_decode, batch.decode_lengths.tolist()) == (3, [7, 5, 1])
    assert batch.decode_pages.tolist() == [[5, 2], [7, 9], [3, 0]]
    assert step.row_slot.tolist() == [-1, 2, -1, 1, 1]
    assert batch.sample_rows is not None
    assert batch.sample_rows.tolist() == [0, 1, 2, 4]
    assert step.picks.seats.tolist() == [3, 0, 1, 2]
    assert step.picks.settings == [greedy, SAMPLING, SAMPLING, SAMPLING]
    assert step.picks.sample_indexes.tolist() == [4, 1, 0, 0]


def test_buffers_keep_their_addresses(buffers: StepBuffers, kv: PagedKv) -> None:
    first = buffers.fill(plan(rows(0, 0, (1, 2), new_pages=(6,))), kv).batch
    second = buffers.fill(plan(rows(0, 2, (3,)), rows(1, 0, (1,), new_pages=(7,))), kv).batch
    assert first.ids.data_ptr() == second.ids.data_ptr()
    assert first.kv_rows.data_ptr() == second.kv_rows.data_ptr()


def test_a_captured_step_has_the_rows_of_the_plain_one_and_rows_of_nobody_behind(kv: PagedKv) -> None:
    def buffers() -> StepBuffers:
        made = StepBuffers(max_step_tokens=16, max_sequences=4, max_pages=5, device=CPU)
        made.fill(plan(rows(2, 0, (9,) * 6, new_pages=(7, 3)), rows(0, 0, (1,) * 3, new_pages=(5,))), kv)
        return made

    picks = Picks(np.array([2, 0]), [SAMPLING] * 2, np.array([1, 1]), {})
    decodes = Decodes(picks, np.array([1, 3], dtype=np.int32), np.array([6, 3]))
    step = Plan((), 2, frozenset(), decodes)
    plain, captured = buffers().fill(step, kv), buffers().fill_decodes(step, kv, num_rows=4, spare_page=19)
    for name in ("positions", "kv_rows", "decode_lengths", "decode_pages"):
        assert getattr(captured.batch, name)[:2].tolist() == getattr(plain.batch, name).tolist(), name
    assert captured.decode_seats.tolist() == captured.pick_seats.tolist() == [2, 0]
    assert captured.row_slot.tolist() == [1, 3, -1, -1]
    batch = captured.batch
    assert batch.num_decode == 4
    assert batch.decode_lengths[2:].tolist() == [1, 1]
    assert batch.decode_pages[2:].tolist() == [[19, 0]] * 2
    assert batch.kv_rows[2:].tolist() == [kv.row_of(19, 0)] * 2
    assert batch.ids[2:].tolist() == batch.positions[2:].tolist() == [0, 0]
