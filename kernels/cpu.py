"""The low-rank product on the CPU in plain torch: a fixed number of operations a site, whatever the batch holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.descriptors import Descriptors
from kernels.placement import Placed, Placement
from kernels.rows import ALIGN, HOLE, RankRows
from kernels.sites import Site


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Persistent buffers of one (layer, site); S slices, P blocks of ALIGN list positions.

    Attributes:
        a: [P, S, ALIGN, K], rows of A; zero where the adapter has none.
        b: One [P, ALIGN, N] a slice, rows of B; zero where the adapter has none, and in holes never other than finite.
        scale: float32 [P, S, ALIGN].
    """

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]
    scale: torch.Tensor


class CpuLowRank:
    """Adds each row's own adapter to the output of a base projection, in place.

    Algebra, at (layer, site), for each slice s: `y[t, columns(s)] += H[t] · B_s` with
    `H[t, j] = where(row_slot[t] == list_slot[j] and list_rank[j] < rank[slot, layer, s], scale · (x[t] · A_j), 0)`.
    The mask selects and never multiplies: what a neighbour's rows make of x[t], infinities included, is not used. The scale is
    folded into H in float32, then H is rounded once to the model's dtype.

    The rank rows of active adapters are gathered from the arena into buffers of their own, so that one product covers all slices
    and all adapters. Buffers persist: only adapters that became active, or whose slot has another image (`Descriptors.epoch`),
    are copied, and holes are masked. The buffers take `max_list` rank rows over the whole model, touched as they are used.

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
        blocks = max_list // ALIGN
        self._placement = Placement(blocks)
        self._gathered = {
            (layer, site.name): _Gathered(
                a=torch.zeros(blocks, len(site.slices), ALIGN, site.in_features, dtype=arena.dtype),
                b=tuple(torch.zeros(blocks, ALIGN, last - first, dtype=arena.dtype) for first, last in site.columns),
                scale=torch.zeros(blocks, len(site.slices), ALIGN),
            )
            for layer in range(num_layers)
            for site in sites
        }
        self._end = 0
        self._own = torch.zeros(0, 0, 1, ALIGN, dtype=torch.bool)
        self._zero = torch.zeros(())

    def begin_step(self, rows: RankRows) -> None:
        """Gathers what the step needs and computes its mask; call it once before the step's first `add_`."""
        assert rows.row_slot.size <= self._max_rows, f"{rows.row_slot.size} rows of {self._max_rows}"
        slots, counts = np.unique(rows.list_slot[rows.list_slot >= 0], return_counts=True)
        self._end = 0
        if slots.size == 0:
            return
        epochs = self._descriptors.epoch
        active = {int(slot): (int(epochs[slot]), -(-int(rank) // ALIGN)) for slot, rank in zip(slots, counts, strict=True)}
        copies, self._end = self._placement.update(active)
        for slot in copies:
            self._gather(slot, self._placement[slot])
        list_slot = np.full((self._end, ALIGN), HOLE, dtype=np.int32)
        for slot, rank in zip(slots, counts, strict=True):
            placed = self._placement[int(slot)]
            list_slot[placed.start : placed.end].reshape(-1)[:rank] = slot
        self._own = torch.from_numpy(rows.row_slot[:, None, None, None] == list_slot[None, :, None, :])

    def add_(self, y: torch.Tensor, x: torch.Tensor, *, layer: int, site: str) -> None:
        """Adds to y, [T, N], what the adapters make of x, [T, K]; nothing runs when no row of the step has an adapter."""
        if self._end == 0:
            return
        gathered = self._gathered[layer, site]
        columns = self._sites[site].columns
        a = gathered.a[: self._end]
        h = torch.mm(x, a.view(-1, x.shape[1]).t()).view(-1, *a.shape[:3])
        h = torch.where(self._own, h * gathered.scale[: self._end], self._zero).to(x.dtype)
        for s, (first, last) in enumerate(columns):
            b = gathered.b[s][: self._end]
            y[:, first:last].addmm_(h[:, :, s].reshape(len(x), -1), b.view(-1, last - first))

    def invalidate(self, slot: int) -> None:
        """Drops what was gathered of a slot, so that its room is free; a new image in the slot is noticed without it."""
        self._placement.drop(slot)

    def _gather(self, slot: int, placed: Placed) -> None:
        """Copies one adapter from the arena to its blocks; list positions beyond its rank at a (layer, slice) become zero."""
        table = self._descriptors
        for (layer, name), gathered in self._gathered.items():
            a, scale = _bits(gathered.a), gathered.scale.numpy()
            for s, index in enumerate(self._sites[name].slices):
                rank = int(table.rank[slot, layer, index])
                span = slice(placed.start, placed.end)
                self._copy(a[span, s], int(table.a_offset[slot, layer, index]), rank)
                self._copy(_bits(gathered.b[s])[span], int(table.b_offset[slot, layer, index]), rank)
                scale[span, s] = table.scale[slot, layer, index]

    def _copy(self, blocks: np.ndarray[tuple[int, ...], np.dtype[np.generic]], offset: int, rank: int) -> None:
        """Copies `rank` contiguous rows of the arena into blocks, [p, ALIGN, width], and clears the rest of the blocks."""
        width = blocks.shape[2]
        rows = self._arena[offset : offset + rank * width].reshape(rank, width)
        full, rest = divmod(rank, ALIGN)
        blocks[:full] = rows[: full * ALIGN].reshape(full, ALIGN, width)
        if full < len(blocks):
            blocks[full, :rest] = rows[full * ALIGN :]
            blocks[full, rest:] = 0
            blocks[full + 1 :] = 0


def _bits(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Returns the tensor's elements as integers in shared memory, since numpy has no bfloat16."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]).numpy()
