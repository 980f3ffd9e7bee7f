"""The GPU kernels in Triton's interpreter, which has to be chosen before Triton is imported: a process of their own."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.descriptors import Blocks, Descriptors
from kernels.epilogue import rows_with_epilogue
from kernels.fp8 import factor_bytes, from_fp8, to_fp8
from kernels.reference import add_low_rank
from kernels.sites import Site

os.environ["TRITON_INTERPRET"] = "1"
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

del os.environ["TRITON_INTERPRET"]  # processes that other tests start compile
knobs.runtime.interpret = True

from kernels.gpu.device import probe
from kernels.gpu.low_rank import TritonLowRank
from kernels.gpu.paths import Path, Paths, Timing
from kernels.gpu.shrink import shrink
from kernels.gpu.tiles import ExtensionTiles, Launch, Tiles
from tests.kernels.gpu.planting import COUNTS

GPU_SITES = (
    Site.fused("qkv", first_slice=0, in_features=96, out_features=(96, 48, 48)),
    Site.fused("o", first_slice=3, in_features=96, out_features=(96,)),
    Site.fused("gate_up", first_slice=4, in_features=96, out_features=(160, 160)),
    Site.fused("down", first_slice=6, in_features=160, out_features=(96,)),
)
ALIGN_ELEMENTS = 64  # 128 bytes of bfloat16
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LARGEST = 1.5  # of gains and shifts in tests

_LAUNCH = Launch(4, 2)
_EXTENSION = ExtensionTiles(64, 32, 64, _LAUNCH)

assert isinstance(shrink, InterpretedFunction), "Triton was imported before its interpreter was chosen: run this folder by itself"


def _even_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
    """A product that sums every element in one order, as matrix instructions do.

    The interpreter's own is the processor's BLAS, and some of those sum by the place of a row in its tile, so that equal rows
    differ in bits.
    """
    factors = (factor.data.astype(d.data.dtype) for factor in (a, b))
    return TensorHandle(np.einsum("mk,kn->mn", *factors) + d.data, d.dtype.scalar)


InterpreterBuilder.create_dot = _even_dot


def small_tiles(max_split: int) -> tuple[Tiles, ...]:
    """Sizes that leave tails in K and in the columns at widths of the tests; the row tiles are the product's."""
    return (
        Tiles(16, 16, 64, 32, max_split, 64, 32, _LAUNCH, _LAUNCH, _EXTENSION),
        Tiles(64, 64, 64, 32, max_split, 64, 32, _LAUNCH, _LAUNCH, _EXTENSION),
        Tiles(128, 64, 32, 64, max_split, 64, 32, _LAUNCH, _LAUNCH, _EXTENSION),
        Tiles(1 << 20, 128, 64, 64, 1, 128, 32, _LAUNCH, _LAUNCH, _EXTENSION),
    )


class Judge:
    """Runs a form of the product and compares it with the reference, every scratch value being NaN beforehand."""

    def build(self, adapters, *, max_rows=160, max_list=256, max_split=1, path=None, **options):
        low_rank = TritonLowRank(
            adapters.arena,
            adapters.descriptors,
            gpu=probe("cpu"),
            sites=GPU_SITES,
            max_rows=max_rows,
            max_list=max_list,
            table=small_tiles(max_split),
            paths=only(path) if path else Paths(),
            **options,
        )
        launches = low_rank.launches
        launches.h.fill_(torch.nan)
        launches.planes.fill_(torch.nan)
        launches.entries.fill_(0)
        return low_rank

    def run(self, low_rank, y, x, *, layer, site, beside=False):
        """Returns what the form makes of y, in place."""

        def add(out):
            out.copy_(y)
            if beside:
                low_rank.begin_site(x, layer=layer, site=site.name)
                low_rank.finish_site(out, x, layer=layer, site=site.name)
            else:
                low_rank.add_(out, x, layer=layer, site=site.name)

        return within_nan(tuple(y.shape), y.dtype, add)

    def check(self, world, adapters, low_rank, rows, *, layer, site, beside=False):
        """Compares what the form adds to an output."""
        num_rows = rows.row_slot.size
        x, y = world.tensor(num_rows, site.in_features), world.tensor(num_rows, site.columns[-1][1])
        low_rank.begin_step(rows)
        out = self.run(low_rank, y, x, layer=layer, site=site, beside=beside)
        expected = add_low_rank(y, x, arena=adapters.arena, descriptors=adapters.descriptors, layer=layer, site=site, rows=rows)
        bound = bound_of(world, expected, x, adapters, layer=layer, site=site, rows=rows)
        compare(out, expected, bound + rows.list_slot.size * 2.0**-24 * y.double().abs())  # the sum starts at y
        base = torch.from_numpy(rows.row_slot < 0)
        assert torch.equal(out[base], y[base])
        assert not low_rank.launches.arrived.any(), "arrivals are counted down"

    def check_site(self, world, adapters, low_rank, rows, *, layer, site, wide=None, bias=False, variant=None):
        """Compares a whole site, base product and adapters; `wide` are the adapters as the reference reads them."""
        wide = wide or adapters
        num_rows, k, n = rows.row_slot.size, site.in_features, site.columns[-1][1]
        x, weight, base_bias = world.tensor(num_rows, k), world.tensor(n, k), world.tensor(n) if bias else None
        low_rank.begin_step(rows, variant=variant)

        def project(y):
            low_rank.project_(y, x, weight, layer=layer, site=site.name, bias=base_bias)

        out = within_nan((num_rows, n), x.dtype, project)
        product = x.double() @ weight.double().t()
        y = product if base_bias is None else product + base_bias.double()
        expected = add_low_rank(y, x, arena=wide.arena, descriptors=wide.descriptors, layer=layer, site=site, rows=rows)
        bound = bound_of(world, expected, x, wide, layer=layer, site=site, rows=rows)
        unit = ROUNDOFF[world.dtype] * (2 if world.dtype is torch.bfloat16 else 1)
        delta = (expected - y).abs()
        summed = x.double().abs() @ weight.double().abs().t() + y.abs() + delta
        base_bound = 2 * unit * (product.abs() + y.abs() + delta) + (k + rows.list_slot.size + 2) * 2.0**-24 * summed
        compare(out, expected, bound + LARGEST * base_bound)
        assert not low_rank.launches.arrived.any(), "arrivals are counted down"


