"""The native low-rank product against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.native import INSTRUCTION_SETS, NativeFormError, load_native, processor_features
from kernels.native_low_rank import NativeLowRank
from kernels.reference import add_low_rank
from kernels.sites import Site

AVAILABLE = [one for one in INSTRUCTION_SETS if one.needs <= processor_features()]
RANKS = [1, 3, 5, 8, 16, 64]
DTYPES = [torch.float32, torch.bfloat16]


def build(adapters, sites, *, instruction_set=None):
    return NativeLowRank(adapters.arena, adapters.descriptors, native=load_native(instruction_set), sites=sites, max_rows=128)


def check(world, adapters, low_rank, rows, sites, *, layers=(0, 1)):
    low_rank.begin_step(rows)
    for layer in layers:
        for site in sites:
            x, y = world.tensor(rows.row_slot.size, site.in_features), world.tensor(rows.row_slot.size, site.columns[-1][1])
            before = y.clone()
            expected = add_low_rank(
                y, x, arena=adapters.arena, descriptors=adapters.descriptors, layer=layer, site=site, rows=rows
            )
            low_rank.add_(y, x, layer=layer, site=site.name)
            bound = world.bound(expected, x, adapters, layer=layer, site=site, rows=rows)
            error = (y.double() - expected).abs()
            assert bool((error <= bound).all()), f"layer {layer}, {site.name}: {float((error / bound).max()):.2f} times the bound"
            base = torch.from_numpy(rows.row_slot < 0)
            assert torch.equal(y[base], before[base])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("popularity", ["none", "one", "distinct", "uniform", "zipf", "skewed"])
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 64, 65])
def test_equals_the_reference_within_its_roundings(world, rank_rows, sites, dtype, popularity, num_rows):
    world = world(num_rows, dtype)
    adapters = world.adapters(RANKS)
    rows = rank_rows(adapters, world.row_slot(num_rows, len(RANKS), popularity))
    check(world, adapters, build(adapters, sites), rows, sites, layers=(num_rows % 2,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", AVAILABLE, ids=lambda one: one.name)
def test_every_instruction_set_equals_the_reference(world, rank_rows, sites, instruction_set, dtype):
    world = world(2, dtype)
    adapters = world.adapters(RANKS)
    rows = rank_rows(adapters, world.row_slot(65, len(RANKS), "zipf"))
    check(world, adapters, build(adapters, sites, instruction_set=instruction_set), rows, sites)


@pytest.mark.parametrize("dtype", DTYPES)
def test_follows_batches_and_images_that_change(world, rank_rows, sites, dtype):
    world = world(7, dtype)
    adapters = world.adapters([3, 16, 40, 1, 17, 8, 33, 5])
    low_rank = build(adapters, sites)
    for step in range(12):
        rows = rank_rows(adapters, world.rng.integers(-1, 8, size=int(world.rng.integers(1, 40))).astype(np.int32))
        check(world, adapters, low_rank, rows, sites[:1] + sites[3:], layers=(step % 2,))
        if step == 6:
            world.load(adapters, 2, 33, at=adapters.spare)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_its_bits_whatever_its_neighbours_are(world, rank_rows, sites, dtype):
    world = world(2, dtype)
    adapters = world.adapters([16, 64, 5, 8], whole=True)
    low_rank = build(adapters, sites)
    x, y = world.tensor(60, 37), world.tensor(60, 59)
    outputs = []
    for row_slot in ([0], [0, 1, 1, 2, 2, 3, 3, -1], [0, 0, 3], [0] * 60, [0, *([1, 2, 3] * 19), -1, 0]):
        low_rank.begin_step(rank_rows(adapters, np.array(row_slot, dtype=np.int32)))
        out = y[: len(row_slot)].clone()
        low_rank.add_(out, x[: len(row_slot)], layer=0, site="qkv")
        outputs.append(out[0])
    assert all(torch.equal(outputs[0], out) for out in outputs)
    assert not torch.equal(outputs[0], y[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_of_the_largest_finite_values_harms_no_neighbour(world, rank_rows, sites, dtype):
    world = world(4, dtype)
    adapters = world.adapters([16, 5, 8], whole=True)
    world.load(adapters, 0, 16, at=adapters.spare, whole=True, value=3e38)
    low_rank = build(adapters, sites)
    low_rank.begin_step(rank_rows(adapters, np.array([1, 0, 2, -1], dtype=np.int32)))
    y, x = world.tensor(4, 59), world.tensor(4, 37)
    low_rank.add_(y, x, layer=0, site="qkv")
    assert bool(torch.isfinite(y[[0, 2, 3]]).all())
    assert not bool(torch.isfinite(y[1]).all())


def test_a_row_that_is_not_finite_harms_no_neighbour(world, rank_rows, sites):
    world = world(5, torch.bfloat16)
    adapters = world.adapters([16, 5], whole=True)
    low_rank = build(adapters, sites)
    low_rank.begin_step(rank_rows(adapters, np.array([1, 0, 0, -1], dtype=np.int32)))
    y, x = world.tensor(4, 59), world.tensor(4, 37)
    x[1] = torch.nan
    low_rank.add_(y, x, layer=0, site="qkv")
    assert bool(torch.isfinite(y[[0, 2, 3]]).all())
    assert not bool(torch.isfinite(y[1]).any())


def test_views_whose_rows_lie_apart_are_followed(world, rank_rows, sites):
    world = world(6, torch.float32)
    adapters = world.adapters([16, 5], whole=True)
    rows = rank_rows(adapters, np.array([1, 0, -1], dtype=np.int32))
    low_rank = build(adapters, sites)
    low_rank.begin_step(rows)
    wide_x, wide_y = world.tensor(3, 50), world.tensor(3, 80)
    x, y = wide_x[:, 5:42].clone(), wide_y[:, 7:66].clone()
    low_rank.add_(wide_y[:, 7:66], wide_x[:, 5:42], layer=0, site="qkv")
    low_rank.add_(y, x, layer=0, site="qkv")
    assert torch.equal(wide_y[:, 7:66], y)


def test_more_fused_projections_than_it_has_are_refused(world, sites):
    adapters = world(8, torch.float32).adapters([4])
    wide = Site.fused("wide", first_slice=0, in_features=37, out_features=(4, 4, 4, 4, 4))
    with pytest.raises(NativeFormError, match="fuses more than 4"):
        build(adapters, (wide,))


class TestMutants:
    """Planted faults that the comparison must see."""

    ROWS = np.array([0, 1, 2, 2, -1, 0, 3], dtype=np.int32)

    def assert_caught(self, world, rank_rows, sites, plant):
        world = world(11, torch.bfloat16)
        adapters = world.adapters([16, 64, 5, 8], whole=True)
        low_rank, rows = build(adapters, sites), rank_rows(adapters, self.ROWS)
        begin = low_rank.begin_step

        def begin_step(rows):
            begin(rows)
            plant(low_rank)

        low_rank.begin_step = begin_step
        with pytest.raises(AssertionError, match="times the bound"):
            check(world, adapters, low_rank, rows, sites)

    def test_rows_of_a_neighbour_are_caught(self, world, rank_rows, sites):
        def plant(low_rank):
            low_rank._rows[:] = np.roll(low_rank._rows, 1)

        self.assert_caught(world, rank_rows, sites, plant)

    def test_a_row_left_out_is_caught(self, world, rank_rows, sites):
        def plant(low_rank):
            low_rank._blocks[0, 2] -= 1

        self.assert_caught(world, rank_rows, sites, plant)

    def test_another_adapters_block_is_caught(self, world, rank_rows, sites):
        def plant(low_rank):
            low_rank._blocks[0, 0] = 2

        self.assert_caught(world, rank_rows, sites, plant)
