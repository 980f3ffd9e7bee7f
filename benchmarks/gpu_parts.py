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

from benchmarks.gpu_attention import Part as RowsOf
from benchmarks.gpu_attention import World, attention
from benchmarks.gpu_check import Figure
from benchmarks.gpu_correct import correct
from benchmarks.gpu_engine import engine
from benchmarks.gpu_load import load
from benchmarks.gpu_timing import COPY_BYTES, captured, median_ms, read_bandwidth
from benchmarks.gpu_world import DTYPE, BaseModel, Step, build_adapters
from benchmarks.roofline import LLAMA_7B, Shapes
from kernels.gpu.attention import Heads
from kernels.gpu.device import probe
from kernels.gpu.launches import SiteTable
from kernels.gpu.low_rank import TritonLowRank, Variant
from kernels.gpu.paths import Path
from kernels.gpu.tiles import tiles_for
from kernels.rows import BASE, build_rank_rows
from kernels.sites import Site

__all__ = ["attention", "card", "correct", "decode", "engine", "launches", "load", "mixes", "products"]

_DEVICE = "cuda"
_BEYOND_L2 = 512 << 20
_HEAD_DIM = 128
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


def decode() -> Iterator[Figure]:
    """A captured step of 64 rows: the base, and 22 adapters of rank 16 by every path; without attention, and with 256 tokens."""
    model, paths = BaseModel(LLAMA_7B, device=_DEVICE), tuple(Path)
    yield from _mixes(model, (Mix(22, 16),), num_rows=64, paths=paths)
    yield from _mixes(model, (Mix(22, 16),), num_rows=64, paths=paths, context=256)


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
    context: int = 0,
    shapes: Shapes = LLAMA_7B,
    device: str = _DEVICE,
    time_ms: Callable[[Step], float] = step_ms,
    bandwidth: Callable[[], float] = read_bandwidth,
) -> Iterator[Figure]:
    """Steps by each path over the fastest base step, and the time that adapters add over that of their bytes."""
    attend = _attention_of(shapes, num_rows=num_rows, context=context, device=device) if context else None
    at = f"{num_rows}_rows" + (f"_context_{context}" if context else "")
    base_bytes = shapes.base_bytes + num_rows * context * shapes.kv_token_bytes
    base: float | None = None
    for mix in mixes:
        adapters = build_adapters(shapes, count=mix.count, rank=mix.rank, device=device, is_fp8=mix.is_fp8)
        rows = adapters.rows(num_rows)
        for path in paths:
            low_rank = adapters.low_rank(max_rows=num_rows, path=path)
            low_rank.begin_step(rows, variant=Variant.LOW_RANK)
            if base is None:
                base = min(time_ms(model.step("base", low_rank, num_rows=num_rows, attend=attend)) for _ in range(2))
                yield Figure(f"base_{at}_ms", base, "ms")
                yield Figure(f"base_{at}_of_bandwidth", base_bytes / base * 1e3 / bandwidth(), "ratio")
            taken = time_ms(model.step("adapters", low_rank, num_rows=num_rows, attend=attend))
            size = mix.count * mix.rank * shapes.rank_row_bytes * (0.5 if mix.is_fp8 else 1.0)
            floor = 1 + size / base_bytes if num_rows <= 64 else None
            yield Figure(f"{mix}_{at}_{path}", taken / base, "ratio", floor)
            if num_rows <= 64:
                yield Figure(f"{mix}_{at}_{path}_added_over_bytes", (taken - base) / 1e3 * bandwidth() / size, "ratio", 1.0)


def _attention_of(shapes: Shapes, *, num_rows: int, context: int, device: str) -> Callable[[int], object]:
    """Returns what attends at a layer, for rows that decode behind so many tokens, over random pages."""
    head_dim = min(_HEAD_DIM, shapes.kv)
    heads = Heads(shapes.hidden // head_dim, shapes.kv // head_dim, head_dim, scale=head_dim**-0.5)
    world = World(heads, [RowsOf(context)] * num_rows, device=device, num_layers=shapes.num_layers)
    return lambda layer: world.run(layer=layer)
