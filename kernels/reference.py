"""The low-rank product in plain loops: what every other form is tested against. Never serves."""

from __future__ import annotations

import torch

from kernels.descriptors import Descriptors
from kernels.epilogue import vector_at
from kernels.rows import ABSENT, RankRows
from kernels.sites import Site


def add_low_rank(
    y: torch.Tensor,
    x: torch.Tensor,
    *,
    arena: torch.Tensor,
    descriptors: Descriptors,
    layer: int,
    site: Site,
    rows: RankRows,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Returns what each row's own adapter makes of y, out of place.

    Algebra: `y'[t, columns(s)] = y[t, columns(s)] + sum_j scale · (x[t] · A_j) · B_j` over the entries j of the list with
    `list_slot[j] == row_slot[t]` and `list_rank[j] < rank[slot, layer, s]`. Entries that do not meet the row are never read.
    Then, where the row's adapter has them, `y' = gain ⊙ y' + shift`.

    Args:
        y: [T, N], output of the base projection.
        x: [T, K], its input.
        arena: 1-D, elements of all adapters.
        descriptors: Where the blocks lie in the arena.
        layer: Layer of the model.
        site: The fused projection.
        rows: The step's rows and list.
        dtype: Everything is widened to it and computed in it.

    Returns:
        [T, N] in `dtype`.
    """
    out = torch.full(y.shape, torch.nan, dtype=dtype)
    epilogue = (descriptors.gain_offset, descriptors.shift_offset)
    for t, slot in enumerate(rows.row_slot.tolist()):
        out[t] = y[t].to(dtype)
        for index, (first, last) in zip(site.slices, site.columns, strict=True):
            for list_slot, rank_row in zip(rows.list_slot.tolist(), rows.list_rank.tolist(), strict=True):
                if slot < 0 or list_slot != slot or rank_row >= descriptors.rank[slot, layer, index]:
                    continue
                a_start = int(descriptors.a_offset[slot, layer, index]) + rank_row * site.in_features
                b_start = int(descriptors.b_offset[slot, layer, index]) + rank_row * (last - first)
                a = arena[a_start : a_start + site.in_features].to(dtype)
                b = arena[b_start : b_start + last - first].to(dtype)
                scale = float(descriptors.scale[slot, layer, index])
                out[t, first:last] += scale * torch.dot(x[t].to(dtype), a) * b
            gain, shift = (_vector(arena, int(offsets[slot, layer, index]), last - first, dtype) for offsets in epilogue)
            if slot >= 0 and gain is not None:
                out[t, first:last] *= gain
            if slot >= 0 and shift is not None:
                out[t, first:last] += shift
    return out


def _vector(arena: torch.Tensor, offset: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns `width` float32 elements from `offset` of them on; None where there are none."""
    if offset == ABSENT:
        return None
    return vector_at(arena, offset, width).to(dtype)
