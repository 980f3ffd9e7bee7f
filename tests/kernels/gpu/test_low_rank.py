"""The Triton form against the reference, in the interpreter."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kernels.descriptors import Descriptors
from kernels.gpu.device import probe
from kernels.gpu.low_rank import TritonLowRank, UnsupportedSitesError, Variant
from kernels.gpu.paths import Path
from kernels.sites import Site

RANKS = [1, 3, 5, 8, 16, 64]
AXES = {
    "num_rows": [1, 15, 16, 17, 64, 65, 129],
    "popularity": ["none", "one", "distinct", "uniform", "zipf", "skewed"],
    "path": list(Path),
    "site": ["qkv", "o", "gate_up", "down"],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "is_fp8": [False, True],
    "max_split": [1, 4],
    "base_rows": [True, False],
    "whole": [False, True],
    "epilogue": [False, True],
}
MOST_CASES = 60


def pairwise(axes):
    """Returns cases in which every two values of two axes meet: greedy, the best of many random candidates."""
    rng, names = random.Random(0), list(axes)
    todo = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(axes[a])), range(len(axes[b])))
    }
    cases = []
    while todo:
        seed = dict(min(todo))
        candidates = [{name: seed.get(name, rng.randrange(len(axes[name]))) for name in names} for _ in range(60)]
        best = max(candidates, key=lambda case: len(todo & set(itertools.combinations(case.items(), 2))))
        todo -= set(itertools.combinations(best.items(), 2))
        cases.append(tuple(axes[name][index] for name, index in best.items()))
    return cases


@dataclass(frozen=True)
class Case:
    """A value of each axis; as a captured graph runs it, so that an empty list runs too."""

    num_rows: int
    popularity: str
    path: Path
    site: str
    dtype: torch.dtype
    is_fp8: bool
    max_split: int
    base_rows: bool
    whole: bool
    epilogue: bool

    def __str__(self) -> str:
        return "-".join(f"{name}={getattr(self, name)}" for name in AXES)


def run_case(judge, gpu_world, in_fp8, rank_rows, gpu_sites, case):
    world = gpu_world(case.num_rows, case.dtype)
    adapters = wide = world.adapters(RANKS, whole=case.whole, epilogue=case.epilogue)
    if case.is_fp8:
        adapters, wide = in_fp8(world, adapters)
    low_rank = judge.build(adapters, max_split=case.max_split, path=case.path, dtype=case.dtype)
    row_slot = world.row_slot(case.num_rows, len(RANKS), case.popularity, base_rows=case.base_rows)
    rows = rank_rows(adapters, row_slot)
    judge.check_site(
        world,
        adapters,
        low_rank,
        rows,
        layer=case.num_rows % 2,
        site=next(site for site in gpu_sites if site.name == case.site),
        wide=wide,
        bias=not case.whole,
        variant=Variant.EPILOGUE if case.epilogue else Variant.LOW_RANK,
    )


CASES = [Case(*values) for values in pairwise(AXES)]


def test_the_covering_set_is_small_and_covers_every_two_values():
    assert len(CASES) <= MOST_CASES
    for (first, second), case_values in itertools.product(itertools.combinations(AXES, 2), [CASES]):
        met = {(getattr(case, first), getattr(case, second)) for case in case_values}
        assert met == set(itertools.product(AXES[first], AXES[second]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_site_equals_the_reference_within_its_roundings(judge, gpu_world, in_fp8, rank_rows, gpu_sites, case):
    run_case(judge, gpu_world, in_fp8, rank_rows, gpu_sites, case)


FULL = ("num_rows", "popularity", "path", "base_rows", "whole")


def product():
    """Yields every combination of the axes of FULL; combinations of the others take turns."""
    others = [name for name in AXES if name not in FULL]
    turns = list(itertools.product(*(AXES[name] for name in others)))
    random.Random(0).shuffle(turns)
    for values, turn in zip(itertools.product(*(AXES[name] for name in FULL)), itertools.cycle(turns), strict=False):
        yield Case(**dict(zip(FULL, values, strict=True)), **dict(zip(others, turn, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", AXES["num_rows"])
@pytest.mark.parametrize("popularity", AXES["popularity"])
def test_a_site_equals_the_reference_in_every_combination(judge, gpu_world, in_fp8, rank_rows, gpu_sites, num_rows, popularity):
    for case in product():
        if (case.num_rows, case.popularity) == (num_rows, popularity):
            try:
                run_case(judge, gpu_world, in_fp8, rank_rows, gpu_sites, case)
            except AssertionError as error:
                raise AssertionError(str(case)) from error


def test_an_adapter_of_rank_256_equals_the_reference(judge, gpu_world, rank_rows, gpu_sites):
    world = gpu_world(1, torch.bfloat16)
    adapters = world.adapters([256, 5], whole=True)
    rows = rank_rows(adapters, np.array([0, 1, -1, 0], dtype=np.int32))
    judge.check(world, adapters, judge.build(adapters, max_list=272), rows, layer=1, site=gpu_sites[0])


def test_follows_a_batch_that_changes_at_every_step(judge, gpu_world, rank_rows, gpu_sites):
    world = gpu_world(7, torch.float32)
    adapters = world.adapters([3, 16, 40, 1])
    low_rank = judge.build(adapters, max_split=4, max_list=128)
    for step, num_rows in enumerate((20, 3, 66, 1, 5)):
        rows = rank_rows(adapters, world.row_slot(num_rows, 4, "zipf" if step % 2 else "uniform"))
        judge.check(world, adapters, low_rank, rows, layer=step % 2, site=gpu_sites[step % 4])


@pytest.mark.parametrize("max_split", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_keeps_its_bits_whatever_its_neighbours_are(judge, gpu_world, rank_rows, gpu_sites, dtype, max_split):
    world = gpu_world(2, dtype)
    adapters = world.adapters([16, 64, 5, 8, 3], whole=True)
    low_rank = judge.build(adapters, max_split=max_split)
    x, y = world.tensor(16, 96), world.tensor(16, 192)
    mine = [(0, 4), (5, 1), (11, 2)]  # (row, slot), of one, two and more items before them in the list
    kept = []
    for neighbours in ([1, 2, 3], [-1], [3, 3, 0, 1, 2, 4], [2, 4]):
        row_slot = np.resize(np.array(neighbours, dtype=np.int32), 16)
        for row, slot in mine:
            row_slot[row] = slot
        places = world.rng.permutation(16)
        low_rank.begin_step(rank_rows(adapters, row_slot[places]))
        order = torch.from_numpy(places)
        out = judge.run(low_rank, y[order], x[order], layer=0, site=gpu_sites[0])
        kept.append(torch.stack([out[int(np.flatnonzero(places == row)[0])] for row, _ in mine]))
    assert all(torch.equal(kept[0], other) for other in kept[1:])
    assert not torch.equal(kept[0], y[[row for row, _ in mine]])


@pytest.mark.parametrize("path", [Path.FIRST, Path.EXTENSION])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_row_of_a_whole_site_keeps_its_bits_too(judge, gpu_world, in_fp8, rank_rows, gpu_sites, path, is_fp8):
    world = gpu_world(13, torch.bfloat16)
    adapters = world.adapters([16, 40, 5], whole=True, epilogue=True)
    if is_fp8:
        adapters, _ = in_fp8(world, adapters)
    low_rank = judge.build(adapters, path=path, max_split=4, dtype=torch.bfloat16)
    x, weight = world.tensor(16, 96), world.tensor(192, 96)
    kept = []
    for neighbours in ([1, 2, 0], [-1], [2, 2, 1]):
        row_slot = np.resize(np.array(neighbours, dtype=np.int32), 16)
        row_slot[6] = 2
        low_rank.begin_step(rank_rows(adapters, row_slot))
        others = x.clone() if not kept else world.tensor(16, 96)
        others[6] = x[6]
        y = torch.full((16, 192), torch.nan, dtype=torch.bfloat16)
        low_rank.project_(y, others, weight, layer=0, site=gpu_sites[0].name)
        kept.append(y[6])
    assert all(torch.equal(kept[0], other) for other in kept[1:])
    assert bool(torch.isfinite(kept[0]).all())


def test_a_row_keeps_its_bits_across_row_counts_when_the_form_is_one_for_all(judge, gpu_world, rank_rows, gpu_sites):
    world = gpu_world(3, torch.bfloat16)
    adapters = world.adapters([16, 24, 5], whole=True)
    low_rank = judge.build(adapters, batch_invariant=True)
    x, y = world.tensor(130, 96), world.tensor(130, 192)
    row_slot = world.row_slot(130, 3, "uniform")
    row_slot[0] = 1
    kept = []
    for num_rows in (130, 65, 16, 1):
        low_rank.begin_step(rank_rows(adapters, row_slot[:num_rows]))
        kept.append(judge.run(low_rank, y[:num_rows], x[:num_rows], layer=0, site=gpu_sites[0])[0])
    assert all(torch.equal(kept[0], other) for other in kept[1:])


def poisoned(judge, gpu_world, value=3e38):
    """Slot 0 holds an adapter of the largest finite values, slots 1 and 2 harmless ones."""
    world = gpu_world(4, torch.bfloat16)
    adapters = world.adapters([16, 5, 8], whole=True)
    world.load(adapters, 0, 16, at=adapters.spare, whole=True, value=value)
    return world, adapters, judge.build(adapters, max_split=4)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_an_adapter_of_the_largest_finite_values_harms_no_neighbour(judge, gpu_world, rank_rows, gpu_sites):
    world, adapters, low_rank = poisoned(judge, gpu_world)
    low_rank.begin_step(rank_rows(adapters, np.array([1, 0, 2, -1], dtype=np.int32)))
    out = judge.run(low_rank, world.tensor(4, 192), world.tensor(4, 96), layer=0, site=gpu_sites[0])
    assert bool(torch.isfinite(out[[0, 2, 3]]).all())


def test_a_row_that_is_not_finite_harms_no_neighbour(judge, gpu_world, rank_rows, gpu_sites):
    world = gpu_world(5, torch.bfloat16)
    adapters = world.adapters([16, 5], whole=True)
    low_rank = judge.build(adapters)
    low_rank.begin_step(rank_rows(adapters, np.array([1, 0, 0, -1], dtype=np.int32)))
    x = world.tensor(4, 96)
    x[1] = torch.nan
    out = judge.run(low_rank, world.tensor(4, 192), x, layer=0, site=gpu_sites[0])
    assert bool(torch.isfinite(out[[0, 2, 3]]).all())
    assert not bool(torch.isfinite(out[1]).any())


def test_a_narrower_adapter_in_a_reused_slot_inherits_nothing(judge, gpu_world, rank_rows, gpu_sites):
    world = gpu_world(6, torch.float32)
    adapters = world.adapters([40, 16], whole=True)
    low_rank = judge.build(adapters)
    rows = rank_rows(adapters, np.array([0, 1, 0, -1], dtype=np.int32))
    judge.check(world, adapters, low_rank, rows, layer=0, site=gpu_sites[0])
    world.load(adapters, 0, 33, at=adapters.spare)
    rows = rank_rows(adapters, np.array([0, 1, 0, -1], dtype=np.int32))
    for layer, site in itertools.product((0, 1), gpu_sites[::3]):
        judge.check(world, adapters, low_rank, rows, layer=layer, site=site)


def test_an_offset_past_32_bits_is_reached(judge, gpu_world, rank_rows, gpu_sites):
    """The arena has 4 GiB of addresses in front of the adapters, of which no page is ever touched."""
    world = gpu_world(8, torch.bfloat16)
    adapters = world.adapters([5, 16], whole=True)
    front = 1 << 31
    far = torch.empty(front + adapters.arena.numel(), dtype=torch.bfloat16)
    far[front:] = adapters.arena
    rows = rank_rows(adapters, np.array([0, 1, -1], dtype=np.int32))
    x, y = world.tensor(3, 96), world.tensor(3, 192)
    outputs = []
    for arena, distance in ((adapters.arena, 0), (far, front)):
        adapters.descriptors.a_offset += distance
        adapters.descriptors.b_offset += distance
        low_rank = judge.build(replace(adapters, arena=arena))
        low_rank.begin_step(rows)
        outputs.append(judge.run(low_rank, y, x, layer=0, site=gpu_sites[0]))
    assert torch.equal(*outputs)


def test_nothing_runs_when_no_row_has_an_adapter(judge, gpu_world, rank_rows, gpu_sites):
    world = gpu_world(9, torch.float32)
    adapters = world.adapters([4])
    low_rank = judge.build(adapters)
    low_rank.begin_step(rank_rows(adapters, np.array([0, -1], dtype=np.int32)))
    low_rank.begin_step(rank_rows(adapters, np.array([-1, -1], dtype=np.int32)))
    low_rank.add_(None, None, layer=0, site="qkv")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_adapter_for_all_rows_takes_library_products(judge, gpu_world, rank_rows, gpu_sites, monkeypatch, dtype):
    monkeypatch.setattr("kernels.gpu.launches.shrink", None)
    world = gpu_world(10, dtype)
    adapters = world.adapters([5, 24])
    rows = rank_rows(adapters, np.array([1, 1, 1], dtype=np.int32))
    low_rank = judge.build(adapters)
    for site, beside in itertools.product(gpu_sites, (True, False)):
        judge.check(world, adapters, low_rank, rows, layer=0, site=site, beside=beside)
    judge.check_site(world, adapters, judge.build(adapters, path=Path.EXTENSION), rows, layer=0, site=gpu_sites[0])


def test_a_batch_invariant_form_takes_no_other_path_for_one_adapter(judge, gpu_world, rank_rows, monkeypatch):
    monkeypatch.setattr("kernels.gpu.low_rank.torch.mm", None)
    world = gpu_world(11, torch.float32)
    adapters = world.adapters([5])
    low_rank = judge.build(adapters, batch_invariant=True)
    low_rank.begin_step(rank_rows(adapters, np.zeros(2, dtype=np.int32)))
    low_rank.add_(world.tensor(2, 192), world.tensor(2, 96), layer=0, site="qkv")


def test_widths_that_are_no_multiple_of_16_are_refused():
    sites = (Site.fused("o", first_slice=0, in_features=37, out_features=(48,)),)
    with pytest.raises(UnsupportedSitesError, match="site o"):
        TritonLowRank(torch.zeros(1), Descriptors(1, 1, 1), gpu=probe("cpu"), sites=sites, max_rows=1, max_list=16)
