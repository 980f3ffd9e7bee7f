"""The GPU kernels in Triton's interpreter, which has to be chosen before Triton is imported: a process of their own."""

from __future__ import annotations

import os

import pytest
import torch

from kernels.reference import add_low_rank
from kernels.sites import Site

os.environ["TRITON_INTERPRET"] = "1"
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction

del os.environ["TRITON_INTERPRET"]  # processes that other tests start compile
knobs.runtime.interpret = True

from kernels.gpu.device import probe
from kernels.gpu.low_rank import TritonLowRank
from kernels.gpu.shrink import shrink
from kernels.gpu.tiles import Launch, Tiles

GPU_SITES = (
    Site.fused("qkv", first_slice=0, in_features=96, out_features=(96, 48, 48)),
    Site.fused("o", first_slice=3, in_features=96, out_features=(96,)),
    Site.fused("gate_up", first_slice=4, in_features=96, out_features=(160, 160)),
    Site.fused("down", first_slice=6, in_features=160, out_features=(96,)),
)
ALIGN_ELEMENTS = 64  # 128 bytes of bfloat16

_LAUNCH = Launch(4, 2)

assert isinstance(shrink, InterpretedFunction), "Triton was imported before its interpreter was chosen: run this folder by itself"


def small_tiles(max_split: int) -> tuple[Tiles, ...]:
    """Sizes that leave tails in K and in the columns at widths of the tests; the row tiles are the product's."""
    return (
        Tiles(16, 16, 64, 32, max_split, 64, 32, _LAUNCH, _LAUNCH),
        Tiles(64, 64, 64, 32, max_split, 64, 32, _LAUNCH, _LAUNCH),
        Tiles(128, 64, 32, 64, max_split, 64, 32, _LAUNCH, _LAUNCH),
        Tiles(1 << 20, 128, 64, 64, 1, 128, 32, _LAUNCH, _LAUNCH),
    )


class Judge:
    """Runs a form of the product and compares it with the reference, every scratch value being NaN beforehand."""

    def build(self, adapters, *, max_rows=160, max_list=256, max_split=1, **options):
        low_rank = TritonLowRank(
            adapters.arena,
            adapters.descriptors,
            gpu=probe("cpu"),
            sites=GPU_SITES,
            max_rows=max_rows,
            max_list=max_list,
            table=small_tiles(max_split),
            **options,
        )
        low_rank._h.fill_(torch.nan)
        low_rank._planes.fill_(torch.nan)
        low_rank._entries.fill_(0)
        return low_rank

    def run(self, low_rank, y, x, *, layer, site, in_place=True):
        """Returns what the form makes of y: a view into a larger tensor of NaN, which has to stay so around it."""
        around = torch.full((y.shape[0] + 128, y.shape[1] + 256), torch.nan, dtype=y.dtype)
        out = around[:-128, 128:-128]
        if in_place:
            out.copy_(y)
            low_rank.add_(out, x, layer=layer, site=site.name)
        else:
            low_rank.write_(out, x, layer=layer, site=site.name)
        result = out.clone()
        out.fill_(torch.nan)
        assert bool(around.isnan().all()), "written outside the output"
        return result

    def check(self, world, adapters, low_rank, rows, *, layer, site, in_place=True):
        num_rows = rows.row_slot.size
        x, y = world.tensor(num_rows, site.in_features), world.tensor(num_rows, site.columns[-1][1])
        if not in_place:
            y.zero_()
        low_rank.begin_step(rows)
        out = self.run(low_rank, y, x, layer=layer, site=site, in_place=in_place)
        expected = add_low_rank(y, x, arena=adapters.arena, descriptors=adapters.descriptors, layer=layer, site=site, rows=rows)
        bound = world.bound(expected, x, adapters, layer=layer, site=site, rows=rows)
        if world.dtype is torch.bfloat16:
            bound *= 2  # the interpreter cuts off instead of rounding
        bound += rows.list_slot.size * 2.0**-24 * y.double().abs()  # the sum starts at y
        error = (out.double() - expected).abs()
        assert bool((error <= bound).all()), (
            f"{float((error / bound.clamp_min(1e-300)).nan_to_num(1e9).max()):.2f} times the bound"
        )
        base = torch.from_numpy(rows.row_slot < 0)
        assert torch.equal(out[base], y[base])
        assert not low_rank._arrived.any(), "arrivals are counted down"


@pytest.fixture
def judge():
    return Judge()


@pytest.fixture
def gpu_sites():
    return GPU_SITES


@pytest.fixture
def gpu_world(world):
    """Builds a world whose arena holds NaN wherever no block lies."""

    def build(seed: int, dtype: torch.dtype):
        return world(seed, dtype, sites=GPU_SITES, align=ALIGN_ELEMENTS, filler=float("nan"))

    return build
