"""The measurement at start by which `Paths` chooses: sites with the model's own weights and adapters of a trial."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.descriptors import Blocks, Descriptors
from kernels.fp8 import factor_bytes
from kernels.gpu.device import Gpu
from kernels.gpu.low_rank import TritonLowRank, Variant
from kernels.gpu.paths import Path, Paths, Timing, measure
from kernels.gpu.tiles import TILES, Tiles
from kernels.rows import aligned_rank, build_rank_rows
from kernels.sites import Site

_ALIGN_BYTES = 128
_REPEATS = 20

Clock = Callable[[Callable[[], None]], float]
"""Runs something and returns its microseconds."""


class Trial:
    """A step of every site by every path: 8 adapters of rank 16, over as many layers as weights are given.

    Weights of several layers follow each other, so that none stays in the cache from one run to the next. The trial's adapters
    have an arena of their own, which goes with it.

    Args:
        sites: The fused projections.
        weights: By site, [N, K] of some layers each, on the device.
        gpu: What the device can do.
        clock: Takes the time; `device_clock` on a device.
        table: Configurations by row bucket.
        num_adapters: Adapters of a step.
        rank: Their rank.
        is_fp8: Whether they are in fp8, in the layout of `kernels.fp8`.
    """

    def __init__(
        self,
        sites: tuple[Site, ...],
        weights: Mapping[str, Sequence[Tensor]],
        *,
        gpu: Gpu,
        clock: Clock,
        table: tuple[Tiles, ...] = TILES,
        num_adapters: int = 8,
        rank: int = 16,
        is_fp8: bool = False,
    ) -> None:
        self._sites, self._weights, self._gpu, self._clock, self._table = sites, weights, gpu, clock, table
        first = next(iter(weights.values()))[0]
        self._num_layers = min(len(layers) for layers in weights.values())
        self._num_adapters, self._rank, self._is_fp8 = num_adapters, rank, is_fp8
        self._dtype = first.dtype
        arena_dtype = torch.uint8 if is_fp8 else self._dtype
        blocks, elements = self._lay_out(_ALIGN_BYTES // arena_dtype.itemsize)
        self._arena = torch.zeros(elements, dtype=arena_dtype, device=first.device)
        self._descriptors = Descriptors(num_adapters, *blocks[0].rank.shape, device=first.device)
        for slot, one in enumerate(blocks):
            self._descriptors.set(slot, one)

    def paths(self, most_rows: int) -> Paths:
        """Measures every site in every bucket that steps of up to so many rows reach, at the most rows there, and chooses."""
        buckets = [tiles.max_rows for i, tiles in enumerate(self._table) if i == 0 or self._table[i - 1].max_rows < most_rows]
        return measure(
            [site.name for site in self._sites],
            buckets,
            time_us=lambda site, bucket, path: self.time_us(site, min(bucket, most_rows), path),
        )

    def time_us(self, name: str, num_rows: int, path: Path) -> float:
        """Returns the microseconds of one site, base product and adapters, by one path."""
        site = next(site for site in self._sites if site.name == name)
        low_rank = TritonLowRank(
            self._arena,
            self._descriptors,
            gpu=self._gpu,
            sites=(site,),
            max_rows=num_rows,
            max_list=self._num_adapters * aligned_rank(self._rank),
            dtype=self._dtype,
            table=self._table,
            paths=Paths(Timing(name, tiles.max_rows, one, float(one is not path)) for tiles in self._table for one in Path),
        )
        row_slot = (np.arange(num_rows) * self._num_adapters // num_rows).astype(np.int32)  # in their order, as the plan has them
        low_rank.begin_step(build_rank_rows(row_slot, self._descriptors.largest_rank), variant=Variant.LOW_RANK)
        x = torch.zeros(num_rows, site.in_features, dtype=self._dtype, device=self._arena.device)
        y = torch.empty(num_rows, site.columns[-1][1], dtype=self._dtype, device=self._arena.device)

        def run() -> None:
            for layer, weight in enumerate(self._weights[name][: self._num_layers]):
                low_rank.project_(y, x, weight, layer=layer, site=name)

        return self._clock(run) / self._num_layers

    def _lay_out(self, align: int) -> tuple[list[Blocks], int]:
        """Returns where the blocks lie, each on a multiple of `align` elements, and how many elements there are."""
        shape = (self._num_layers, sum(len(site.slices) for site in self._sites))
        blocks, end = [], 0
        for _ in range(self._num_adapters):
            offsets = np.zeros((2, *shape), dtype=np.int64)
            for layer in range(self._num_layers):
                for site in self._sites:
                    for index, (first, last) in zip(site.slices, site.columns, strict=True):
                        end += factor_bytes(self._rank) if self._is_fp8 else 0
                        for side, width in enumerate((site.in_features, last - first)):
                            offsets[side, layer, index] = end
                            end += -(-self._rank * width // align) * align
            ranks, scales = np.full(shape, self._rank, dtype=np.int32), np.ones(shape, dtype=np.float32)
            blocks.append(Blocks(offsets[0], offsets[1], ranks, scales))
        return blocks, end


def device_clock(run: Callable[[], None]) -> float:
    """Captures a run on the current CUDA device and returns the median microseconds of its replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()  # compiles, and allocates
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_REPEATS)]
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times_ms: list[float] = [start.elapsed_time(end) for start, end in marks]
    return 1e3 * statistics.median(times_ms)
