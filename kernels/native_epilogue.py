"""Gains and shifts of adapters in the native CPU form."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from kernels.descriptors import Descriptors
from kernels.epilogue import rows_with_epilogue
from kernels.native import Native
from kernels.native_sites import Slices
from kernels.rows import RankRows
from kernels.sites import Site


class EpilogueSite(ctypes.Structure):
    """Mirrors `EpilogueSite` of cpp/epilogue.hpp."""

    _fields_ = (
        ("arena", ctypes.c_void_p),
        ("gain_offset", ctypes.c_void_p),
        ("shift_offset", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("num_slices", ctypes.c_int64),
        ("item_bytes", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("slices", Slices),
    )


class NativeEpilogue:
    """`y[t, columns(s)] = gain ⊙ y[t, columns(s)] + shift`, in place, one call a site; the interface of `TorchEpilogue`.

    A row's vectors are read from the arena where they lie. What a row's adapter lacks there is not computed, and rows without
    either anywhere are not visited. Owned by the low-rank form; not thread-safe.

    Args:
        arena: 1-D, of the model's dtype, on the CPU.
        descriptors: Where the vectors lie in it.
        native: The library.
        sites: The fused projections.

    Raises:
        NativeFormError: The library does not compute in the arena's dtype, or a site has more than four slices.
    """

    def __init__(self, arena: torch.Tensor, descriptors: Descriptors, *, native: Native, sites: tuple[Site, ...]) -> None:
        self._function = native.function("epilogue", arena.dtype)
        self._arena, self._descriptors = arena, descriptors
        _, num_layers, num_slices = descriptors.rank.shape
        self._sites = {
            site.name: EpilogueSite(
                arena=arena.data_ptr(),
                num_layers=num_layers,
                num_slices=num_slices,
                item_bytes=arena.element_size(),
                slices=Slices.of(site),
            )
            for site in sites
        }
        self._addresses = {name: ctypes.addressof(site) for name, site in self._sites.items()}
        self._is_active = False

    def begin_step(self, rows: RankRows) -> None:
        """Lists the rows that the step's calls work on."""
        changed, table = rows_with_epilogue(rows, self._descriptors), self._descriptors
        self._is_active = changed.size > 0
        if not self._is_active:
            return
        self._rows, self._slots = changed.astype(np.int32), np.ascontiguousarray(rows.row_slot[changed], dtype=np.int32)
        for site in self._sites.values():
            site.gain_offset, site.shift_offset = table.gain_offset.ctypes.data, table.shift_offset.ctypes.data
            site.rows, site.slots, site.num_rows = self._rows.ctypes.data, self._slots.ctypes.data, changed.size
            site.threads = torch.get_num_threads()

    def apply_(self, y: torch.Tensor, *, layer: int, site: str) -> None:
        """Changes y, [T, N]; nothing runs when no row of the step has a gain or a shift."""
        if self._is_active:
            self._function(self._addresses[site], y.data_ptr(), y.stride(0), layer)

    def address(self, site: str) -> int | None:
        """Returns where native code finds the `EpilogueSite` of a site in this step; None when nothing has to run."""
        return self._addresses[site] if self._is_active else None
