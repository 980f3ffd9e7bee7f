"""What is launched: how often for each path, and that nothing of it depends on a step's mix."""

from __future__ import annotations

from collections import Counter
from pathlib import Path as FilePath

import numpy as np
import pytest
import torch

from kernels.gpu.low_rank import Variant
from kernels.gpu.paths import Path
from tests.kernels.gpu.tape import Tape, replays_follow_the_metadata
from tests.test_layers import ROOT

EXTRA_LAUNCHES = {Path.AFTER: 8, Path.BESIDE: 8, Path.FIRST: 8, Path.EXTENSION: 4}
"""A layer of four sites, beside its base products; with an extension, shrinks alone: the other kernel is the base product."""


def run_layer(low_rank, world, gpu_sites, rows, *, variant=None):
    low_rank.begin_step(rows, variant=variant)
    for site in gpu_sites:
        width = site.columns[-1][1]
        y, x = torch.empty(rows.row_slot.size, width), world.tensor(rows.row_slot.size, site.in_features)
        low_rank.project_(y, x, world.tensor(width, site.in_features), layer=0, site=site.name)


@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize("row_slot", [[0, 1, 2, -1], [1, -1], list(range(6))], ids=["mixed", "one", "distinct"])
def test_a_layer_takes_the_launches_of_its_path_whatever_the_batch_holds(
    judge, gpu_world, rank_rows, gpu_sites, monkeypatch, path, row_slot
):
    world = gpu_world(1, torch.float32)
    adapters = world.adapters([1, 3, 5, 8, 16, 64])
    low_rank, tape = judge.build(adapters, path=path), Tape(monkeypatch)
    run_layer(low_rank, world, gpu_sites, rank_rows(adapters, np.array(row_slot, dtype=np.int32)))
    found = Counter(launch.name for launch in tape.launches)
    assert sum(found.values()) - found["extension"] == EXTRA_LAUNCHES[path]
    assert found["epilogue"] == 0


def test_the_page_on_the_gpu_says_how_many_launches_a_layer_takes():
    page = (FilePath(ROOT) / "docs" / "gpu.md").read_text(encoding="utf-8")
    for path, count in EXTRA_LAUNCHES.items():
        assert f"| {path} | {count} |" in page


def test_an_epilogue_is_launched_where_a_row_of_the_step_needs_one(judge, gpu_world, rank_rows, gpu_sites, monkeypatch):
    world = gpu_world(2, torch.float32)
    adapters = world.adapters([5, 5, 5], epilogue=True)
    low_rank, tape = judge.build(adapters), Tape(monkeypatch)
    for row_slot, launches in (([0, 1], 4), ([1, -1], 0), ([-1, -1], 0)):
        tape.launches.clear()
        run_layer(low_rank, world, gpu_sites, rank_rows(adapters, np.array(row_slot, dtype=np.int32)))
        assert sum(launch.name == "epilogue" for launch in tape.launches) == launches


def test_nothing_is_launched_without_an_adapter(judge, gpu_world, rank_rows, gpu_sites, monkeypatch):
    world = gpu_world(3, torch.float32)
    adapters = world.adapters([5])
    low_rank, tape = judge.build(adapters, path=Path.EXTENSION), Tape(monkeypatch)
    run_layer(low_rank, world, gpu_sites, rank_rows(adapters, np.array([-1, -1], dtype=np.int32)))
    assert tape.launches == []


def test_a_captured_step_follows_the_metadata(judge, gpu_world, rank_rows, gpu_sites, monkeypatch):
    replays_follow_the_metadata(judge, gpu_world, rank_rows, gpu_sites, Tape(monkeypatch))


def test_launches_of_two_steps_of_one_bucket_are_equal(judge, gpu_world, rank_rows, gpu_sites, monkeypatch):
    world = gpu_world(4, torch.float32)
    adapters = world.adapters([5, 16, 64])
    low_rank, tape = judge.build(adapters, max_split=4), Tape(monkeypatch)
    x, y = world.tensor(20, 96), world.tensor(20, 192)
    for row_slot in ([0] * 20, [1, 2, -1, -1] * 5):
        low_rank.begin_step(rank_rows(adapters, np.array(row_slot, dtype=np.int32)), variant=Variant.LOW_RANK)
        low_rank.add_(y, x, layer=1, site="qkv")
    first, second = tape.launches[:2], tape.launches[2:]
    assert [launch.grid for launch in first] == [launch.grid for launch in second]
    for one, other in zip(first, second, strict=True):
        assert one.options == other.options
        for a, b in zip(one.arguments, other.arguments, strict=True):
            assert a.data_ptr() == b.data_ptr() if isinstance(a, torch.Tensor) else a == b


def test_a_graph_of_less_than_the_step_needs_is_refused(judge, gpu_world, rank_rows):
    world = gpu_world(5, torch.float32)
    adapters = world.adapters([5, 5, 5], epilogue=True)
    low_rank = judge.build(adapters)
    rows = rank_rows(adapters, np.array([0, 1], dtype=np.int32))
    assert low_rank.variant(rows) is Variant.EPILOGUE
    with pytest.raises(AssertionError, match="the step needs epilogue"):
        low_rank.begin_step(rows, variant=Variant.LOW_RANK)
