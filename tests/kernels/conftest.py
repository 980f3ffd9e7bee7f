"""Small models and random adapters for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernels.descriptors import Blocks, Descriptors
from kernels.epilogue import vector_at
from kernels.rows import ABSENT, RankRows, build_rank_rows
from kernels.sites import Site

# Odd widths, so that nothing is aligned by luck.
SITES = (
    Site.fused("qkv", first_slice=0, in_features=37, out_features=(37, 11, 11)),
    Site.fused("o", first_slice=3, in_features=37, out_features=(37,)),
    Site.fused("gate_up", first_slice=4, in_features=37, out_features=(53, 53)),
    Site.fused("down", first_slice=6, in_features=53, out_features=(37,)),
)
NUM_LAYERS = 2
NUM_SLICES = 7
POPULARITIES = ("none", "one", "distinct", "uniform", "zipf", "skewed")

# Unit roundoff of each dtype.
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Roundings that H·B passes: the shrink's output, the scaled H, a block's product, the sum over an adapter's blocks (two).
ROUNDINGS_OF_DELTA = 5


@dataclass(frozen=True)
class Adapters:
    """An arena with random adapters in it, one a slot; between the blocks lie values that must never be read."""

    arena: torch.Tensor
    descriptors: Descriptors
    spare: int


class World:
    """Builds adapters and batches, and judges a result against a bound derived from the roundings that it passed.

    Blocks start on multiples of `align` elements, at least seven elements apart; between them lies `filler`.
    """

    def __init__(self, seed: int, dtype: torch.dtype, *, sites=SITES, align: int = 1, filler: float = 3e38) -> None:
        self.rng = np.random.default_rng(seed)
        self.torch_rng = torch.Generator().manual_seed(seed)
        self.dtype, self.align, self.filler = dtype, align, filler
        self.widths = {
            index: (site.in_features, last - first)
            for site in sites
            for index, (first, last) in zip(site.slices, site.columns, strict=True)
        }

    def adapters(self, ranks: list[int], *, whole: bool = False, epilogue: bool = False) -> Adapters:
        """Slot i has an adapter of largest rank ranks[i]; unless whole, it lacks modules and has smaller ranks in others.

        With an epilogue, two of three adapters have gains and shifts between 0.5 and 1.5, unless whole in some places only.
        """
        gap = 2 * (7 + self.align)
        size = sum(rank + 1 for rank in ranks) * NUM_LAYERS * sum(k + n + gap for k, n in self.widths.values()) * 2 + 1024
        if epilogue:
            size += len(ranks) * NUM_LAYERS * sum(4 * n + gap for _, n in self.widths.values()) * 2
        arena = torch.full((size,), self.filler, dtype=self.dtype)
        adapters = Adapters(arena, Descriptors(len(ranks), NUM_LAYERS, NUM_SLICES), size // 2)
        used = 3
        for slot, rank in enumerate(ranks):
            used = self.load(adapters, slot, rank, at=used, whole=whole, epilogue=epilogue and slot % 3 != 1)
        assert used <= adapters.spare
        return adapters

    def load(
        self,
        adapters: Adapters,
        slot: int,
        rank: int,
        *,
        at: int,
        whole: bool = False,
        value: float | None = None,
        epilogue: bool = False,
    ) -> int:
        """Writes an adapter at an offset of the arena and points the slot at it; returns the first free offset."""
        shape = (NUM_LAYERS, NUM_SLICES)
        gain_offset, shift_offset = np.full(shape, ABSENT, np.int64), np.full(shape, ABSENT, np.int64)
        blocks = Blocks(
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
            gain_offset,
            shift_offset,
        )
        full = (int(self.rng.integers(NUM_LAYERS)), int(self.rng.integers(NUM_SLICES)))
        for layer in range(NUM_LAYERS):
            for index, (k, n) in self.widths.items():
                here = rank if whole or (layer, index) == full else int(self.rng.choice([0, rank, -(-rank // 2)]))
                blocks.rank[layer, index] = here
                blocks.scale[layer, index] = self.rng.uniform(0.3, 3.0) * self.rng.choice([-1, 1])
                for offsets, width in ((blocks.a_offset, k), (blocks.b_offset, n)):
                    at = -(-at // self.align) * self.align
                    offsets[layer, index] = at
                    rows = torch.randn(here * width, generator=self.torch_rng)
                    adapters.arena[at : at + here * width] = rows if value is None else value
                    at += here * width + 7
                for offsets in (gain_offset, shift_offset) if epilogue else ():
                    if whole or self.rng.random() < 0.6:
                        at = offsets[layer, index] = -(-at // max(self.align, 4)) * max(self.align, 4)
                        vector_at(adapters.arena, at, n)[:] = torch.rand(n, generator=self.torch_rng) + 0.5
                        at += 4 * n // adapters.arena.element_size() + 7
        adapters.descriptors.set(slot, blocks)
        return at

    def row_slot(self, num_rows: int, num_slots: int, popularity: str, *, base_rows: bool = True) -> np.ndarray:
        """Slots of the rows, shuffled; with base rows about every fifth is one, except in `distinct` and `none`."""
        rows = {
            "none": np.full(num_rows, -1),
            "one": np.full(num_rows, num_slots - 1),
            "distinct": np.where(np.arange(num_rows) < num_slots, np.arange(num_rows), -1),
            "uniform": np.arange(num_rows) % num_slots,
            "zipf": np.minimum(self.rng.zipf(1.3, num_rows) - 1, num_slots - 1),
            "skewed": np.maximum(np.arange(num_rows) - num_rows + num_slots, 0),
        }[popularity]
        if base_rows and popularity not in ("none", "distinct"):
            rows = np.where(self.rng.random(num_rows) < 0.2, -1, rows)
        return self.rng.permutation(rows).astype(np.int32)

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.torch_rng).to(self.dtype)

    def bound(self, expected: torch.Tensor, x: torch.Tensor, adapters: Adapters, *, layer: int, site: Site, rows: RankRows):
        """Returns the largest error that rounding can make, element by element."""
        unit = ROUNDOFF[self.dtype]
        table = adapters.descriptors
        bound = unit * expected.abs()
        for t, slot in enumerate(rows.row_slot.tolist()):
            for index, (first, last) in zip(site.slices, site.columns, strict=True):
                rank = int(table.rank[slot, layer, index]) if slot >= 0 else 0
                if rank == 0:
                    continue
                k, n = site.in_features, last - first
                a_start, b_start = int(table.a_offset[slot, layer, index]), int(table.b_offset[slot, layer, index])
                a = adapters.arena[a_start : a_start + rank * k].double().view(rank, k)
                b = adapters.arena[b_start : b_start + rank * n].double().view(rank, n).abs()
                scale = abs(float(table.scale[slot, layer, index]))
                h = scale * (a @ x[t].double()).abs()
                summed = scale * (a.abs() @ x[t].double().abs())
                bound[t, first:last] += ROUNDINGS_OF_DELTA * unit * (h @ b) + (k + rank + 2) * 2.0**-24 * (summed @ b)
        return bound


@pytest.fixture
def world():
    return World


@pytest.fixture
def rank_rows():
    def build(adapters: Adapters, row_slot: np.ndarray) -> RankRows:
        return build_rank_rows(row_slot, adapters.descriptors.largest_rank)

    return build


@pytest.fixture
def sites():
    return SITES
