"""Random adapters and base products of a model's shapes, on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.roofline import Shapes
from kernels.descriptors import Blocks, Descriptors
from kernels.epilogue import vector_at
from kernels.fp8 import factor_bytes
from kernels.gpu.device import Gpu, probe
from kernels.gpu.low_rank import TritonLowRank
from kernels.gpu.paths import Path, Paths, Timing
from kernels.gpu.tiles import TILES
from kernels.rows import ABSENT, RankRows, aligned_rank, build_rank_rows

DTYPE = torch.bfloat16
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

    def low_rank(
        self, *, max_rows: int, gpu: Gpu | None = None, path: Path = Path.AFTER, batch_invariant: bool = False
    ) -> TritonLowRank:
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
            batch_invariant=batch_invariant,
        )


def everywhere(path: Path, shapes: Shapes) -> Paths:
    """Returns the choice of one path at all sites and in all buckets."""
    places = [(site.name, tiles.max_rows) for site in shapes.sites for tiles in TILES]
    return Paths(Timing(*place, other, 1.0 if other is path else 2.0) for place in places for other in Path)


def build_adapters(
    shapes: Shapes, *, count: int, rank: int, device: str, is_fp8: bool = False, has_epilogue: bool = False
) -> Adapters:
    """Returns random adapters of about the same sizes in either dtype; with an epilogue every third has gains and shifts."""
    table = Descriptors(count, shapes.num_layers, sum(len(site.slices) for site in shapes.sites), device=device)
    item_bytes = 1 if is_fp8 else DTYPE.itemsize
    end, factors, vectors = 0, [], []

    def place(size: int) -> int:
        nonlocal end
        start, end = end, end + -(-size * item_bytes // _ALIGN_BYTES) * _ALIGN_BYTES // item_bytes
        return start

    for slot in range(count):
        shape = table.rank.shape[1:]
        offsets = np.full((4, *shape), ABSENT, dtype=np.int64)
        for layer in range(shapes.num_layers):
            for site in shapes.sites:
                for index, (first, last) in zip(site.slices, site.columns, strict=True):
                    if is_fp8:
                        factors.append(place(factor_bytes(rank)))
                    for side, width in enumerate((site.in_features, last - first)):
                        offsets[side, layer, index] = place(rank * width)
                    for kind in (2, 3) if has_epilogue and slot % 3 == 0 else ():
                        offsets[kind, layer, index] = place((last - first) * 4 // item_bytes)
                        vectors.append((int(offsets[kind, layer, index]), last - first))
        ranks, scales = np.full(shape, rank, np.int32), np.full(shape, 1.5, np.float32)
        table.set(slot, Blocks(offsets[0], offsets[1], ranks, scales, offsets[2], offsets[3]))
    if is_fp8:
        arena = torch.randint(0, 0x80, (end,), dtype=torch.uint8, device=device)
        arena = (arena & 0x3F) | ((arena & 0x40) << 1)
        starts = torch.tensor(factors, device=device)[:, None] // 4 + torch.arange(rank, device=device)
        arena.view(torch.float32)[starts] = torch.rand(starts.shape, device=device) * 200 + 100
    else:
        arena = torch.empty(end, dtype=DTYPE, device=device).normal_(std=0.02)
    for start, width in vectors:
        vector_at(arena, start, width).uniform_(0.5, 1.5)
    return Adapters(shapes, rank, arena, table)


class BaseModel:
    """The base products of a model, each with an input and an output of its own; norms are left out."""

    def __init__(self, shapes: Shapes, *, device: str) -> None:
        def random(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=DTYPE, device=device).normal_(std=0.02)

        self._shapes, self._device = shapes, device
        self._weights = [
            {site.name: random(site.columns[-1][1], site.in_features) for site in shapes.sites} for _ in range(shapes.num_layers)
        ]
        self._head = random(shapes.vocab, shapes.hidden)
        self._random = random

    def step(self, form: Form, low_rank: TritonLowRank, *, num_rows: int, attend: Callable[[int], object] | None = None) -> Step:
        """Returns one step, ready to run or to be captured; with adapters by the path of `low_rank`."""
        x = {site.name: self._random(num_rows, site.in_features) for site in self._shapes.sites}
        y = {site.name: self._random(num_rows, site.columns[-1][1]) for site in self._shapes.sites}
        return Step(form, low_rank, self._weights, self._head, x, y, attend)


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
        attend: Runs the attention of a layer behind its first product; None leaves it out.
    """

    form: Form
    low_rank: TritonLowRank
    weights: list[dict[str, Tensor]]
    head: Tensor
    x: dict[str, Tensor]
    y: dict[str, Tensor]
    attend: Callable[[int], object] | None = None

    def __call__(self) -> None:
        """Runs the products, layer by layer."""
        for layer, weights in enumerate(self.weights):
            for site, weight in weights.items():
                x, y = self.x[site], self.y[site]
                if self.form == "adapters":
                    self.low_rank.project_(y, x, weight, layer=layer, site=site)
                else:
                    torch.mm(x, weight.t(), out=y)
                if self.attend is not None and site == "qkv":
                    self.attend(layer)
        torch.mm(self.x["qkv"], self.head.t())
