"""Whether the low-rank kernels are right: the part `correct` of `benchmarks.gpu_check`; runs in Triton's interpreter too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check import Figure
from benchmarks.gpu_world import DTYPE, Adapters, build_adapters
from benchmarks.roofline import LLAMA_7B, Shapes
from kernels.epilogue import vector_at
from kernels.fp8 import decode, factor_bytes
from kernels.gpu.low_rank import TritonLowRank
from kernels.gpu.paths import Path
from kernels.rows import RankRows
from kernels.sites import Site

ROW_COUNTS = (1, 16, 64, 128, 300)
_ROUNDOFF = 2.0**-8
_ROUNDINGS = 5  # of H, twice, of the products' sums and of y
_ROW = 7  # that is looked at beside others
_CODES = np.arange(256, dtype=np.uint8)
_VALUES = decode(np.where(_CODES & 0x7F == 0x7F, 0, _CODES))  # that code is no number


def correct(
    *,
    shapes: Shapes = LLAMA_7B,
    device: str = "cuda",
    paths: tuple[Path, ...] = tuple(Path),
    count: int = 5,
    repeats: int = 1000,
    row_counts: tuple[int, ...] = ROW_COUNTS,
) -> Iterator[Figure]:
    """Every kernel by every path beside float64, and its bits: the same every time, and beside any neighbours.

    Both in the model's dtype and in fp8, with adapters that have gains and shifts and such that have none. In the batch-invariant
    form a row's bits do not depend on the number of rows either.
    """
    shapes = dataclasses.replace(shapes, num_layers=2)
    for is_fp8 in (False, True):
        adapters = build_adapters(shapes, count=count, rank=24, device=device, is_fp8=is_fp8, has_epilogue=True)
        prefix = "fp8_" if is_fp8 else ""
        worst = max(_error(adapters, path, num_rows, device=device) for path in paths for num_rows in row_counts)
        yield Figure(f"{prefix}error_over_bound", worst, "ratio", 1.0)
        assert worst <= 1, f"an error is {worst:.2f} times its bound"
        different = changed = 0
        for path in paths:
            site = _OneSite(adapters, path, num_rows=min(64, max(row_counts)), device=device)
            different += site.different(repeats)
            changed += site.changed_by_neighbours(min(repeats, 20))
        yield Figure(f"{prefix}different_of_{len(paths) * repeats}_repeats", different)
        assert different == 0, "the same step gave other bits"
        yield Figure(f"{prefix}rows_changed_by_neighbours", changed)
        assert changed == 0, "a row's bits depend on its neighbours"
        changed = _changed_by_row_count(adapters, row_counts, device=device)
        yield Figure(f"{prefix}rows_changed_by_row_count", changed)
        assert changed == 0, "a row's bits depend on the number of rows in the batch-invariant form"


def _rows(adapters: Adapters, num_rows: int) -> RankRows:
    return adapters.rows(num_rows) if num_rows > 1 else adapters.step(np.array([adapters.count - 1], dtype=np.int32))


def _random(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=device)


def _error(adapters: Adapters, path: Path, num_rows: int, *, device: str) -> float:
    """Returns the largest error over its bound of all sites."""
    low_rank, rows, worst = adapters.low_rank(max_rows=num_rows, path=path), _rows(adapters, num_rows), 0.0
    low_rank.begin_step(rows)
    for site in adapters.shapes.sites:
        width = site.columns[-1][1]
        x, weight = _random(num_rows, site.in_features, device=device), _random(width, site.in_features, device=device)
        weight *= site.in_features**-0.5
        y = torch.full((num_rows, width), torch.nan, dtype=DTYPE, device=device)
        low_rank.project_(y, x, weight, layer=1, site=site.name)
        product = x.double() @ weight.double().t()
        error = error_over_bound(y, product, x, adapters=adapters, layer=1, site=site, rows=rows, roundings_of_y=2)
        worst = max(worst, error)
    return worst


class _OneSite:
    """One step at the first site, by one path, over and over."""

    def __init__(self, adapters: Adapters, path: Path, *, num_rows: int, device: str) -> None:
        self._adapters, self._site = adapters, adapters.shapes.sites[0]
        self._low_rank = adapters.low_rank(max_rows=num_rows, path=path)
        width = self._site.columns[-1][1]
        self._x, self._y = _random(num_rows, self._site.in_features, device=device), _random(num_rows, width, device=device)
        self._weight = _random(width, self._site.in_features, device=device)
        self._rows = adapters.rows(num_rows)
        self._low_rank.begin_step(self._rows)
        self._first = self._run().clone()

    def _run(self) -> Tensor:
        self._low_rank.project_(self._y, self._x, self._weight, layer=0, site=self._site.name)
        return self._y

    def different(self, repeats: int) -> int:
        """Returns the repeats that gave other bits."""
        different = torch.zeros((), dtype=torch.int64, device=self._x.device)
        for _ in range(repeats):
            different += (self._run() != self._first).any()
        return int(different)

    def changed_by_neighbours(self, steps: int) -> int:
        """Returns the steps of other adapters at random in which one row, that kept its own, got other bits."""
        changed = 0
        for seed in range(steps):
            row_slot = np.random.default_rng(seed).integers(-1, self._adapters.count, len(self._x)).astype(np.int32)
            row_slot[_ROW] = self._rows.row_slot[_ROW]
            self._low_rank.begin_step(self._adapters.step(row_slot))
            changed += int(not torch.equal(self._run()[_ROW], self._first[_ROW]))
        return changed


def _changed_by_row_count(adapters: Adapters, row_counts: tuple[int, ...], *, device: str) -> int:
    """Returns the numbers of rows, 1 among them, beside which the first row of the largest step gets other bits."""
    most, site = max(row_counts), adapters.shapes.sites[0]
    low_rank: TritonLowRank = adapters.low_rank(max_rows=most, batch_invariant=True)
    x, y = (_random(most, width, device=device) for width in (site.in_features, site.columns[-1][1]))
    row_slot, kept = adapters.rows(most).row_slot, []
    for num_rows in sorted({1, *row_counts}):
        low_rank.begin_step(adapters.step(row_slot[:num_rows]))
        out = y[:num_rows].clone()
        low_rank.add_(out, x[:num_rows], layer=0, site=site.name)
        kept.append(out[0])
    return sum(not torch.equal(one, kept[-1]) for one in kept)


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
            a, b = _pair(adapters, (slot, layer, index), widths=(site.in_features, last - first))
            h = float(table.scale[slot, layer, index]) * (x[own].double() @ a.t())
            expected[own, first:last] += h @ b
            bound[own, first:last] += _ROUNDINGS * roundoff * (h.abs() @ b.abs())
    bound += roundoff * (expected.abs() + roundings_of_y * y.double().abs()) + 1e-9
    for slot in np.flatnonzero(table.has_epilogue):
        own = torch.from_numpy(np.flatnonzero(rows.row_slot == slot)).to(y.device)
        for index, (first, last) in zip(site.slices, site.columns, strict=True):
            gain, shift = (
                vector_at(adapters.arena, int(offsets[slot, layer, index]), last - first).double()
                for offsets in (table.gain_offset, table.shift_offset)
            )
            expected[own, first:last] = gain * expected[own, first:last] + shift
            bound[own, first:last] = gain * bound[own, first:last] + roundoff * expected[own, first:last].abs()
    return float(((out.double() - expected).abs() / bound).nan_to_num(torch.inf).max())


def _pair(adapters: Adapters, at: tuple[int, int, int], *, widths: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns A, [r, K], and B, [r, N], of a block in float64."""
    arena, table = adapters.arena, adapters.descriptors
    rank, starts = int(table.rank[at]), (int(table.a_offset[at]), int(table.b_offset[at]))
    a, b = (arena[start : start + rank * width].view(rank, width) for start, width in zip(starts, widths, strict=True))
    if arena.dtype is not torch.uint8:
        return a.double(), b.double()
    values = torch.from_numpy(_VALUES).to(arena.device).double()
    factors = vector_at(arena, starts[0] - factor_bytes(rank), rank).double() / 65536
    return values[a.int()] * factors[:, None], values[b.int()]
