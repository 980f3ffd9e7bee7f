"""The low-rank product in the native CPU form: each adapter's rows read in place, from the arena."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from kernels.descriptors import Descriptors
from kernels.native import Native
from kernels.native_epilogue import NativeEpilogue
from kernels.native_sites import Slices
from kernels.rows import RankRows, aligned_rank
from kernels.sites import Site

_BLOCK_ROWS = 16


class LowRankSite(ctypes.Structure):
    """Mirrors `LowRankSite` of low_rank.hpp."""

    _fields_ = (
        ("arena", ctypes.c_void_p),
        ("a_offset", ctypes.c_void_p),
        ("b_offset", ctypes.c_void_p),
        ("rank", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("h", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("max_rank", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("num_slices", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("slices", Slices),
    )


class NativeLowRank:
    """Adds each row's own adapter to the output of a base projection, in place; the interface of `CpuLowRank`.

    Algebra, at (layer, site), for each slice s: `y[t, columns(s)] += Σ_j (scale · x[t] · A_j) · B_j` over the rank rows j that
    the adapter of row t has there. Sums and scale are float32; H is rounded to the model's dtype, and so is y, once.

    Rows are sorted by adapter into blocks of up to 16. One call a site shares whole blocks out to threads, by rows; a thread
    fetches B from memory while it works on A, and the next A meanwhile. Where blocks are few, slices, rank rows and columns are
    shared out. A row meets the rank rows of its own adapter only, so nothing is masked; nothing is copied, so an image that
    changes needs no notice; and the sums of a row run in one order whatever its neighbours are.

    Owned by the step loop; not thread-safe.

    Attributes:
        epilogue: What follows the rank rows.

    Args:
        arena: 1-D, of the model's dtype, on the CPU.
        descriptors: Where the blocks lie in it.
        native: The library.
        sites: The fused projections; `add_` takes their names.
        max_rows: Most rows of a step.

    Raises:
        NativeFormError: The library does not compute in the arena's dtype, or a site has more than four slices.
    """

    def __init__(
        self, arena: torch.Tensor, descriptors: Descriptors, *, native: Native, sites: tuple[Site, ...], max_rows: int
    ) -> None:
        self._function = native.function("low_rank", arena.dtype)
        self._arena, self._descriptors = arena, descriptors
        self._max_rows = max_rows
        self.epilogue = NativeEpilogue(arena, descriptors, native=native, sites=sites)
        self._h = torch.empty(0)
        _, num_layers, num_slices = descriptors.rank.shape
        self._sites = {
            site.name: LowRankSite(
                arena=arena.data_ptr(),
                num_layers=num_layers,
                num_slices=num_slices,
                in_features=site.in_features,
                slices=Slices.of(site),
            )
            for site in sites
        }
        self._addresses = {name: ctypes.addressof(site) for name, site in self._sites.items()}
        self._most_slices = max(len(site.slices) for site in sites)
        self._is_active = False

    def begin_step(self, rows: RankRows) -> None:
        """Sorts the step's rows; call it once before the step's first `add_`."""
        assert rows.row_slot.size <= self._max_rows, f"{rows.row_slot.size} rows of {self._max_rows}"
        self.epilogue.begin_step(rows)
        self._is_active = not rows.is_empty
        if not self._is_active:
            return
        own = np.isin(rows.row_slot, rows.list_slot[rows.list_slot >= 0])
        places = np.argsort(np.where(own, rows.row_slot, np.iinfo(np.int32).max), kind="stable")[: int(own.sum())]
        slots = rows.row_slot[places]
        starts = np.flatnonzero(np.diff(slots, prepend=-1))
        counts = np.diff(starts, append=slots.size)
        pieces = -(-counts // _BLOCK_ROWS)
        index = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        firsts = np.repeat(starts, pieces) + index * _BLOCK_ROWS
        sizes = np.minimum(np.repeat(counts, pieces) - index * _BLOCK_ROWS, _BLOCK_ROWS)
        max_rank = aligned_rank(int(self._descriptors.largest_rank[slots[starts]].max()))
        size = slots.size * self._most_slices * max_rank
        if self._h.numel() < size:
            self._h = torch.empty(size)  # begins on a cache line, as every row then does: no two threads write to one
        self._rows = places.astype(np.int32)
        self._blocks = np.ascontiguousarray(np.stack([slots[firsts], firsts, sizes], axis=1).astype(np.int32))
        table, threads = self._descriptors, torch.get_num_threads()
        for site in self._sites.values():
            site.a_offset, site.b_offset = table.a_offset.ctypes.data, table.b_offset.ctypes.data
            site.rank, site.scale = table.rank.ctypes.data, table.scale.ctypes.data
            site.rows, site.blocks, site.h = self._rows.ctypes.data, self._blocks.ctypes.data, self._h.data_ptr()
            site.num_blocks, site.max_rank, site.threads = len(self._blocks), max_rank, threads

    def add_(self, y: torch.Tensor, x: torch.Tensor, *, layer: int, site: str) -> None:
        """Adds to y, [T, N], what the adapters make of x, [T, K]; nothing runs when no row of the step has an adapter."""
        if self._is_active:
            self._function(self._addresses[site], x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), layer)
        self.epilogue.apply_(y, layer=layer, site=site)

    def address(self, site: str) -> int | None:
        """Returns where native code finds the `LowRankSite` of a site in this step; None when nothing has to run."""
        return self._addresses[site] if self._is_active else None

    def invalidate(self, slot: int) -> None:
        """Does nothing: no copy of a slot is kept."""
