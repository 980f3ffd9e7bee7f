"""Faults planted in the text of the low-rank kernels, each of which the comparison with the reference has to see."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.gpu.metadata import StepMetadata
from kernels.gpu.paths import Path
from tests.kernels.gpu.planting import Mutant, all_are_caught, faults_of, stale_metadata
from tests.kernels.gpu.tape import Tape, replays_follow_the_metadata

MUTANTS = (
    Mutant("mask dropped", "shrink", "own[:, None] & (offs_j < num_live)[None, :]", "(offs_j < num_live)[None, :]"),
    Mutant(
        "mask multiplied",
        "shrink",
        "tl.where(own[:, None] & (offs_j < num_live)[None, :], acc, 0.0)",
        "acc * own.to(tl.float32)[:, None]",
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
    Mutant("dead entries keep their row", "shrink", "tl.where(offs_j < num_live, b_rows // 16, -1)", "b_rows // 16"),
    Mutant(
        "scale twice",
        "shrink",
        "acc *= tl.load(scale_ptr + block)",
        "acc *= tl.load(scale_ptr + block) * tl.load(scale_ptr + block)",
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
    Mutant("rows past the batch written", "extension", "mask = (rows < num_rows)[:, None]", "mask = (rows >= 0)[:, None]"),
    Mutant(
        "K cut short in the base product", "extension", "range(0, in_features, BLOCK_K)", "range(BLOCK_K, in_features, BLOCK_K)"
    ),
    Mutant("K read past its end", "extension", "mask_k = offs_k < in_features", "mask_k = offs_k >= 0"),
    Mutant("list left out of the extension", "extension", "acc, first, last, pid_s", "acc, first, first, pid_s"),
    Mutant(
        "weights of the first slice",
        "extension",
        "columns.to(tl.int64)[None, :] * weight_stride",
        "offs_n[None, :] * weight_stride",
    ),
    Mutant("bias of the first slice", "extension", "bias_ptr + columns", "bias_ptr + offs_n"),
    Mutant("gain left out", "epilogue", "y *= tl.load(gain + offs_n, mask=mask_n, other=0.0)", "pass"),
    Mutant("shift read where there is none", "epilogue", "if shift_offset >= 0:", "if gain_offset >= 0:"),
    Mutant("gain of another layer", "epilogue", "* num_layers + layer)", "* num_layers + 1 - layer)"),
    Mutant("epilogue on one row only", "epilogue", "row = tl.load(epilogue_row_ptr + i)", "row = tl.load(epilogue_row_ptr)"),
    Mutant("epilogue past its columns", "epilogue", "mask_n = offs_n < width", "mask_n = offs_n >= 0"),
    Mutant(
        "factors of the first block",
        "shrink",
        "+ first_rank + offs_j\n                    acc",
        "+ offs_j\n                    acc",
    ),
    Mutant("factors left out", "shrink", "acc *= tl.load(factors, mask=offs_j < num_live, other=0.0)[None, :]", "pass"),
    Mutant(
        "factor of the neighbouring rank row",
        "shrink",
        "+ first_rank + offs_j\n                    acc",
        "+ first_rank + (offs_j ^ 1)\n                    acc",
    ),
    Mutant("factors of more than 32 rank rows cut short", "shrink", "tl.cdiv((num_live + first_rank) * 4, 128) * 128", "128"),
    Mutant("sign of a code dropped", "widen", "((bits & 0x80) << 8) | ", ""),
    Mutant("code widened by twice", "widen", "((bits & 0x7F) << 7)", "((bits & 0x7F) << 7) + 0x400"),
    Mutant("B in fp8 read as it is", "expand", "widen(b, h_ptr, FP8=FP8, UPCAST=UPCAST)", "b.to(h_ptr.dtype.element_ty)"),
    Mutant("rows past the batch written", "expand", "mask_m = rows < num_rows", "mask_m = rows >= 0"),
    Mutant("first column ignored", "expand", "tl.multiple_of(tl.load(site + 1), 16) + offs_n", "offs_n"),
)


def trial(judge, gpu_world, in_fp8, rank_rows, gpu_sites):
    """A few small comparisons, as in test_low_rank.py; raises where the kernels are wrong."""
    world = gpu_world(11, torch.float32)
    adapters = world.adapters([5, 16, 3, 24], epilogue=True)
    low_rank = judge.build(adapters, max_split=4)
    for step, row_slot in enumerate(([0, 1, 2, 2, -1, 0, 3], [0] * 40 + [3] * 30 + [2, -1])):
        rows = rank_rows(adapters, np.array(row_slot, dtype=np.int32))
        for layer, site in itertools.product((0, 1), gpu_sites[::3]):
            judge.check(world, adapters, low_rank, rows, layer=layer, site=site, beside=step == 0)
    adapters = world.adapters([5, 16, 3, 24], whole=True, epilogue=True)
    rows = rank_rows(adapters, np.array([3, 0, 1, -1, 2, 0, 3], dtype=np.int32))
    for path, site in itertools.product((Path.EXTENSION, Path.FIRST), gpu_sites[::3]):
        judge.check_site(world, adapters, judge.build(adapters, path=path), rows, layer=1, site=site, bias=True)
    codes, wide = in_fp8(world, world.adapters([5, 16, 3, 40], whole=True, epilogue=True))
    low_rank = judge.build(codes, path=Path.EXTENSION, dtype=torch.float32)
    rows = rank_rows(codes, rows.row_slot)
    judge.check_site(world, codes, low_rank, rows, layer=0, site=gpu_sites[0], wide=wide)
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
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_planted_fault_is_caught(judge, gpu_world, in_fp8, rank_rows, gpu_sites, tmp_path, record_property):
    faults = faults_of(MUTANTS, tmp_path, lambda _: trial(judge, gpu_world, in_fp8, rank_rows, gpu_sites))
    replays = stale_metadata(
        StepMetadata,
        lambda patch: replays_follow_the_metadata(judge, gpu_world, rank_rows, gpu_sites, Tape(patch)),
    )
    all_are_caught("low-rank kernels", [*faults, replays], record_property)


def test_every_mutant_still_fits_the_kernels():
    assert all(mutant.text() for mutant in MUTANTS)