def bound_of(world, expected, x, adapters, *, rows, **at):
    """Returns the largest error that rounding can make; twice as much in bfloat16, where the interpreter cuts off instead.

    In rows with gains and shifts what came before is multiplied, and rounded once more.
    """
    bound = world.bound(expected, x, adapters, rows=rows, **at)
    changed = rows_with_epilogue(rows, adapters.descriptors)
    bound[changed] = LARGEST * bound[changed] + 2 * ROUNDOFF[world.dtype] * (expected[changed].abs() + LARGEST)
    return bound * (2 if world.dtype is torch.bfloat16 else 1)


def compare(out, expected, bound):
    error = (out.double() - expected).abs()
    worst = float((error / bound.clamp_min(1e-300)).nan_to_num(1e9).max())
    assert bool((error <= bound).all()), f"{worst:.2f} times the bound"


def within_nan(shape, dtype, run):
    """Returns what `run` makes of a view into a larger tensor of NaN, which has to stay so around it."""
    around = torch.full((shape[0] + 128, shape[1] + 256), torch.nan, dtype=dtype)
    out = around[:-128, 128:-128]
    run(out)
    result = out.clone()
    out.fill_(torch.nan)
    assert bool(around.isnan().all()), "written outside the output"
    return result


def only(path: Path) -> Paths:
    """One path at every site and bucket."""
    places = [(site.name, tiles.max_rows) for site in GPU_SITES for tiles in small_tiles(1)]
    return Paths(Timing(*place, other, 1.0 if other is path else 9.0) for place in places for other in Path)


def narrow(world, adapters):
    """Returns adapters in fp8 as the kernels read them, and as wide numbers of the same product behind the same offsets.

    Between the blocks lie codes of the largest value, and NaN in the wide arena.
    """
    table = adapters.descriptors
    _, num_layers, num_slices = table.rank.shape
    codes = np.full(2 * adapters.arena.numel() + 1024 * table.rank.size, 0x7E, dtype=np.uint8)
    wide = torch.full((codes.size,), torch.nan, dtype=torch.float64)
    narrow_table = Descriptors(*table.rank.shape)
    wide_bytes, arena_bytes = wide.view(torch.uint8), adapters.arena.view(torch.uint8)
    end = 0
    for slot, rank in enumerate(table.rank):
        offsets = {name: np.full((num_layers, num_slices), -1, np.int64) for name in ("a", "b", "gain", "shift")}
        for layer, index in itertools.product(range(num_layers), range(num_slices)):
            k, n = world.widths[index]
            count = int(rank[layer, index])
            if count:
                a, b_transposed = (
                    adapters.arena[at : at + count * width].float().view(count, width).numpy()
                    for at, width in ((table.a_offset[slot, layer, index], k), (table.b_offset[slot, layer, index], n))
                )
                pair = to_fp8(a, b_transposed.T)
                wide_a, wide_b = from_fp8(pair)
                codes[end : end + 4 * count] = pair.factors.view(np.uint8)
                end += factor_bytes(count)
                for name, coded, values in (("a", pair.a, wide_a), ("b", pair.b, wide_b.T)):
                    offsets[name][layer, index] = end
                    codes[end : end + coded.size] = coded.ravel()
                    wide[end : end + coded.size] = torch.from_numpy(np.ascontiguousarray(values)).ravel()
                    end += -(-coded.size // 128) * 128 + 128
            for name, starts in (("gain", table.gain_offset), ("shift", table.shift_offset)):
                start = int(starts[slot, layer, index]) * adapters.arena.element_size()
                if start >= 0:
                    offsets[name][layer, index] = end
                    vector = arena_bytes[start : start + 4 * n]
                    codes[end : end + 4 * n] = vector.numpy()
                    wide_bytes[8 * end : 8 * end + 4 * n] = vector
                    end += -(-4 * n // 128) * 128 + 128
        narrow_table.set(slot, Blocks(offsets["a"], offsets["b"], rank, table.scale[slot], offsets["gain"], offsets["shift"]))
    return (
        replace(adapters, arena=torch.from_numpy(codes), descriptors=narrow_table),
        replace(adapters, arena=wide, descriptors=narrow_table),
    )


def pytest_terminal_summary(terminalreporter):
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties if report.when == "call" else ():
            if name == COUNTS:
                terminalreporter.write_line(value)


@pytest.fixture
def judge():
    return Judge()


@pytest.fixture
def in_fp8():
    return narrow


@pytest.fixture
def gpu_sites():
    return GPU_SITES


@pytest.fixture
def gpu_world(world):
    """Builds a world whose arena holds NaN wherever no block lies."""

    def build(seed: int, dtype: torch.dtype):
        return world(seed, dtype, sites=GPU_SITES, align=ALIGN_ELEMENTS, filler=float("nan"))

    return build
