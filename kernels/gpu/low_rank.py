"""The low-rank product on a GPU: two launches a site, whatever the batch holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.descriptors import Descriptors
from kernels.gpu.device import Gpu
from kernels.gpu.expand import expand
from kernels.gpu.items import build_items
from kernels.gpu.metadata import StepMetadata
from kernels.gpu.shrink import shrink
from kernels.gpu.tiles import TILES, Tiles, tiles_for
from kernels.rows import ALIGN, RankRows
from kernels.sites import Site
from veneer.errors import FailedPreconditionError

_WAVES = 2  # programs of the shrink for each multiprocessor


class UnsupportedSitesError(FailedPreconditionError):
    """The model's shapes are not multiples of 16, so rows of the arena cannot be read in wide loads."""


@dataclass(frozen=True, slots=True)
class _Launches:
    """What the launches at one site share.

    Attributes:
        site: The site.
        table: int32 [slices, 3] on the device: index, first column, columns.
        widest: Columns of the widest slice.
    """

    site: Site
    table: Tensor
    widest: int


class TritonLowRank:
    """Adds each row's own adapter to the output of a base projection, in place; the interface of `CpuLowRank`.

    Algebra as there. The arena is read in place through the descriptor table, so an image that changes needs no notice. Steps
    fall into row buckets (`kernels.gpu.tiles`); inside a bucket a row's bits do not depend on its neighbours.

    Where all rows have one adapter, two library products a slice run instead, and where none has one nothing does. The former
    differs in bits, so `batch_invariant` turns it off, and takes the last bucket for every step.

    Owned by the step loop; not thread-safe.

    Args:
        arena: 1-D, of the model's dtype; every block starts on a multiple of 128 bytes.
        descriptors: Where the blocks lie in it, on the same device.
        gpu: What the device can do, from `kernels.gpu.device.probe`.
        sites: The fused projections; `add_` takes their names.
        max_rows: Most rows of a step.
        max_list: Most list entries of a step, a multiple of ALIGN.
        table: Configurations by row bucket, ascending.
        batch_invariant: One form for all steps.

    Raises:
        UnsupportedSitesError: A width is not a multiple of 16.
    """

    def __init__(
        self,
        arena: Tensor,
        descriptors: Descriptors,
        *,
        gpu: Gpu,
        sites: tuple[Site, ...],
        max_rows: int,
        max_list: int,
        table: tuple[Tiles, ...] = TILES,
        batch_invariant: bool = False,
    ) -> None:
        for site in sites:
            if any(width % ALIGN for width in (site.in_features, *(edge for edges in site.columns for edge in edges))):
                raise UnsupportedSitesError(f"site {site.name} has a width that is not a multiple of {ALIGN}")
        self._arena, self._descriptors, self._gpu = arena, descriptors, gpu
        self._max_rows, self._batch_invariant = max_rows, batch_invariant
        self._table = table[-1:] if batch_invariant else table
        device = arena.device
        self._sites = {site.name: _launches(site, device) for site in sites}
        reached = [tiles for i, tiles in enumerate(self._table) if i == 0 or self._table[i - 1].max_rows < max_rows]
        num_tiles = {tiles: tiles.num_tiles(min(max_rows, tiles.max_rows)) for tiles in reached}
        num_blocks = max_list // ALIGN
        self._max_items = max(num_tiles.values()) * num_blocks
        self._metadata = StepMetadata(
            max_rows=max_rows, max_items=self._max_items, max_tiles=max(num_tiles.values()), device=device
        )
        places = max(len(site.slices) for site in sites) * self._max_items * ALIGN
        self._h = torch.zeros(places * max(tiles.block_m for tiles in reached), dtype=arena.dtype, device=device)
        self._entries = torch.zeros(places, dtype=torch.int64, device=device)
        planes = max(tiles.block_m * tiles.max_split if tiles.max_split > 1 else 0 for tiles in reached)
        self._planes = torch.zeros(places * planes, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(places // ALIGN, dtype=torch.int32, device=device)
        self._upcast = gpu.is_interpreted and arena.dtype is torch.bfloat16
        self._num_rows = 0
        self._tiles = self._table[0]
        self._is_active = False
        self._single: int | None = None

    @property
    def scratch_bytes(self) -> int:
        """Memory on the device beside arena and descriptors."""
        return sum(tensor.nbytes for tensor in (self._h, self._entries, self._planes, self._arrived))

    def begin_step(self, rows: RankRows) -> None:
        """Sends the step's metadata to the device; call it once before the step's first `add_`."""
        self._num_rows = rows.row_slot.size
        assert self._num_rows <= self._max_rows, f"{self._num_rows} rows of {self._max_rows}"
        self._is_active = not rows.is_empty
        if not self._is_active:
            return
        lowest = int(rows.row_slot.min())
        self._single = lowest if lowest == rows.row_slot.max() and not self._batch_invariant else None
        if self._single is not None:
            return
        self._tiles = tiles_for(self._num_rows, self._table)
        self._metadata.fill(rows.row_slot, build_items(rows, tile_rows=self._tiles.block_m))

    def add_(self, y: Tensor, x: Tensor, *, layer: int, site: str) -> None:
        """Adds to y, [T, N], what the adapters make of x, [T, K]; nothing runs when no row of the step has an adapter."""
        if not self._is_active:
            return
        if self._single is not None:
            self._add_single(y, x, self._single, layer=layer, site=self._sites[site].site)
        else:
            self._launch(y, x, layer=layer, at=self._sites[site], in_place=True)

    def write_(self, y: Tensor, x: Tensor, *, layer: int, site: str) -> None:
        """Writes to y, [T, N], what the adapters make of x, and 0 where they make nothing; the base product is added to it."""
        if self._is_active and self._single is None:
            self._launch(y, x, layer=layer, at=self._sites[site], in_place=False)
        else:
            y.zero_()
            self.add_(y, x, layer=layer, site=site)

    def invalidate(self, slot: int) -> None:
        """Does nothing: no copy of a slot is kept."""

    def _launch(self, y: Tensor, x: Tensor, *, layer: int, at: _Launches, in_place: bool) -> None:
        assert x.dtype is self._arena.dtype, f"rows are {x.dtype}, the arena is {self._arena.dtype}"
        tiles, step, dependent = self._tiles, self._metadata, self._gpu.has_dependent_launch
        a_offset, b_offset, rank, scale = self._descriptors.tensors
        _, num_layers, num_slices = rank.shape
        num_rows, in_features, slices = self._num_rows, at.site.in_features, len(at.site.slices)
        common: dict[str, Any] = {"BLOCK_M": tiles.block_m, "DEPENDENT": dependent, "UPCAST": self._upcast}
        if dependent:
            common["launch_pdl"] = True
        split_k = tiles.split_k(in_features)
        programs = max(1, _WAVES * self._gpu.num_multiprocessors // (split_k * slices))
        shrink[(min(programs, self._max_items), split_k, slices)](
            x, self._arena, self._h, self._entries, self._planes, self._arrived, a_offset, b_offset, rank, scale, at.table,
            step.row_slot, step.item_tile, step.item_slot, step.item_rank, step.num_items,
            x.stride(0), in_features, num_rows, layer, num_layers, num_slices, self._max_items,
            BLOCK_J=ALIGN, BLOCK_K=tiles.block_k, SPLIT_K=split_k,
            **common, **tiles.shrink.options(),
        )  # fmt: skip
        expand[(-(-at.widest // tiles.block_n), tiles.num_tiles(num_rows), slices)](
            y, self._arena, self._h, self._entries, at.table, step.row_slot, step.tile_start,
            y.stride(0), num_rows, self._max_items,
            BLOCK_N=tiles.block_n, BLOCK_J=tiles.block_j, ITEM=ALIGN, IN_PLACE=in_place,
            **common, **tiles.expand.options(),
        )  # fmt: skip

    def _add_single(self, y: Tensor, x: Tensor, slot: int, *, layer: int, site: Site) -> None:
        """Two products a slice; the scale is folded into the second's sum."""
        table = self._descriptors
        for index, (first, last) in zip(site.slices, site.columns, strict=True):
            rank = int(table.rank[slot, layer, index])
            if rank == 0:
                continue
            a = self._block(int(table.a_offset[slot, layer, index]), rank, site.in_features)
            b = self._block(int(table.b_offset[slot, layer, index]), rank, last - first)
            y[:, first:last].addmm_(torch.mm(x, a.t()), b, alpha=float(table.scale[slot, layer, index]))

    def _block(self, offset: int, rank: int, width: int) -> Tensor:
        return self._arena[offset : offset + rank * width].view(rank, width)


def _launches(site: Site, device: torch.device) -> _Launches:
    entries = [(index, first, last - first) for index, (first, last) in zip(site.slices, site.columns, strict=True)]
    table = torch.tensor(entries, dtype=torch.int32, device=device)
    return _Launches(site, table, max(width for _, _, width in entries))
