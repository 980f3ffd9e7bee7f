from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import kernels.cpu
from kernels.cpu import CpuLowRank
from kernels.reference import add_low_rank

RANKS = [1, 3, 5, 8, 16, 64]
DTYPES = [torch.float32, torch.bfloat16]
FORMS = {"tiled": True, "dense": False}
NUM_LAYERS = 2


def build(adapters, sites, *, max_rows=80, max_list=256):
    return CpuLowRank(
        adapters.arena, adapters.descriptors, sites=sites, num_layers=NUM_LAYERS, max_rows=max_rows, max_list=max_list
    )


def use_form(monkeypatch, form):
    monkeypatch.setattr(kernels.cpu, "_tiles_pay", lambda *_: FORMS[form])


def check(world, adapters, low_rank, rows, sites, *, layers=(0, 1)):
    """Compares every site with the reference; the rows without an adapter must keep their value."""
    low_rank.begin_step(rows)
    num_rows = rows.row_slot.size
    for layer in layers:
        for site in sites:
            x = world.tensor(num_rows, site.in_features)
            y = world.tensor(num_rows, site.columns[-1][1])
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("popularity", ["none", "one", "distinct", "uniform", "zipf", "skewed"])
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 64, 65])
def test_equals_the_reference_within_its_roundings(world, rank_rows, sites, monkeypatch, form, dtype, popularity, num_rows):
    use_form(monkeypatch, form)
    world = world(num_rows, dtype)
    adapters = world.adapters(RANKS)
    rows = rank_rows(adapters, world.row_slot(num_rows, len(RANKS), popularity))
    check(world, adapters, build(adapters, sites), rows, sites, layers=(num_rows % 2,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_follows_a_batch_that_changes_at_every_step(world, rank_rows, sites, dtype):
    world = world(7, dtype)
    adapters = world.adapters([3, 16, 40, 1, 17, 8, 33, 5])
    low_rank = build(adapters, sites, max_list=128)
    row_slot = np.full(12, -1, dtype=np.int32)
    for _ in range(25):
        for row in world.rng.integers(12, size=3):
            row_slot[row] = world.rng.integers(-1, 8)
        rows = rank_rows(adapters, row_slot)
        while rows.list_slot.size > 128:
            row_slot[world.rng.integers(12)] = -1
            rows = rank_rows(adapters, row_slot)
        check(world, adapters, low_rank, rows, sites[:1] + sites[3:], layers=(1,))


@pytest.mark.parametrize("form", FORMS)
def test_a_reloaded_adapter_gives_the_same_bits(world, rank_rows, sites, monkeypatch, form):
    use_form(monkeypatch, form)
    world = world(1, torch.bfloat16)
    adapters = world.adapters([16, 8, 5])
    low_rank = build(adapters, sites)
    rows = rank_rows(adapters, np.array([0, 1, 2, 0, -1], dtype=np.int32))
    x, y = world.tensor(5, 37), world.tensor(5, 59)
    outputs = []
    for _ in range(3):
        low_rank.begin_step(rows)
        outputs.append(y.clone())
        low_rank.add_(outputs[-1], x, layer=1, site="qkv")
        low_rank.invalidate(1)
        low_rank.begin_step(rank_rows(adapters, np.array([2, 0, 2], dtype=np.int32)))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_its_bits_whatever_its_neighbours_are(world, rank_rows, sites, dtype):
    world = world(2, dtype)
    adapters = world.adapters([16, 64, 5, 8], whole=True)
    low_rank = build(adapters, sites)
    x, y = world.tensor(8, 37), world.tensor(8, 59)
    outputs = []
    for neighbours in ([1, 1, 2, 2, 3, 3, -1], [2, 3, 2, 3, 1, 1, -1], [3, 3, 2, 1, -1, 1, 2]):
        low_rank.begin_step(rank_rows(adapters, np.array([0, *neighbours], dtype=np.int32)))
        out = y.clone()
        low_rank.add_(out, x, layer=0, site="qkv")
        outputs.append(out[0])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("form", FORMS)
def test_a_narrower_adapter_in_a_reused_slot_inherits_nothing(world, rank_rows, sites, monkeypatch, form):
    use_form(monkeypatch, form)
    world = world(3, torch.float32)
    adapters = world.adapters([40, 16], whole=True)
    low_rank = build(adapters, sites)
    row_slot = np.array([0, 1, 0, -1], dtype=np.int32)
    check(world, adapters, low_rank, rank_rows(adapters, row_slot), sites)
    world.load(adapters, 0, 33, at=adapters.spare)
    assert (adapters.descriptors.rank[0] == 0).any()
    check(world, adapters, low_rank, rank_rows(adapters, row_slot), sites)


def poisoned(world, sites):
    """Slot 0 holds an adapter of the largest finite values, slots 1 and 2 harmless ones."""
    adapters = world.adapters([16, 5, 8], whole=True)
    world.load(adapters, 0, 16, at=adapters.spare, whole=True, value=3e38)
    return adapters, build(adapters, sites)


def finite_neighbours(world, adapters, low_rank, rank_rows):
    rows = rank_rows(adapters, np.array([1, 0, 2, -1], dtype=np.int32))
    low_rank.begin_step(rows)
    y, x = world.tensor(4, 59), world.tensor(4, 37)
    low_rank.add_(y, x, layer=0, site="qkv")
    return bool(torch.isfinite(y[[0, 2, 3]]).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_of_the_largest_finite_values_harms_no_neighbour(world, rank_rows, sites, monkeypatch, form, dtype):
    use_form(monkeypatch, form)
    world = world(4, dtype)
    adapters, low_rank = poisoned(world, sites)
    assert finite_neighbours(world, adapters, low_rank, rank_rows)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_not_finite_harms_no_neighbour(world, rank_rows, sites, monkeypatch, form):
    use_form(monkeypatch, form)
    world = world(5, torch.bfloat16)
    adapters = world.adapters([16, 5], whole=True)
    low_rank = build(adapters, sites)
    low_rank.begin_step(rank_rows(adapters, np.array([1, 0, 0, -1], dtype=np.int32)))
    y, x = world.tensor(4, 59), world.tensor(4, 37)
    x[1] = torch.nan
    low_rank.add_(y, x, layer=0, site="qkv")
    assert bool(torch.isfinite(y[[0, 2, 3]]).all())
    assert not bool(torch.isfinite(y[1]).any())


def operators(low_rank, world, sites):
    with profile(activities=[ProfilerActivity.CPU]) as record:
        for layer in range(NUM_LAYERS):
            for site in sites:
                low_rank.add_(
                    world.tensor(32, site.columns[-1][1]), world.tensor(32, site.in_features), layer=layer, site=site.name
                )
    # Not what they call in turn: that depends on the processor, which may have no product of a batch.
    return Counter(event.name for event in record.events() if event.name.startswith("aten::") and event.cpu_parent is None)


@pytest.mark.parametrize("form", FORMS)
def test_the_number_of_operations_does_not_depend_on_the_mix(world, rank_rows, sites, monkeypatch, form):
    use_form(monkeypatch, form)
    world = world(6, torch.bfloat16)
    adapters = world.adapters(([1, 3, 16, 5, 8, 64] * 4)[:22])
    low_rank = build(adapters, sites, max_list=1024)
    counts = []
    for row_slot in (np.zeros(32), np.arange(32) % 8, np.arange(32) % 22, np.where(np.arange(32) < 22, np.arange(32), -1)):
        low_rank.begin_step(rank_rows(adapters, row_slot.astype(np.int32)))
        counts.append(operators(low_rank, world, sites))
    assert counts[0]["aten::bmm" if form == "tiled" else "aten::mm"] > 0
    assert counts[1:] == counts[:1] * 3


def test_nothing_runs_when_no_row_has_an_adapter(world, rank_rows, sites):
    world = world(8, torch.float32)
    adapters = world.adapters([4])
    low_rank = build(adapters, sites)
    low_rank.begin_step(rank_rows(adapters, np.array([0, -1], dtype=np.int32)))
    low_rank.begin_step(rank_rows(adapters, np.array([-1, -1], dtype=np.int32)))
    y, x = torch.zeros(2, 59), torch.zeros(2, 37)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        low_rank.add_(y, x, layer=0, site="qkv")
    assert not [event.key for event in record.key_averages() if event.key.startswith("aten::")]


def test_only_adapters_that_became_active_are_copied(world, rank_rows, sites, monkeypatch):
    world = world(9, torch.float32)
    adapters = world.adapters([4, 20, 9])
    low_rank = build(adapters, sites)
    gathered = []
    gather = CpuLowRank._gather
    monkeypatch.setattr(CpuLowRank, "_gather", lambda self, slot, placed: (gathered.append(slot), gather(self, slot, placed)))
    for row_slot, copied in (([0, 1], [0, 1]), ([1, 0, 0], []), ([1, 0, 2], [2]), ([1, 2, 0, 1], []), ([1, 2], [])):
        low_rank.begin_step(rank_rows(adapters, np.array(row_slot, dtype=np.int32)))
        assert gathered == copied
        gathered.clear()


class TestMutants:
    """Planted faults that the comparison must see."""

    ROWS = np.array([0, 1, 2, 2, -1, 0, 3], dtype=np.int32)

    @pytest.fixture
    def world(self, world):
        return world(11, torch.bfloat16)

    @pytest.fixture
    def adapters(self, world):
        return world.adapters([5, 16, 3, 24])

    def assert_caught(self, world, adapters, low_rank, rank_rows, sites):
        with pytest.raises(AssertionError):
            check(world, adapters, low_rank, rank_rows(adapters, self.ROWS), sites)

    def test_without_a_mutant_the_comparison_holds(self, world, adapters, rank_rows, sites):
        check(world, adapters, build(adapters, sites), rank_rows(adapters, self.ROWS), sites)

    def test_a_dropped_mask_is_caught(self, world, adapters, rank_rows, sites, monkeypatch):
        use_form(monkeypatch, "dense")
        monkeypatch.setattr(torch, "where", lambda mask, values, other: values)
        self.assert_caught(world, adapters, build(adapters, sites), rank_rows, sites)

    def test_a_multiplying_mask_is_caught(self, world, rank_rows, sites, monkeypatch):
        use_form(monkeypatch, "dense")
        adapters, low_rank = poisoned(world, sites)
        monkeypatch.setattr(torch, "where", lambda mask, values, other: values * mask)
        assert not finite_neighbours(world, adapters, low_rank, rank_rows)

    @pytest.mark.parametrize("form", FORMS)
    def test_a_neighbours_slot_is_caught(self, world, adapters, rank_rows, sites, monkeypatch, form):
        use_form(monkeypatch, form)
        sort, masks = kernels.cpu._sort_into_tiles, CpuLowRank._masks
        monkeypatch.setattr(kernels.cpu, "_sort_into_tiles", lambda own, size: sort(np.roll(own, 1, axis=0), size))
        monkeypatch.setattr(CpuLowRank, "_masks", lambda self, own: masks(self, np.roll(own, 1, axis=0)))
        self.assert_caught(world, adapters, build(adapters, sites), rank_rows, sites)

    @pytest.mark.parametrize("form", FORMS)
    def test_ignored_liveness_is_caught(self, world, adapters, rank_rows, sites, monkeypatch, form):
        use_form(monkeypatch, form)
        copy = CpuLowRank._copy
        monkeypatch.setattr(CpuLowRank, "_copy", lambda self, blocks, offset, rank: copy(self, blocks, offset, rank + 1))
        self.assert_caught(world, adapters, build(adapters, sites), rank_rows, sites)

    @pytest.mark.parametrize("form", FORMS)
    def test_a_rank_cut_short_is_caught(self, world, adapters, rank_rows, sites, monkeypatch, form):
        use_form(monkeypatch, form)
        copy = CpuLowRank._copy
        monkeypatch.setattr(CpuLowRank, "_copy", lambda self, blocks, offset, rank: copy(self, blocks, offset, max(0, rank - 1)))
        self.assert_caught(world, adapters, build(adapters, sites), rank_rows, sites)

    @pytest.mark.parametrize("form", FORMS)
    def test_a_scale_applied_twice_is_caught(self, world, adapters, rank_rows, sites, monkeypatch, form):
        use_form(monkeypatch, form)
        low_rank = build(adapters, sites)
        low_rank.begin_step(rank_rows(adapters, self.ROWS))
        for gathered in low_rank._gathered.values():
            gathered.scale.square_()
        self.assert_caught(world, adapters, low_rank, rank_rows, sites)

    def test_an_ignored_epoch_is_caught(self, world, adapters, rank_rows, sites):
        low_rank = build(adapters, sites)
        check(world, adapters, low_rank, rank_rows(adapters, self.ROWS), sites)
        world.load(adapters, 0, 5, at=adapters.spare)
        adapters.descriptors.epoch[0] -= 1
        self.assert_caught(world, adapters, low_rank, rank_rows, sites)
