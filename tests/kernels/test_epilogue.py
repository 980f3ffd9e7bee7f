"""Gains and shifts in every CPU form against the reference."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from kernels.cpu import CpuLowRank
from kernels.descriptors import Blocks
from kernels.epilogue import vector_at
from kernels.native import INSTRUCTION_SETS, load_native, processor_features
from kernels.native_low_rank import NativeLowRank
from kernels.reference import add_low_rank
from kernels.rows import ABSENT, build_rank_rows
from kernels.tiled_low_rank import TiledLowRank

RANKS = [1, 5, 16, 3]
WITHOUT = 3
"""The slot that has neither gain nor shift."""
DTYPES = [torch.float32, torch.bfloat16]
FORMS = {
    "torch": lambda adapters, sites: CpuLowRank(
        adapters.arena, adapters.descriptors, sites=sites, num_layers=2, max_rows=80, max_list=256
    ),
    "torch, batch-invariant": lambda adapters, sites: TiledLowRank(adapters.arena, adapters.descriptors, sites=sites),
    "native": lambda adapters, sites: NativeLowRank(
        adapters.arena, adapters.descriptors, native=load_native(), sites=sites, max_rows=80
    ),
}  # fmt: skip


def with_vectors(world, adapters, *, value=None):
    """Gives every slot but one gains and shifts, each at some (layer, slice) only; slot 0 has no rank row left anywhere."""
    table, arena = adapters.descriptors, adapters.arena
    at = adapters.spare + adapters.spare % 2
    for slot in range(WITHOUT):
        offsets = np.full((2, *table.rank.shape[1:]), ABSENT)
        for layer in range(2):
            for index, (_, width) in world.widths.items():
                for kind in range(2):
                    if world.rng.random() < 0.6:
                        drawn = torch.randn(width, generator=world.torch_rng) + 1
                        vector_at(arena, at, width)[:] = drawn if value is None else value
                        offsets[kind, layer, index] = at
                        at += 2 * width + 14
        rank = table.rank[slot] * (slot > 0)
        table.set(
            slot, Blocks(table.a_offset[slot].copy(), table.b_offset[slot].copy(), rank, table.scale[slot].copy(), *offsets)
        )
    assert at <= arena.numel()
    return adapters


def check(world, adapters, low_rank, rows, sites):
    low_rank.begin_step(rows)
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[world.dtype]
    table = adapters.descriptors
    for layer in range(2):
        for site in sites:
            x, y = world.tensor(rows.row_slot.size, site.in_features), world.tensor(rows.row_slot.size, site.columns[-1][1])
            wanted, plain = (
                add_low_rank(y, x, arena=adapters.arena, descriptors=one, layer=layer, site=site, rows=rows)
                for one in (table, _plain(table))
            )
            bound = world.bound(plain, x, adapters, layer=layer, site=site, rows=rows) + unit * plain.abs()
            for t, slot in enumerate(rows.row_slot.tolist()):
                for index, (first, last) in zip(site.slices, site.columns, strict=True):
                    offset = int(table.gain_offset[slot, layer, index])
                    if slot >= 0 and offset != ABSENT:
                        bound[t, first:last] *= vector_at(adapters.arena, offset, last - first).abs().double()
            bound += unit * wanted.abs() + 2.0**-22 * (plain.abs() + wanted.abs() + 1)
            before = y.clone()
            low_rank.add_(y, x, layer=layer, site=site.name)
            error = (y.double() - wanted).abs()
            assert bool((error <= bound).all()), f"layer {layer}, {site.name}: {float((error / bound).max()):.2f} times the bound"
            base = torch.from_numpy(rows.row_slot < 0)
            assert torch.equal(y[base], before[base])


def _plain(table):
    """The same descriptors without gains and shifts."""
    other = object.__new__(type(table))
    other.__dict__.update(table.__dict__)
    other.gain_offset = other.shift_offset = np.full_like(table.gain_offset, ABSENT)
    return other


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("popularity", ["none", "one", "uniform", "zipf", "distinct"])
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_reference_within_its_roundings(world, sites, form, popularity, dtype):
    world = world(5, dtype)
    adapters = with_vectors(world, world.adapters(RANKS))
    rows = build_rank_rows(world.row_slot(33, len(RANKS), popularity), adapters.descriptors.largest_rank)
    check(world, adapters, FORMS[form](adapters, sites), rows, sites)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "instruction_set", [one for one in INSTRUCTION_SETS if one.needs <= processor_features()], ids=lambda one: one.name
)
def test_every_instruction_set_equals_the_reference(world, sites, instruction_set, dtype):
    world = world(10, dtype)
    adapters = with_vectors(world, world.adapters(RANKS))
    native = load_native(instruction_set)
    low_rank = NativeLowRank(adapters.arena, adapters.descriptors, native=native, sites=sites, max_rows=80)
    rows = build_rank_rows(world.row_slot(33, len(RANKS), "uniform"), adapters.descriptors.largest_rank)
    check(world, adapters, low_rank, rows, sites)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_an_adapter_without_rank_rows_have_their_shift(world, sites, form):
    world = world(6, torch.float32)
    adapters = with_vectors(world, world.adapters(RANKS))
    rows = build_rank_rows(np.array([0, -1, 0], dtype=np.int32), adapters.descriptors.largest_rank)
    assert rows.is_empty
    check(world, adapters, FORMS[form](adapters, sites), rows, sites)


@pytest.mark.parametrize("form", FORMS)
def test_a_slot_that_was_emptied_or_filled_anew_keeps_nothing(world, sites, form):
    world = world(7, torch.float32)
    adapters = with_vectors(world, world.adapters(RANKS))
    low_rank = FORMS[form](adapters, sites)
    rows = build_rank_rows(np.array([1, 2, 1, 3], dtype=np.int32), adapters.descriptors.largest_rank)
    check(world, adapters, low_rank, rows, sites)
    world.load(adapters, 1, 5, at=3)
    adapters.descriptors.clear(2)
    assert adapters.descriptors.has_epilogue.tolist() == [True, False, False, False]
    check(world, adapters, low_rank, rows, sites)


@pytest.mark.parametrize("form", FORMS)
def test_vectors_of_the_largest_numbers_harm_no_neighbour(world, sites, form):
    world = world(8, torch.float32)
    adapters = with_vectors(world, world.adapters(RANKS), value=3e38)
    low_rank = FORMS[form](adapters, sites)
    low_rank.begin_step(build_rank_rows(np.array([1, 3, -1], dtype=np.int32), adapters.descriptors.largest_rank))
    y, x = 10 * world.tensor(3, 59), world.tensor(3, 37)
    alone = y.clone()
    low_rank.add_(y, x, layer=0, site="qkv")
    assert bool(torch.isfinite(y[1:]).all())
    assert float(y[0].abs().max()) > 1e38
    low_rank.begin_step(build_rank_rows(np.array([3, -1], dtype=np.int32), adapters.descriptors.largest_rank))
    low_rank.add_(alone[1:], x[1:], layer=0, site="qkv")
    assert torch.equal(y[2], alone[2])
    assert torch.allclose(y[1], alone[1], rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_neighbours_vectors_are_seen_as_a_fault(world, sites, form):
    world = world(9, torch.float32)
    adapters = with_vectors(world, world.adapters(RANKS))
    rows = build_rank_rows(world.row_slot(33, len(RANKS), "uniform"), adapters.descriptors.largest_rank)
    faulty = copy.copy(adapters.descriptors)
    faulty.gain_offset, faulty.shift_offset = (np.roll(one, 1, axis=0) for one in (faulty.gain_offset, faulty.shift_offset))
    low_rank = FORMS[form](dataclasses.replace(adapters, descriptors=faulty), sites)
    with pytest.raises(AssertionError, match="times the bound"):
        check(world, adapters, low_rank, rows, sites)
