"""The low-rank product on a GPU: two launches a site, whatever the batch holds, by one of four paths around the base product."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from kernels.descriptors import Descriptors
from kernels.epilogue import rows_with_epilogue
from kernels.gpu.device import Gpu
from kernels.gpu.items import build_items
from kernels.gpu.launches import Launches, SiteTable
from kernels.gpu.paths import Path, Paths
from kernels.gpu.tiles import TILES, Tiles, tiles_for
from kernels.rows import ALIGN, RankRows
from kernels.sites import Site
from veneer.errors import FailedPreconditionError

_DEFAULT_PATHS = Paths()


class UnsupportedSitesError(FailedPreconditionError):
    """The model's shapes are not multiples of 16, so rows of the arena cannot be read in wide loads."""


class Variant(StrEnum):
    """What a step launches beside the base products; a captured graph is one of them, and holds for steps that need less."""

    NONE = "none"
    LOW_RANK = "low_rank"
    EPILOGUE = "epilogue"


_ORDER = tuple(Variant)


class TritonLowRank:
    """Adds each row's own adapter to the output of a base projection, in place; the interface of `CpuLowRank`.

    Algebra as there. The arena is read in place through the descriptor table, so an image that changes needs no notice. Steps
    fall into row buckets (`kernels.gpu.tiles`); inside a bucket a row's bits do not depend on its neighbours.

    Three ways to use it at a site: `add_` behind the base product; `begin_site` before it and `finish_site` behind it, which run
    the first half on a stream of its own; or `project_`, which makes the base product too, by the path that `Paths` names.

    Where all rows have one adapter, two library products a slice run instead, and where none has one nothing does. The former
    differs in bits, so `batch_invariant` turns it off, and takes the last bucket and one path for every step. It is also left
    out of captured graphs, which name a `Variant`, and for an arena in fp8.

    Owned by the step loop; not thread-safe.

    Attributes:
        launches: The kernels' launches and their scratch.

    Args:
        arena: 1-D, of the model's dtype, or uint8 for adapters in fp8; every block starts on a multiple of 128 bytes.
        descriptors: Where the blocks lie in it, on the same device.
        gpu: What the device can do, from `kernels.gpu.device.probe`.
        sites: The fused projections; `add_` takes their names.
        max_rows: Most rows of a step.
        max_list: Most list entries of a step, a multiple of ALIGN.
        dtype: Of the model; None takes the arena's.
        table: Configurations by row bucket, ascending.
        paths: What `project_` does at each site.
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
        dtype: torch.dtype | None = None,
        table: tuple[Tiles, ...] = TILES,
        paths: Paths = _DEFAULT_PATHS,
        batch_invariant: bool = False,
    ) -> None:
        for site in sites:
            if any(width % ALIGN for width in (site.in_features, *(edge for edges in site.columns for edge in edges))):
                raise UnsupportedSitesError(f"site {site.name} has a width that is not a multiple of {ALIGN}")
        self._arena, self._descriptors = arena, descriptors
        self._max_rows, self._batch_invariant = max_rows, batch_invariant
        self._paths = _DEFAULT_PATHS if batch_invariant else paths
        self._table = table[-1:] if batch_invariant else table
        self._sites = {site.name: SiteTable.of(site, arena.device) for site in sites}
        reached = tuple(tiles for i, tiles in enumerate(self._table) if i == 0 or self._table[i - 1].max_rows < max_rows)
        self.launches = Launches(
            arena,
            descriptors,
            gpu=gpu,
            sites=sites,
            dtype=dtype or arena.dtype,
            table=reached,
            max_rows=max_rows,
            max_list=max_list,
        )
        self._side = torch.cuda.Stream(arena.device) if arena.device.type == "cuda" else None
        self._num_rows = 0
        self._tiles = self._table[0]
        self._variant = Variant.NONE
        self._single: int | None = None

    @property
    def scratch_bytes(self) -> int:
        """Memory on the device beside arena and descriptors."""
        return self.launches.scratch_bytes

    def use(self, paths: Paths) -> None:
        """Takes the paths that were measured; before anything is captured, and not under `batch_invariant`."""
        assert not self._batch_invariant, "a path that depends on times changes bits from start to start"
        self._paths = paths

    def variant(self, rows: RankRows) -> Variant:
        """Returns the least variant that a step needs: that of the graph to replay."""
        if rows_with_epilogue(rows, self._descriptors).size:
            return Variant.EPILOGUE
        return Variant.NONE if rows.is_empty else Variant.LOW_RANK

    def begin_step(self, rows: RankRows, *, variant: Variant | None = None) -> None:
        """Sends the step's metadata to the device; call it once before the step's first `add_`, or before a replay.

        Args:
            rows: The step's rows and list. For a captured graph as many rows as it was captured with, BASE where there is none.
            variant: That of the graph to capture or to replay, at least what the step needs; None runs what the step needs.
        """
        self._num_rows = rows.row_slot.size
        assert self._num_rows <= self._max_rows, f"{self._num_rows} rows of {self._max_rows}"
        needed = self.variant(rows)
        self._variant = variant or needed
        assert _ORDER.index(needed) <= _ORDER.index(self._variant), f"the step needs {needed}, the graph is {variant}"
        self._single = None
        if self._variant is Variant.NONE:
            return
        self._tiles = tiles_for(self._num_rows, self._table)
        if variant is None and not self._batch_invariant and not self.launches.is_fp8:
            lowest = int(rows.row_slot.min())
            self._single = lowest if lowest == rows.row_slot.max() else None
        if self._single is None or self._variant is Variant.EPILOGUE:
            items = build_items(rows, tile_rows=self._tiles.block_m)
            self.launches.metadata.fill(rows.row_slot, items, rows_with_epilogue(rows, self._descriptors))

    def project_(self, y: Tensor, x: Tensor, weight: Tensor, *, layer: int, site: str, bias: Tensor | None = None) -> None:
        """Writes to y, [T, N], the base product `x Wᵀ + bias` and what the adapters make of x, [T, K]; W is [N, K]."""
        path = self._paths.path(site, self._tiles.max_rows) if self._runs_kernels else Path.AFTER
        if path is Path.FIRST:
            at = self._sites[site]
            self._shrink(x, layer=layer, at=at, chained=True)
            self.launches.expand(y, at=at, tiles=self._tiles, num_rows=self._num_rows, in_place=False, chained=True)
            y.addmm_(x, weight.t())
            if bias is not None:
                y += bias
            self._finish(y, layer=layer, site=site)
        elif path is Path.EXTENSION:
            at = self._sites[site]
            self._shrink(x, layer=layer, at=at, chained=True)
            self.launches.extension(y, x, weight, bias, at=at, tiles=self._tiles, num_rows=self._num_rows)
            self._finish(y, layer=layer, site=site)
        elif path is Path.BESIDE:
            self.begin_site(x, layer=layer, site=site)
            _base_product(y, x, weight, bias)
            self.finish_site(y, x, layer=layer, site=site)
        else:
            _base_product(y, x, weight, bias)
            self.add_(y, x, layer=layer, site=site)

    def begin_site(self, x: Tensor, *, layer: int, site: str) -> None:
        """Starts the first half, which reads x, on a stream of its own; `finish_site` has to follow before the next site begins.

        x has to be complete on the current stream, and to stay as it is until `finish_site` returned.
        """
        if not self._runs_kernels:
            return
        if self._side is None:
            self._shrink(x, layer=layer, at=self._sites[site], chained=False)
            return
        self._side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._side):
            self._shrink(x, layer=layer, at=self._sites[site], chained=False)

    def finish_site(self, y: Tensor, x: Tensor, *, layer: int, site: str) -> None:
        """Adds to y, [T, N], what the adapters make of the x of `begin_site`, once both halves' inputs are there."""
        if not self._runs_kernels:
            self.add_(y, x, layer=layer, site=site)
            return
        if self._side is not None:
            torch.cuda.current_stream(x.device).wait_stream(self._side)
        at = self._sites[site]
        self.launches.expand(y, at=at, tiles=self._tiles, num_rows=self._num_rows, in_place=True, chained=False)
        self._finish(y, layer=layer, site=site)

    def add_(self, y: Tensor, x: Tensor, *, layer: int, site: str) -> None:
        """Adds to y, [T, N], what the adapters make of x, [T, K]; nothing runs when no row of the step has an adapter."""
        if self._variant is Variant.NONE:
            return
        at = self._sites[site]
        if self._single is not None:
            self._add_single(y, x, self._single, layer=layer, site=at.site)
        else:
            self._shrink(x, layer=layer, at=at, chained=True)
            self.launches.expand(y, at=at, tiles=self._tiles, num_rows=self._num_rows, in_place=True, chained=True)
        self._finish(y, layer=layer, site=site)

    def invalidate(self, slot: int) -> None:
        """Does nothing: no copy of a slot is kept."""

    @property
    def _runs_kernels(self) -> bool:
        return self._variant is not Variant.NONE and self._single is None

    def _shrink(self, x: Tensor, *, layer: int, at: SiteTable, chained: bool) -> None:
        self.launches.shrink(x, layer=layer, at=at, tiles=self._tiles, num_rows=self._num_rows, chained=chained)

    def _finish(self, y: Tensor, *, layer: int, site: str) -> None:
        if self._variant is Variant.EPILOGUE:
            self.launches.epilogue(y, layer=layer, at=self._sites[site])

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


def _base_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)
