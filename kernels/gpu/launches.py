"""The launches of the low-rank product at one site, and the scratch between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.descriptors import Descriptors
from kernels.gpu.device import Gpu
from kernels.gpu.epilogue import epilogue
from kernels.gpu.expand import expand
from kernels.gpu.extension import extension
from kernels.gpu.metadata import StepMetadata
from kernels.gpu.shrink import shrink
from kernels.gpu.tiles import Tiles
from kernels.rows import ALIGN
from kernels.sites import Site

_WAVES = 2  # programs of the shrink for each multiprocessor
EPILOGUE_COLUMNS = 512
"""Columns of a program of the epilogue."""

_EPILOGUE_PROGRAMS = 16  # rows at a time


@dataclass(frozen=True, slots=True)
class SiteTable:
    """What the launches at one site share.

    Attributes:
        site: The site.
        table: int32 [slices, 3] on the device: index, first column, columns.
        widest: Columns of the widest slice.
    """

    site: Site
    table: Tensor
    widest: int

    @classmethod
    def of(cls, site: Site, device: torch.device) -> SiteTable:
        """Returns the table of a site on a device."""
        entries = [(index, first, last - first) for index, (first, last) in zip(site.slices, site.columns, strict=True)]
        return cls(site, torch.tensor(entries, dtype=torch.int32, device=device), max(width for _, _, width in entries))


class Launches:
    """Launches kernels on the current stream, with arguments that depend on the number of rows alone: graphs stay valid.

    H and the rows of B that `shrink` leaves are those of one site: its second half runs before the next site's first. Owned by
    one `TritonLowRank`.

    Attributes:
        metadata: The step's, that every launch reads.
        is_fp8: Whether the arena holds bytes of fp8.

    Args:
        arena: 1-D, of the model's dtype, or uint8 for fp8.
        descriptors: Where the blocks lie in it.
        gpu: What the device can do.
        sites: The fused projections.
        dtype: Of the model.
        table: Configurations that steps may reach.
        max_rows: Most rows of a step.
        max_list: Most list entries of a step.
    """

    def __init__(
        self,
        arena: Tensor,
        descriptors: Descriptors,
        *,
        gpu: Gpu,
        sites: tuple[Site, ...],
        dtype: torch.dtype,
        table: tuple[Tiles, ...],
        max_rows: int,
        max_list: int,
    ) -> None:
        self._arena, self._descriptors, self._gpu, self._dtype = arena, descriptors, gpu, dtype
        self.is_fp8 = arena.dtype is torch.uint8
        device = arena.device
        num_tiles = {tiles: tiles.num_tiles(min(max_rows, tiles.max_rows)) for tiles in table}
        self._max_items = max(num_tiles.values()) * (max_list // ALIGN)
        self.metadata = StepMetadata(
            max_rows=max_rows, max_items=self._max_items, max_tiles=max(num_tiles.values()), device=device
        )
        places = max(len(site.slices) for site in sites) * self._max_items * ALIGN
        self.h = torch.zeros(places * max(tiles.block_m for tiles in table), dtype=dtype, device=device)
        self.entries = torch.zeros(places, dtype=torch.int64, device=device)
        planes = max(tiles.block_m * tiles.max_split if tiles.max_split > 1 else 0 for tiles in table)
        self.planes = torch.zeros(places * planes, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(places // ALIGN, dtype=torch.int32, device=device)
        self._upcast = gpu.is_interpreted and dtype is torch.bfloat16

    @property
    def scratch_bytes(self) -> int:
        """Memory of what lies between the kernels."""
        return sum(tensor.nbytes for tensor in (self.h, self.entries, self.planes, self.arrived))

    def shrink(self, x: Tensor, *, layer: int, at: SiteTable, tiles: Tiles, num_rows: int, chained: bool) -> None:
        """Makes H of a site; chained if the site's other kernel is launched right behind it, on the same stream."""
        assert x.dtype is self._dtype, f"rows are {x.dtype}, the model is {self._dtype}"
        step = self.metadata
        a_offset, b_offset, rank, scale = self._descriptors.tensors
        _, num_layers, num_slices = rank.shape
        in_features, slices = at.site.in_features, len(at.site.slices)
        split_k = tiles.split_k(in_features)
        programs = max(1, _WAVES * self._gpu.num_multiprocessors // (split_k * slices))
        shrink[(min(programs, self._max_items), split_k, slices)](
            x, self._arena, self.h, self.entries, self.planes, self.arrived, a_offset, b_offset, rank, scale, at.table,
            step.row_slot, step.item_tile, step.item_slot, step.item_rank, step.num_items,
            x.stride(0), in_features, num_rows, layer, num_layers, num_slices, self._max_items,
            BLOCK_J=ALIGN, BLOCK_K=tiles.block_k, SPLIT_K=split_k,
            **self._common(tiles, chained=chained), **tiles.shrink.options(),
        )  # fmt: skip

    def expand(self, y: Tensor, *, at: SiteTable, tiles: Tiles, num_rows: int, in_place: bool, chained: bool) -> None:
        """Adds what H gives to y, or writes it."""
        step = self.metadata
        expand[(-(-at.widest // tiles.block_n), tiles.num_tiles(num_rows), len(at.site.slices))](
            y, self._arena, self.h, self.entries, at.table, step.row_slot, step.tile_start,
            y.stride(0), num_rows, self._max_items,
            BLOCK_N=tiles.block_n, BLOCK_J=tiles.block_j, ITEM=ALIGN, IN_PLACE=in_place,
            **self._common(tiles, chained=chained), **tiles.expand.options(),
        )  # fmt: skip

    def extension(
        self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, at: SiteTable, tiles: Tiles, num_rows: int
    ) -> None:
        """Writes the base product and what H gives to y; a shrink was launched right before, on the same stream."""
        assert weight.dtype is self._dtype, f"weights are {weight.dtype}, the model is {self._dtype}"
        block_n = tiles.extension.columns(y.shape[1])
        extension[(tiles.num_tiles(num_rows), -(-at.widest // block_n), len(at.site.slices))](
            y, x, weight, weight if bias is None else bias, self._arena, self.h, self.entries, at.table, self.metadata.tile_start,
            y.stride(0), x.stride(0), weight.stride(0), at.site.in_features, num_rows, self._max_items,
            BLOCK_N=block_n, BLOCK_K=tiles.extension.block_k, BLOCK_J=tiles.block_j, ITEM=ALIGN, HAS_BIAS=bias is not None,
            **self._common(tiles, chained=True), **tiles.extension.launch.options(),
        )  # fmt: skip

    def epilogue(self, y: Tensor, *, layer: int, at: SiteTable) -> None:
        """Applies gains and shifts to the rows that have some."""
        step, (gain_offset, shift_offset) = self.metadata, self._descriptors.epilogue_tensors
        _, num_layers, num_slices = gain_offset.shape
        epilogue[(-(-at.widest // EPILOGUE_COLUMNS), _EPILOGUE_PROGRAMS, len(at.site.slices))](
            y, self._arena, gain_offset, shift_offset, at.table, step.row_slot, step.epilogue_row, step.num_epilogue_rows,
            y.stride(0), layer, num_layers, num_slices,
            BLOCK_N=EPILOGUE_COLUMNS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip

    def _common(self, tiles: Tiles, *, chained: bool) -> dict[str, Any]:
        dependent = chained and self._gpu.has_dependent_launch
        common: dict[str, Any] = {
            "BLOCK_M": tiles.block_m,
            "FP8": self.is_fp8,
            "DEPENDENT": dependent,
            "UPCAST": self._upcast,
        }
        return common | {"launch_pdl": True} if dependent else common
