"""The low-rank product in fixed shapes against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import add_low_rank
from kernels.tiled_low_rank import TiledLowRank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_adds_what_the_reference_adds_within_its_roundings(world, rank_rows, sites, dtype: torch.dtype) -> None:
    here = world(3, dtype)
    adapters = here.adapters([1, 3, 16, 64])
    product = TiledLowRank(adapters.arena, adapters.descriptors, sites=sites)
    rows = rank_rows(adapters, here.row_slot(50, 4, "uniform"))
    product.begin_step(rows)
    for site in sites:
        width = site.columns[-1][1]
        x, y = here.tensor(50, site.in_features), here.tensor(50, width)
        wanted = add_low_rank(y, x, arena=adapters.arena, descriptors=adapters.descriptors, layer=1, site=site, rows=rows)
        bound = here.bound(wanted, x, adapters, layer=1, site=site, rows=rows)
        product.add_(y, x, layer=1, site=site.name)
        assert ((y.double() - wanted).abs() <= bound + torch.finfo(dtype).tiny).all()


def test_no_adapter_changes_nothing_and_a_later_step_forgets_the_last(world, rank_rows, sites) -> None:
    here = world(4, torch.float32)
    adapters = here.adapters([4])
    product = TiledLowRank(adapters.arena, adapters.descriptors, sites=sites)
    for popularity in ("one", "none"):
        product.begin_step(rank_rows(adapters, here.row_slot(5, 1, popularity)))
    y = here.tensor(5, sites[1].columns[-1][1])
    before = y.clone()
    product.add_(y, here.tensor(5, sites[1].in_features), layer=0, site="o")
    assert torch.equal(y, before)
