"""The low-rank product in fixed shapes: a row's bits depend on that row and its own adapter alone."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from kernels.descriptors import Descriptors
from kernels.epilogue import TorchEpilogue
from kernels.rows import RankRows
from kernels.sites import Site

TILE = 16
"""Rows of one adapter that are computed together."""


class TiledLowRank:
    """Adds each row's own adapter to the output of a base projection, in place; the interface of `CpuLowRank`, and much slower.

    Adapters go one by one, and the rows of one in tiles of `TILE`, the last padded with zeros; each tile is two products whose
    shapes come from the adapter alone. Owned by the step loop; not thread-safe.

    Args:
        arena: 1-D, of the model's dtype, on the CPU.
        descriptors: Where the blocks lie in it.
        sites: The fused projections; `add_` takes their names.
    """

    def __init__(self, arena: torch.Tensor, descriptors: Descriptors, *, sites: tuple[Site, ...]) -> None:
        self._arena, self._descriptors = arena, descriptors
        self._sites = {site.name: site for site in sites}
        self._tiles: list[tuple[int, torch.Tensor]] = []
        self._epilogue = TorchEpilogue(arena, descriptors, sites=sites)

    def begin_step(self, rows: RankRows) -> None:
        """Sorts the step's rows; call it once before the step's first `add_`."""
        self._epilogue.begin_step(rows)
        slots = np.unique(rows.list_slot[rows.list_slot >= 0]).tolist()
        self._tiles = [
            (slot, tile) for slot in slots for tile in torch.from_numpy(np.flatnonzero(rows.row_slot == slot)).split(TILE)
        ]

    def add_(self, y: torch.Tensor, x: torch.Tensor, *, layer: int, site: str) -> None:
        """Adds to y, [T, N], what the adapters make of x, [T, K]."""
        of, table = self._sites[site], self._descriptors
        for slot, rows in self._tiles:
            tile = F.pad(x[rows], (0, 0, 0, TILE - len(rows)))
            for index, (first, last) in zip(of.slices, of.columns, strict=True):
                rank = int(table.rank[slot, layer, index])
                if not rank:
                    continue
                a = self._matrix(int(table.a_offset[slot, layer, index]), rank, of.in_features)
                b = self._matrix(int(table.b_offset[slot, layer, index]), rank, last - first)
                h = (F.linear(tile, a).float() * float(table.scale[slot, layer, index])).to(x.dtype)
                y[rows, first:last] += (h @ b)[: len(rows)]
        self._epilogue.apply_(y, layer=layer, site=site)

    def invalidate(self, slot: int) -> None:
        """Does nothing: no copy of a slot is kept."""

    def _matrix(self, offset: int, rank: int, width: int) -> torch.Tensor:
        return self._arena[offset : offset + rank * width].view(rank, width)
