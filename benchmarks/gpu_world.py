"""Random adapters and base products of a model's shapes, on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.roofline import Shapes
from kernels.descriptors import Blocks, Descriptors
from kernels.fp8 import factor_bytes
from kernels.gpu.device import Gpu, probe
from kernels.gpu.low_rank import TritonLowRank
from kernels.gpu.paths import Path, Paths, Timing
from kernels.gpu.tiles import TILES
from kernels.rows import RankRows, aligned_rank, build_rank_rows
from kernels.sites import Site

DTYPE = torch.bfloat16
_ROUNDOFF = 2.0**-8
_ROUNDINGS = 5  # of H, twice, of the products' sums and of y
_ALIGN_BYTES = 128

Form = Literal["base", "adapters"]


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters of one rank on all modules, slot by slot.

    Attributes:
        shapes: Of the model.
        rank: Of every adapter.
        arena: Their elements.
        descriptors: Where the blocks lie.
    """

    shapes: Shapes
    rank: int
    arena: Tensor
    descriptors: Descriptors

    @property
    def count(self) -> int:
        """Adapters in all."""
        return len(self.descriptors.largest_rank)

    def rows(self, num_rows: int, *, seed: int = 0) -> RankRows:
        """Returns a step in which every adapter has as many rows as the others, at random places."""
        row_slot = np.random.default_rng(seed).permutation(np.arange(num_rows) % self.count).astype(np.int32)
        return self.step(row_slot)

    def step(self, row_slot: np.ndarray) -> RankRows:
        """Returns the step of given rows."""
        return build_rank_rows(row_slot, self.descriptors.largest_rank)

    def low_rank(self, *, max_rows: int, gpu: Gpu | None = None, path: Path = Path.AFTER) -> TritonLowRank:
        """Returns the product over these adapters, by one path at every site."""
        return TritonLowRank(
            self.arena,
            self.descriptors,
            gpu=gpu or probe(self.arena.device),
            sites=self.shapes.sites,
            max_rows=max_rows,
            max_list=self.count * aligned_rank(self.rank),
            dtype=DTYPE,
            paths=everywhere(path, self.shapes),
        )


def everywhere(path: Path, shapes: Shapes) -> Paths:
    """Returns the choice of one path at all sites and in all buckets."""
    places = [(site.name, tiles.max_rows) for site in shapes.sites for tiles in TILES]
    return Paths(Timing(*place, other, 1.0 if other is path else 2.0) for place in places for other in Path)


def build_adapters(shapes: Shapes, *, count: int, rank: int, device: str, is_fp8: bool = False) -> Adapters:
    """Returns random adapters; those in fp8 of random codes and factors, whose values nobody compares."""
    table = Descriptors(count, shapes.num_layers, sum(len(site.slices) for site in shapes.sites), device=device)
    at, align = 0, _ALIGN_BYTES if is_fp8 else _ALIGN_BYTES // DTYPE.itemsize
    for slot in range(count):
        shape = table.rank.shape[1:]
        offsets = np.zeros((2, *shape), dtype=np.int64)
        for layer in range(shapes.num_layers):
            for site in shapes.sites:
                for index, (first, last) in zip(site.slices, site.columns, strict=True):
                    at += factor_bytes(rank) if is_fp8 else 0
                    for side, width in enumerate((site.in_features, last - first)):
                        offsets[side, layer, index] = at
                        at += -(-rank * width // align) * align
        ranks, scales = np.full(shape, rank, np.int32), np.full(shape, 1.5, np.float32)
        table.set(slot, Blocks(offsets[0], offsets[1], ranks, scales))
    if is_fp8:
        return Adapters(shapes, rank, torch.randint(0, 0x40, (at,), dtype=torch.uint8, device=device), table)
    return Adapters(shapes, rank, torch.empty(at, dtype=DTYPE, device=device).normal_(std=0.02), table)


def error_over_bound(
    out: Tensor, y: Tensor, x: Tensor, *, adapters: Adapters, layer: int, site: Site, rows: RankRows, roundings_of_y: int = 0
) -> float:
    """Returns the largest error of `out` beside float64, over what the roundings of bfloat16 may make."""
    table = adapters.descriptors
    roundoff = _ROUNDOFF if y.is_cuda else 2 * _ROUNDOFF  # the interpreter cuts off instead of rounding
    expected, bound = y.double(), torch.zeros_like(y, dtype=torch.float64)
    for slot in sorted({slot for slot in rows.row_slot.tolist() if slot >= 0}):
        own = torch.from_numpy(np.flatnonzero(rows.row_slot == slot)).to(y.device)
        for index, (first, last) in zip(site.slices, site.columns, strict=True):
            rank = int(table.rank[slot, layer, index])
            a, b = (
                adapters.arena[start : start + rank * width].view(rank, width).double()
                for start, width in (
                    (int(table.a_offset[slot, layer, index]), site.in_features),
                    (int(table.b_offset[slot, layer, index]), last - first),
                )
            )
            h = float(table.scale[slot, layer, index]) * (x[own].double() @ a.t())
            expected[own, first:last] += h @ b
            bound[own, first:last] += _ROUNDINGS * roundoff * (h.abs() @ b.abs())
    bound += roundoff * (expected.abs() + roundings_of_y * y.double().abs()) + 1e-9
    return float(((out.double() - expected).abs() / bound).nan_to_num(torch.inf).max())


class BaseModel:
    """The base products of a model, each with an input and an output of its own; attention and norms are left out."""

    def __init__(self, shapes: Shapes, *, device: str) -> None:
        def random(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=DTYPE, device=device).normal_(std=0.02)

        self._shapes, self._device = shapes, device
        self._weights = [
            {site.name: random(site.columns[-1][1], site.in_features) for site in shapes.sites} for _ in range(shapes.num_layers)
        ]
        self._head = random(shapes.vocab, shapes.hidden)
        self._random = random

    def step(self, form: Form, low_rank: TritonLowRank, *, num_rows: int) -> Step:
        """Returns one step, ready to run or to be captured; with adapters by the path of `low_rank`."""
        x = {site.name: self._random(num_rows, site.in_features) for site in self._shapes.sites}
        y = {site.name: self._random(num_rows, site.columns[-1][1]) for site in self._shapes.sites}
        return Step(form, low_rank, self._weights, self._head, x, y)


@dataclass(frozen=True, slots=True)
class Step:
    """All products of one step.

    Attributes:
        form: The base alone, or with its adapters.
        low_rank: The adapters' part; its step has begun.
        weights: Of each layer, by site.
        head: [vocab, hidden].
        x: Input by site.
        y: Output by site.
    """

    form: Form
    low_rank: TritonLowRank
    weights: list[dict[str, Tensor]]
    head: Tensor
    x: dict[str, Tensor]
    y: dict[str, Tensor]

    def __call__(self) -> None:
        """Runs the products, layer by layer."""
        for layer, weights in enumerate(self.weights):
            for site, weight in weights.items():
                x, y = self.x[site], self.y[site]
                if self.form == "adapters":
                    self.low_rank.project_(y, x, weight, layer=layer, site=site)
                else:
                    torch.mm(x, weight.t(), out=y)
        torch.mm(self.x["qkv"], self.head.t())
