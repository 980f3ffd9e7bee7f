"""The parts of `benchmarks.gpu_check`; each yields its figures as it finds them. All but `correct` need a CUDA device."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from benchmarks.gpu_attention import attention
from benchmarks.gpu_check import Figure
from benchmarks.gpu_engine import arena_copies, engine
from benchmarks.gpu_timing import COPY_BYTES, captured, median_ms, read_bandwidth
from benchmarks.gpu_world import DTYPE, Adapters, BaseModel, Step, build_adapters, error_over_bound
from benchmarks.roofline import LLAMA_7B, Shapes, floor_ratio
from kernels.gpu.device import probe
from kernels.gpu.launches import SiteTable
from kernels.gpu.low_rank import TritonLowRank, Variant
from kernels.gpu.paths import Path
from kernels.gpu.tiles import tiles_for
from kernels.rows import BASE, RankRows, build_rank_rows
from kernels.sites import Site

__all__ = ["attention", "card", "correct", "decode", "engine", "launches", "load", "mixes", "products"]

_DEVICE = "cuda"
_BEYOND_L2 = 512 << 20
_UNIT_BYTES = 2 << 20
_TINY = Shapes(num_layers=2, hidden=256, kv=128, mlp=512, vocab=512)


def step_ms(step: Step) -> float:
    """Returns the median milliseconds of a captured step."""
    return median_ms(captured(step).replay)


def card() -> Iterator[Figure]:
    """The machine, its versions, its clocks, and its bandwidth."""
    facts = torch.cuda.get_device_properties(0)
    yield Figure("device", facts.name)
    yield Figure("multiprocessors", facts.multi_processor_count)
    yield Figure("versions", f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}")
    if smi := shutil.which("nvidia-smi"):
        query = "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit"
        told = subprocess.run([smi, query, "--format=csv,noheader"], capture_output=True, text=True, check=False, timeout=10)
        yield Figure("driver, clocks, power limit", told.stdout.strip())
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=_DEVICE)
    target = torch.empty_like(source)
    yield Figure("copy_bandwidth", 2 * COPY_BYTES / median_ms(lambda: target.copy_(source)) / 1e9, "TB/s")
    yield Figure("read_bandwidth", read_bandwidth() / 1e12, "TB/s")


def products() -> Iterator[Figure]:
    """The library's base products and ours with an empty list, over weights that rotate beyond the cache."""
    bandwidth = read_bandwidth()
    for site in LLAMA_7B.sites:
        width = site.columns[-1][1]
        size = width * site.in_features * DTYPE.itemsize
        weights = [torch.randn(width, site.in_features, dtype=DTYPE, device=_DEVICE) for _ in range(-(-_BEYOND_L2 // size))]
        for num_rows in (1, 16, 64, 128):
            x = torch.randn(num_rows, site.in_features, dtype=DTYPE, device=_DEVICE)
            y = torch.empty(num_rows, width, dtype=DTYPE, device=_DEVICE)
            library = captured(lambda x=x, y=y, weights=weights: _products(y, x, weights))  # type: ignore[misc]
            ours = captured(_our_products(y, x, weights, site=site))
            taken, ours_taken = (median_ms(graph.replay) / len(weights) for graph in (library, ours))
            yield Figure(f"{site.name}_{num_rows}_rows_us", taken * 1e3, "us")
            yield Figure(f"{site.name}_{num_rows}_rows_of_bandwidth", size / (taken / 1e3) / bandwidth, "ratio")
            yield Figure(f"{site.name}_{num_rows}_rows_ours_of_library", ours_taken / taken, "ratio")


def _products(y: Tensor, x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        torch.mm(x, weight.t(), out=y)


def _our_products(y: Tensor, x: Tensor, weights: list[Tensor], *, site: Site, shapes: Shapes = LLAMA_7B) -> Callable[[], None]:
    """Returns a run of the base products of `Path.EXTENSION` alone: the list is empty, and no shrink is launched."""
    device = str(x.device)
    low_rank = build_adapters(dataclasses.replace(shapes, num_layers=1), count=1, rank=16, device=device).low_rank(max_rows=128)
    low_rank.begin_step(build_rank_rows(np.full(len(x), BASE), {}), variant=Variant.LOW_RANK)
    at, tiles = SiteTable.of(site, x.device), tiles_for(len(x))

    def run() -> None:
        for weight in weights:
            low_rank.launches.extension(y, x, weight, None, at=at, tiles=tiles, num_rows=len(x))

    return run


def launches(*, pairs: int = 500) -> Iterator[Figure]:
    """Small shrinks and expands in a captured graph, with and without dependent launch, against empty kernels."""
    value = torch.zeros(1, device=_DEVICE)
    yield Figure("small_kernel_us", median_ms(captured(lambda: _add_many(value, pairs)).replay) / pairs * 1e3, "us")
    adapters, gpu = build_adapters(_TINY, count=2, rank=16, device=_DEVICE), probe(_DEVICE)
    outputs = []
    for dependent in sorted({False, gpu.has_dependent_launch}):
        low_rank = adapters.low_rank(max_rows=16, gpu=dataclasses.replace(gpu, has_dependent_launch=dependent))
        low_rank.begin_step(adapters.rows(16))
        torch.manual_seed(0)
        x, y = (torch.randn(16, 256, dtype=DTYPE, device=_DEVICE) for _ in range(2))
        y.zero_()
        graph = captured(lambda low_rank=low_rank, y=y, x=x: _add_pairs(low_rank, y, x, pairs))  # type: ignore[misc]
        name = "dependent" if dependent else "plain"
        yield Figure(f"shrink_and_expand_{name}_us", median_ms(graph.replay) / pairs * 1e3, "us")
        outputs.append(y)
    assert all(torch.equal(outputs[0], y) for y in outputs), "dependent launch changes the result"


def _add_many(value: Tensor, count: int) -> None:
    for _ in range(count):
        value.add_(1)


def _add_pairs(low_rank: TritonLowRank, y: Tensor, x: Tensor, count: int) -> None:
    for i in range(count):
        low_rank.add_(y, x, layer=i % 2, site="o")


def correct(*, shapes: Shapes = LLAMA_7B, device: str = _DEVICE, repeats: int = 1000, most_rows: int = 300) -> Iterator[Figure]:
    """Every site, bucket and path beside float64, the same bits many times, and bits that do not depend on neighbours."""
    shapes = dataclasses.replace(shapes, num_layers=2)
    adapters = build_adapters(shapes, count=5, rank=24, device=device)
    most_rows = max(64, most_rows)
    worst = 0.0
    for path in Path:
        low_rank = adapters.low_rank(max_rows=most_rows, path=path)
        for num_rows in (rows for rows in (1, 16, 64, 128, 300) if rows <= most_rows):
            rows = adapters.rows(num_rows) if num_rows > 1 else adapters.step(np.array([3], dtype=np.int32))
            low_rank.begin_step(rows)
            for site in shapes.sites:
                worst = max(worst, _error_of(low_rank, adapters, rows, site=site, device=device))
    yield Figure("error_over_bound", worst, "ratio", 1.0)
    assert worst <= 1, f"an error is {worst:.2f} times its bound"
    site = shapes.sites[0]
    x, y = (torch.randn(64, width, dtype=DTYPE, device=device) for width in (site.in_features, site.columns[-1][1]))
    low_rank.begin_step(adapters.rows(64))
    different = torch.zeros((), dtype=torch.int64, device=device)
    outputs = [torch.empty_like(y) for _ in range(2)]
    for i in range(repeats):
        outputs[min(i, 1)].copy_(y)
        low_rank.add_(outputs[min(i, 1)], x, layer=0, site=site.name)
        different += (outputs[0] != outputs[min(i, 1)]).any()
    yield Figure(f"different_of_{repeats}_repeats", int(different))
    assert int(different) == 0, "the same step gave other bits"
    changed = 0
    for seed in range(min(repeats, 20)):
        row_slot = np.random.default_rng(seed).integers(-1, adapters.count, 64).astype(np.int32)
        row_slot[7] = adapters.rows(64).row_slot[7]
        low_rank.begin_step(adapters.step(row_slot))
        out = y.clone()
        low_rank.add_(out, x, layer=0, site=site.name)
        changed += int(not torch.equal(out[7], outputs[0][7]))
    yield Figure("rows_changed_by_neighbours", changed)
    assert changed == 0, "a row's bits depend on its neighbours"


def _error_of(low_rank: TritonLowRank, adapters: Adapters, rows: RankRows, *, site: Site, device: str) -> float:
    num_rows, width = rows.row_slot.size, site.columns[-1][1]
    x, y = torch.randn(num_rows, site.in_features, dtype=DTYPE, device=device), torch.full((num_rows, width), torch.nan)
    weight = torch.empty(width, site.in_features, dtype=DTYPE, device=device).normal_(std=site.in_features**-0.5)
    y = y.to(device, DTYPE)
    low_rank.project_(y, x, weight, layer=1, site=site.name)
    product = x.double() @ weight.double().t()
    return error_over_bound(y, product, x, adapters=adapters, layer=1, site=site, rows=rows, roundings_of_y=2)


def decode() -> Iterator[Figure]:
    """A captured step of 64 rows: the base, and 22 adapters of rank 16 by every path."""
    yield from _mixes(BaseModel(LLAMA_7B, device=_DEVICE), (Mix(22, 16),), num_rows=64, paths=tuple(Path))


@dataclass(frozen=True, slots=True)
class Mix:
    """Distinct adapters of one step, all of one rank."""

    count: int
    rank: int
    is_fp8: bool = False

    def __str__(self) -> str:
        """Its name in a figure."""
        return f"{self.count}_adapters_rank_{self.rank}{'_fp8' if self.is_fp8 else ''}"


def mixes() -> Iterator[Figure]:
    """Other numbers of adapters and ranks, and fp8; then a prefill of 2048 rows."""
    model = BaseModel(LLAMA_7B, device=_DEVICE)
    others = (Mix(22, 16, is_fp8=True), Mix(1, 16), Mix(2, 16), Mix(8, 16), Mix(64, 16), Mix(22, 64))
    yield from _mixes(model, others, num_rows=64, paths=(Path.BESIDE, Path.EXTENSION))
    yield from _mixes(model, (Mix(4, 16),), num_rows=2048, paths=(Path.AFTER, Path.EXTENSION))


def _mixes(
    model: BaseModel,
    mixes: tuple[Mix, ...],
    *,
    num_rows: int,
    paths: tuple[Path, ...],
    shapes: Shapes = LLAMA_7B,
    device: str = _DEVICE,
    time_ms: Callable[[Step], float] = step_ms,
) -> Iterator[Figure]:
    base: float | None = None
    for mix in mixes:
        adapters = build_adapters(shapes, count=mix.count, rank=mix.rank, device=device, is_fp8=mix.is_fp8)
        rows = adapters.rows(num_rows)
        for path in paths:
            low_rank = adapters.low_rank(max_rows=num_rows, path=path)
            low_rank.begin_step(rows, variant=Variant.LOW_RANK)
            if base is None:
                base = min(time_ms(model.step("base", low_rank, num_rows=num_rows)) for _ in range(2))
                yield Figure(f"base_{num_rows}_rows_ms", base, "ms")
                if device == _DEVICE:
                    yield Figure(f"base_{num_rows}_rows_of_bandwidth", shapes.base_bytes / base * 1e3 / read_bandwidth(), "ratio")
            taken = time_ms(model.step("adapters", low_rank, num_rows=num_rows))
            half = 0.5 if mix.is_fp8 else 1.0
            floor = 1 + half * (floor_ratio(shapes, num_adapters=mix.count, rank=mix.rank) - 1) if num_rows <= 64 else None
            yield Figure(f"{mix}_{num_rows}_rows_{path}", taken / base, "ratio", floor)


def load() -> Iterator[Figure]:
    """An adapter's bytes from pinned memory, in one piece and by units, and what they do to the steps beside them."""
    size = 16 * LLAMA_7B.rank_row_bytes
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=_DEVICE)
    plain = median_ms(lambda: target.copy_(host, non_blocking=True))
    pieces = list(zip(host.split(_UNIT_BYTES), target.split(_UNIT_BYTES), strict=True))
    by_units = median_ms(lambda: [to.copy_(of, non_blocking=True) for of, to in pieces])
    yield Figure("pinned_copy_bandwidth", size / plain / 1e6, "GB/s")
    yield Figure("by_units_of_pinned_copy", plain / by_units, "ratio")
    adapters = build_adapters(LLAMA_7B, count=22, rank=16, device=_DEVICE)
    low_rank = adapters.low_rank(max_rows=64)
    low_rank.begin_step(adapters.rows(64))
    replay = captured(BaseModel(LLAMA_7B, device=_DEVICE).step("adapters", low_rank, num_rows=64)).replay

    def step() -> None:
        replay()
        torch.cuda.synchronize()

    yield from arena_copies(plain_s=plain / 1e3, step=step)
