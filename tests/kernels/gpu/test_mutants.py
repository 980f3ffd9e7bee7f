"""Faults planted in the kernels' text, each of which the comparison with the reference has to see."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kernels.gpu.expand
import kernels.gpu.low_rank
import kernels.gpu.metadata
import kernels.gpu.shrink
from kernels.gpu.metadata import StepMetadata


@dataclass(frozen=True)
class Mutant:
    """A planted fault: in the text of one kernel, `old` (there once) becomes `new`."""

    name: str
    kernel: str
    old: str
    new: str


MUTANTS = (
    Mutant("mask dropped", "shrink", "own[:, None] & (offs_j < num_live)[None, :]", "(offs_j < num_live)[None, :]"),
    Mutant(
        "mask multiplied",
        "shrink",
        "tl.where(own[:, None] & (offs_j < num_live)[None, :], acc * tl.load(scale_ptr + block), 0.0)",
        "acc * tl.load(scale_ptr + block) * own.to(tl.float32)[:, None]",
    ),
    Mutant("wrong slot", "shrink", "slot = tl.load(item_slot_ptr + item)", "slot = tl.load(item_slot_ptr + item) ^ 1"),
    Mutant("wrong layer", "shrink", "(slot * num_layers + layer)", "(slot * num_layers + 1 - layer)"),
    Mutant("liveness ignored", "shrink", "num_live = tl.load(rank_ptr + block) - first_rank", "num_live = BLOCK_J"),
    Mutant(
        "dead items keep old values",
        "shrink",
        "tl.store(h_tile, tl.zeros((BLOCK_M, BLOCK_J), h_ptr.dtype.element_ty))",
        "pass",
    ),
    Mutant("dead entries keep their row", "shrink", "tl.where(offs_j < num_live, b_rows, -1)", "b_rows"),
    Mutant(
        "scale twice",
        "shrink",
        "acc * tl.load(scale_ptr + block)",
        "acc * tl.load(scale_ptr + block) * tl.load(scale_ptr + block)",
    ),
    Mutant(
        "offset of A in 32 bits",
        "shrink",
        "tl.multiple_of(tl.load(a_offset_ptr + block), 16)",
        "tl.load(a_offset_ptr + block).to(tl.int32)",
    ),
    Mutant("offset of B in 32 bits", "expand", "arena_ptr + b_start[:, None]", "arena_ptr + b_start.to(tl.int32)[:, None]"),
    Mutant("planes summed before all arrived", "shrink", "== SPLIT_K - 1", "== SPLIT_K - 2"),
    Mutant(
        "arrivals not counted down",
        "shrink",
        "tl.atomic_xchg(arrived_ptr + place, 0,",
        "tl.atomic_xchg(arrived_ptr + place, 1,",
    ),
    Mutant(
        "part of K left out",
        "shrink",
        "tl.minimum(in_features, first_k + part)",
        "tl.minimum(in_features, first_k + part) - BLOCK_K",
    ),
    Mutant("rank rows of the first block only", "shrink", "first_rank.to(tl.int64) * in_features", "0"),
    Mutant("tail of the list read", "expand", "listed = offs_j < num_entries - j", "listed = offs_j >= 0"),
    Mutant("list cut short", "expand", "num_entries = (last - first) * ITEM", "num_entries = (last - first - 1) * ITEM"),
    Mutant("neighbouring tile's items", "expand", "tl.load(tile_start_ptr + pid_tile),", "tl.load(tile_start_ptr),"),
    Mutant(
        "y not added to",
        "expand",
        "acc = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)",
        "acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)",
    ),
    Mutant(
        "columns of the next slice written",
        "expand",
        "mask_m[:, None] & (offs_n < width)[None, :]",
        "mask_m[:, None] & (offs_n >= 0)[None, :]",
    ),
    Mutant("rows past the batch written", "expand", "mask_m = rows < num_rows", "mask_m = rows >= 0"),
    Mutant("first column ignored", "expand", "tl.multiple_of(tl.load(site + 1), 16) + offs_n", "offs_n"),
)


def kernel_text(name):
    return Path(getattr(kernels.gpu, name).__file__).read_text(encoding="utf-8")


def mutated(mutant, folder):
    """Returns the mutant's kernel, from a file of its own, since the interpreter reads the source."""
    text = kernel_text(mutant.kernel)
    assert text.count(mutant.old) == 1, f"{mutant.name}: found {text.count(mutant.old)} times"
    path = folder / f"mutated_{mutant.kernel}.py"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, mutant.kernel)


