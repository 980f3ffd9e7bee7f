"""Which steps are captured, and where their logits are."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dataplane.engine.graphs import Captures, DecodeGraphs, row_buckets
from dataplane.engine.messages import Sampling
from dataplane.engine.plan import Decodes, Picks, Plan, PlannedRows

SAMPLING = Sampling(max_tokens=4)


def decoding(count: int, *others: PlannedRows) -> Plan:
    seats = np.arange(count)
    decodes = Decodes(Picks(seats, [SAMPLING] * count, seats, {}), np.full(count, -1, np.int32), seats)
    return Plan(others, count + len(others), frozenset(), decodes)


def rerun(run: Callable[[], None]) -> Callable[[], None]:
    run()
    return run


def graphs(buckets: tuple[int, ...] = (1, 2, 4, 6)) -> DecodeGraphs[str]:
    return DecodeGraphs(Captures(rerun, None, ("none",)), buckets=buckets, logits=torch.zeros(buckets[-1], 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [1, 3, 8, 64, 100, 256, 4096])
def test_buckets_reach_the_most_rows_and_ascend(most: int) -> None:
    buckets = row_buckets(most)
    assert buckets[-1] == min(most, 512)
    assert list(buckets) == sorted(set(buckets))
    assert all(after <= max(2 * before, before + 32) for before, after in itertools.pairwise(buckets))


@pytest.mark.parametrize(("count", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6), (7, None)])
def test_a_step_takes_the_next_bucket_or_none(count: int, bucket: int | None) -> None:
    assert graphs().bucket(decoding(count)) == bucket


def test_a_step_with_other_rows_is_not_replayed() -> None:
    chunk = PlannedRows(5, -1, 0, 1, (3,), (), 0, SAMPLING, 0, None)
    assert graphs().bucket(decoding(2, chunk)) is None


def test_every_graph_leaves_its_logits_at_one_address() -> None:
    made = graphs()
    inputs = torch.zeros(6, 3)
    for num_rows in (4, 2):
        made.add(num_rows, "none", lambda num_rows=num_rows: inputs[:num_rows] * 2)  # type: ignore[misc]
    inputs += 1
    small, large = made.replay(2, "none"), made.replay(4, "none")
    assert small.data_ptr() == large.data_ptr()
    assert large.tolist() == [[2.0] * 3] * 4
