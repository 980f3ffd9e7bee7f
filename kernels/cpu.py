"""The low-rank product on the CPU in plain torch: a fixed number of operations a site, whatever the batch holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kernels.descriptors import Descriptors
from kernels.epilogue import TorchEpilogue
from kernels.placement import Placed, Placement
from kernels.rows import ALIGN, HOLE, RankRows
from kernels.sites import Site


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Persistent buffers of one (layer, site); S slices, P blocks of ALIGN list positions.

    Attributes:
        a: [P, S · ALIGN, K], rows of A; zero where the adapter has none.
        b: One [P, ALIGN, N] a slice, rows of B; zero where the adapter has none, and finite in holes.
        scale: float32 [P, 1, S · ALIGN].
    """

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The rows of a step, sorted into the blocks: form for batches whose adapters have about as many rows each.

    Attributes:
        size: R, most rows of one adapter.
        gather: int64 [P · R], row of the batch at each place of each block's tile; any row where there are fewer.
        places: int64 [V], the places that hold a row, sorted by that row; one of an adapter of several blocks has several.
        starts: int64 [T], where the places of each row of the batch start in `places`; rows without an adapter have none.
    """

    size: int
    gather: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor


class CpuLowRank:
    """Adds each row's own adapter to the output of a base projection, in place.

    Algebra, at (layer, site), for each slice s: `y[t, columns(s)] += H[t] · B_s` with
    `H[t, j] = where(row_slot[t] == list_slot[j] and list_rank[j] < rank[slot, layer, s], scale · (x[t] · A_j), 0)`.
    The scale is folded into H in float32, then H is rounded once to the model's dtype. Gains and shifts follow (`TorchEpilogue`).

    The rank rows of active adapters are gathered from the arena into buffers of their own, in blocks of ALIGN rank rows. Buffers
    persist: only adapters that became active, or whose slot has another image (`Descriptors.epoch`), are copied. They take
    `max_list` rank rows over the whole model, touched as they are used.

    Two forms, both with a number of operations that depends on the site alone:
    - tiled: the rows are gathered into one tile a block, as high as the adapter with the most rows needs, and one batched product
      for all slices and one a slice run over the tiles. A block never meets a row of another adapter, and places without a row
      are not read from. Where no adapter has many rows (decode), this does little more than the useful work.
    - dense: all rows meet all blocks. The mask selects and never multiplies: what a neighbour's rank rows make of x[t],
      infinities included, is not used. For batches in which the tiles would be mostly empty.
    CPU time of 64 rows, SmolLM2-135M bf16, rank 16 on seven modules, one thread, tiled and dense: 22 adapters of about 3 rows
    48 and 104 ms a step, 8 adapters of 8 rows 32 and 49, 22 adapters of which one has 43 rows 200 and 112.

    Owned by the step loop; not thread-safe.

    Args:
        arena: 1-D, of the model's dtype, on the CPU.
        descriptors: Where the blocks lie in it.
        sites: The fused projections; `add_` takes their names.
        num_layers: Layers of the model.
        max_rows: Most rows of a step.
        max_list: Most list entries of a step, a multiple of ALIGN: the sum of `aligned_rank` over its active adapters.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        descriptors: Descriptors,
        *,
        sites: tuple[Site, ...],
        num_layers: int,
        max_rows: int,
        max_list: int,
    ) -> None:
        assert max_list % ALIGN == 0, "max_list is a multiple of ALIGN"
        self._descriptors = descriptors
        self._sites = {site.name: site for site in sites}
        self._max_rows = max_rows
        self._arena = _bits(arena)
        self._epilogue = TorchEpilogue(arena, descriptors, sites=sites)
        blocks = max_list // ALIGN
        self._placement = Placement(blocks)
        self._gathered = {
            (layer, site.name): _Gathered(
                a=torch.zeros(blocks, len(site.slices) * ALIGN, site.in_features, dtype=arena.dtype),
                b=tuple(torch.zeros(blocks, ALIGN, last - first, dtype=arena.dtype) for first, last in site.columns),
                scale=torch.zeros(blocks, 1, len(site.slices) * ALIGN),
            )
            for layer in range(num_layers)
            for site in sites
        }
        self._zero = torch.zeros(())
        self._end = 0
        self._tiles: _Tiles | None = None
        self._own: dict[int, torch.Tensor] = {}

    def begin_step(self, rows: RankRows) -> None:
        """Gathers what the step needs and sorts its rows; call it once before the step's first `add_`."""
        num_rows = rows.row_slot.size
        assert num_rows <= self._max_rows, f"{num_rows} rows of {self._max_rows}"
        self._epilogue.begin_step(rows)
        slots, ranks = np.unique(rows.list_slot[rows.list_slot >= 0], return_counts=True)
        self._end = 0
        if slots.size == 0:
            return
        epochs = self._descriptors.epoch
        active = {int(slot): (int(epochs[slot]), -(-int(rank) // ALIGN)) for slot, rank in zip(slots, ranks, strict=True)}
        copies, self._end = self._placement.update(active)
        for slot in copies:
            self._gather(slot, self._placement[slot])
        block_slot = np.full(self._end, HOLE, dtype=np.int32)
        for slot in active:
            placed = self._placement[slot]
            block_slot[placed.start : placed.end] = slot
        own = rows.row_slot[None, :] == block_slot[:, None]
        size = int(own.sum(axis=1).max())
        if _tiles_pay(self._end, size, num_rows):
            self._tiles, self._own = _sort_into_tiles(own, size), {}
        else:
            self._tiles, self._own = None, self._masks(own)

    def add_(self, y: torch.Tensor, x: torch.Tensor, *, layer: int, site: str) -> None:
        """Adds to y, [T, N], what the adapters make of x, [T, K]; nothing runs when no row of the step has an adapter."""
        if self._end:
            gathered, columns = self._gathered[layer, site], self._sites[site].columns
            if self._tiles is None:
                self._add_dense(y, x, gathered, columns)
            else:
                self._add_tiled(y, x, gathered, columns, self._tiles)
        self._epilogue.apply_(y, layer=layer, site=site)

    def _add_tiled(
        self, y: torch.Tensor, x: torch.Tensor, gathered: _Gathered, columns: tuple[tuple[int, int], ...], tiles: _Tiles
    ) -> None:
        x_tiles = x.index_select(0, tiles.gather).view(self._end, tiles.size, -1)
        h = torch.bmm(x_tiles, gathered.a[: self._end].transpose(1, 2))
        h = (h * gathered.scale[: self._end]).to(x.dtype)
        for s, (first, last) in enumerate(columns):
            delta = torch.bmm(h[:, :, s * ALIGN : (s + 1) * ALIGN], gathered.b[s][: self._end])
            y[:, first:last].add_(F.embedding_bag(tiles.places, delta.view(-1, last - first), tiles.starts, mode="sum"))

    def _add_dense(self, y: torch.Tensor, x: torch.Tensor, gathered: _Gathered, columns: tuple[tuple[int, int], ...]) -> None:
        h = torch.mm(x, gathered.a[: self._end].view(-1, x.shape[1]).t())
        h = h * gathered.scale[: self._end].view(-1)
        h = torch.where(self._own[len(columns)], h, self._zero).to(x.dtype)
        h = h.view(len(x), self._end, len(columns), ALIGN).permute(2, 0, 1, 3).contiguous()
        for s, (first, last) in enumerate(columns):
            y[:, first:last].addmm_(h[s].view(len(x), -1), gathered.b[s][: self._end].view(-1, last - first))

    def _masks(self, own: npt.NDArray[np.bool_]) -> dict[int, torch.Tensor]:
        """Returns the mask [T, P · S · ALIGN] for each number of slices S that a site of the model has."""
        blocks = torch.from_numpy(np.ascontiguousarray(own.T))
        return {
            count: blocks.repeat_interleave(count * ALIGN, 1) for count in {len(site.slices) for site in self._sites.values()}
        }

    def invalidate(self, slot: int) -> None:
        """Drops what was gathered of a slot, so that its room is free; a new image in the slot is noticed without it."""
        self._placement.drop(slot)

    def _gather(self, slot: int, placed: Placed) -> None:
        """Copies one adapter from the arena to its blocks; list positions beyond its rank at a (layer, slice) become zero."""
        table = self._descriptors
        span = slice(placed.start, placed.end)
        for (layer, name), gathered in self._gathered.items():
            a, scale = _bits(gathered.a), gathered.scale.numpy()
            for s, index in enumerate(self._sites[name].slices):
                rank = int(table.rank[slot, layer, index])
                positions = slice(s * ALIGN, (s + 1) * ALIGN)
                self._copy(a[span, positions], int(table.a_offset[slot, layer, index]), rank)
                self._copy(_bits(gathered.b[s])[span], int(table.b_offset[slot, layer, index]), rank)
                scale[span, 0, positions] = table.scale[slot, layer, index]

    def _copy(self, blocks: npt.NDArray[Any], offset: int, rank: int) -> None:
        """Copies `rank` contiguous rows of the arena into blocks, [p, ALIGN, width], and clears the rest of the blocks."""
        width = blocks.shape[2]
        rows = self._arena[offset : offset + rank * width].reshape(rank, width)
        full, rest = divmod(rank, ALIGN)
        blocks[:full] = rows[: full * ALIGN].reshape(full, ALIGN, width)
        if full < len(blocks):
            blocks[full, :rest] = rows[full * ALIGN :]
            blocks[full, rest:] = 0
            blocks[full + 1 :] = 0


def _tiles_pay(num_blocks: int, size: int, num_rows: int) -> bool:
    """Returns whether tiles of `size` places are the faster form; also bounds their memory to 8 times that of the rows.

    Fitted on one core, SmolLM2-135M bf16, 64 rows: a place costs 0.17 ms over the model, a block 1.4 ms; in the dense form a
    block costs 4.1 ms.
    """
    places = num_blocks * size
    return places <= 2 * num_rows or (3 * size <= num_rows and places <= 8 * num_rows)


def _sort_into_tiles(own: npt.NDArray[np.bool_], size: int) -> _Tiles:
    """Sorts rows into tiles of `size` places: own, [P, T], says which row belongs to which block."""
    blocks, rows = np.nonzero(own)
    counts = own.sum(axis=1)
    starts = np.cumsum(counts) - counts
    places = blocks * size + np.arange(rows.size) - starts[blocks]
    gather = np.zeros(len(own) * size, dtype=np.int64)
    gather[places] = rows
    by_row = np.argsort(rows, kind="stable")
    counts = own.sum(axis=0)
    return _Tiles(size, *(torch.from_numpy(array) for array in (gather, places[by_row], np.cumsum(counts) - counts)))


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Returns the tensor's elements as integers in shared memory, since numpy has no bfloat16."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]).numpy()