def trial(judge, gpu_world, rank_rows, gpu_sites):
    """A few small comparisons, as in test_low_rank.py; raises where the kernels are wrong."""
    world = gpu_world(11, torch.float32)
    adapters = world.adapters([5, 16, 3, 24])
    low_rank = judge.build(adapters, max_split=4)
    for step, row_slot in enumerate(([0, 1, 2, 2, -1, 0, 3], [0] * 40 + [3] * 30 + [2, -1])):
        rows = rank_rows(adapters, np.array(row_slot, dtype=np.int32))
        for layer in (0, 1):
            for site in (gpu_sites[0], gpu_sites[3]):
                judge.check(world, adapters, low_rank, rows, layer=layer, site=site, in_place=step == 0 or layer == 0)
    neighbours(judge, gpu_world, rank_rows, gpu_sites)
    far_offsets(judge, gpu_world, rank_rows, gpu_sites)


def neighbours(judge, gpu_world, rank_rows, gpu_sites):
    """One adapter of the largest finite values: the others' rows stay finite."""
    world = gpu_world(4, torch.bfloat16)
    adapters = world.adapters([16, 5], whole=True)
    world.load(adapters, 0, 16, at=adapters.spare, whole=True, value=3e38)
    low_rank = judge.build(adapters)
    low_rank.begin_step(rank_rows(adapters, np.array([1, 0, -1], dtype=np.int32)))
    out = judge.run(low_rank, world.tensor(3, 192), world.tensor(3, 96), layer=0, site=gpu_sites[0])
    assert bool(torch.isfinite(out[[0, 2]]).all())


def far_offsets(judge, gpu_world, rank_rows, gpu_sites):
    """Adapters behind 2^32 elements: an offset cut to 32 bits finds the first pages of the arena instead, which hold NaN."""
    world = gpu_world(8, torch.bfloat16)
    adapters = world.adapters([5], whole=True)
    front = 1 << 32
    far = torch.empty(front + adapters.arena.numel(), dtype=torch.bfloat16)
    far[: adapters.arena.numel()] = torch.nan
    far[front:] = adapters.arena
    adapters.descriptors.a_offset += front
    adapters.descriptors.b_offset += front
    rows = rank_rows(adapters, np.array([0, -1], dtype=np.int32))
    far_adapters = replace(adapters, arena=far)
    judge.check(world, far_adapters, judge.build(far_adapters), rows, layer=0, site=gpu_sites[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
class TestMutants:
    """Planted faults."""

    def test_without_a_mutant_the_trial_passes(self, judge, gpu_world, rank_rows, gpu_sites):
        trial(judge, gpu_world, rank_rows, gpu_sites)

    @pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
    def test_a_mutant_is_caught(self, judge, gpu_world, rank_rows, gpu_sites, monkeypatch, tmp_path, mutant):
        monkeypatch.setattr(kernels.gpu.low_rank, mutant.kernel, mutated(mutant, tmp_path))
        with pytest.raises(AssertionError):
            trial(judge, gpu_world, rank_rows, gpu_sites)

    def test_stale_metadata_is_caught(self, judge, gpu_world, rank_rows, gpu_sites, monkeypatch):
        fill, steps = StepMetadata.fill, []

        def fill_with_the_last(self, *step):
            steps.append(step)
            fill(self, *steps[-2:][0])

        monkeypatch.setattr(StepMetadata, "fill", fill_with_the_last)
        with pytest.raises(AssertionError):
            trial(judge, gpu_world, rank_rows, gpu_sites)


def test_every_mutant_still_fits_the_kernels():
    for mutant in MUTANTS:
        assert kernel_text(mutant.kernel).count(mutant.old) == 1, mutant.name
