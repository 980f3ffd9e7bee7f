"""What follows the low-rank rows of an adapter: a gain and a shift for every column, which carry DoRA and biases."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.descriptors import Descriptors
from kernels.rows import ABSENT, RankRows
from kernels.sites import Site


def vector_at(arena: torch.Tensor, offset: int, width: int) -> torch.Tensor:
    """Returns a gain or shift, float32 [width], that starts at an element of the arena; a view."""
    return arena[offset : offset + width * 4 // arena.element_size()].view(torch.float32)


class TorchEpilogue:
    """Applies gains and shifts in plain torch, in place.

    Algebra, at (layer, site), for each slice s: `y[t, columns(s)] = gain ⊙ y[t, columns(s)] + shift`, in float32, rounded
    once, for the rows t whose adapter has a gain or a shift anywhere; one that it lacks there counts as 1 or 0. Other rows are
    neither read nor written. The vectors are read from the arena, once for each adapter; the number of operations depends on
    the site alone.

    Owned by the low-rank form; not thread-safe.

    Args:
        arena: 1-D, of the model's dtype.
        descriptors: Where the vectors lie in it.
        sites: The fused projections.
    """

    def __init__(self, arena: torch.Tensor, descriptors: Descriptors, *, sites: tuple[Site, ...]) -> None:
        floats = arena.numel() * arena.element_size() // 4
        self._floats, self._per_float = vector_at(arena, 0, floats), 4 // arena.element_size()
        self._descriptors = descriptors
        self._sites = {site.name: site for site in sites}
        self._rows: torch.Tensor | None = None

    def begin_step(self, rows: RankRows) -> None:
        """Lists the rows that the step's calls work on."""
        changed = rows_with_epilogue(rows, self._descriptors)
        self._rows = torch.from_numpy(changed) if changed.size else None
        if changed.size:
            self._slots, own = np.unique(rows.row_slot[changed], return_inverse=True)
            self._own = torch.from_numpy(own)

    def apply_(self, y: torch.Tensor, *, layer: int, site: str) -> None:
        """Changes y, [T, N]; nothing runs when no row of the step has a gain or a shift."""
        if self._rows is None:
            return
        of, table = self._sites[site], self._descriptors
        for index, (first, last) in zip(of.slices, of.columns, strict=True):
            gains, shifts = table.gain_offset[self._slots, layer, index], table.shift_offset[self._slots, layer, index]
            if max(gains.max(), shifts.max()) == ABSENT:
                continue
            part = y[:, first:last]
            gain, shift = self._vectors(gains, last - first, absent=1.0), self._vectors(shifts, last - first, absent=0.0)
            changed = part.index_select(0, self._rows).float().mul_(gain).add_(shift)
            part.index_copy_(0, self._rows, changed.to(y.dtype))

    def _vectors(self, offsets: npt.NDArray[np.int64], width: int, *, absent: float) -> torch.Tensor:
        """Returns [rows, width]: the vector of each row's adapter, or `absent` where it has none."""
        starts = torch.from_numpy(offsets).unsqueeze(1)
        found = self._floats[starts.clamp(min=0) // self._per_float + torch.arange(width)]
        return torch.where(starts != ABSENT, found, absent)[self._own]


def rows_with_epilogue(rows: RankRows, descriptors: Descriptors) -> npt.NDArray[np.int64]:
    """Returns int64, the rows whose adapter has a gain or a shift anywhere."""
    if not descriptors.has_epilogue.any():
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero((rows.row_slot >= 0) & descriptors.has_epilogue[rows.row_slot])
