"""The second half of the low-rank product: from H to the columns of the output."""

import triton
import triton.language as tl

from kernels.gpu.widen import widen


@triton.jit
def add_items(
    acc, first, last, pid_s, offs_n, width, arena_ptr, h_ptr, entry_ptr, max_items,
    BLOCK_M: tl.constexpr, BLOCK_J: tl.constexpr, ITEM: tl.constexpr, FP8: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns `acc[m, n] + Σ_j H[m, j] · B_j[n]` over the items from first to last of a slice; arguments as in `expand`."""
    offs_m, offs_j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_J)
    first_entry = (pid_s * max_items + first).to(tl.int64) * ITEM
    num_entries = (last - first) * ITEM
    h_rows = h_ptr + first_entry * BLOCK_M + (offs_j // ITEM * (BLOCK_M * ITEM) + offs_j % ITEM)[None, :] + offs_m[:, None] * ITEM
    for j in range(0, num_entries, BLOCK_J):
        listed = offs_j < num_entries - j
        b_start = tl.load(entry_ptr + first_entry + j + offs_j, mask=listed, other=-1) * 16
        h = tl.load(h_rows + j * BLOCK_M, mask=listed[None, :], other=0.0)
        mask_b = (b_start >= 0)[:, None] & (offs_n < width)[None, :]
        b = tl.load(arena_ptr + b_start[:, None] + offs_n[None, :], mask=mask_b, other=0)
        h, b = widen(h, h_ptr, FP8=False, UPCAST=UPCAST), widen(b, h_ptr, FP8=FP8, UPCAST=UPCAST)
        acc = tl.dot(h, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows", "max_items"])
def expand(
    y_ptr,
    arena_ptr,
    h_ptr,
    entry_ptr,
    site_ptr,
    row_slot_ptr,
    tile_start_ptr,
    y_stride,
    num_rows,
    max_items,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    ITEM: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`y[t, columns(s)] += Σ_j H[t, j] · B_j` over the items of the row's tile; grid (column tiles, row tiles, slices).

    In place, rows without an adapter are not touched. Written first, every row gets its sum, which is 0 for rows and slices
    without an adapter: the base product then adds to it.

    Args:
        y_ptr: [num_rows, N], row stride y_stride.
        h_ptr: [slices, max_items, BLOCK_M, ITEM], from `shrink`.
        entry_ptr: int64 [slices, max_items, ITEM], start of each row of B in units of 16 elements, -1 for none; from `shrink`.
        tile_start_ptr: int32 [row tiles + 1], where the items of each tile start.
        BLOCK_J: Entries that one product takes, a multiple of ITEM.
        ITEM: Rank rows of an item.
        IN_PLACE: Adds to y, rather than writing it first.
        FP8: The arena has bytes of fp8 (`kernels.fp8`).
        DEPENDENT: It is launched before the kernel in front of it ends, which must be a shrink that waited in turn.
    """
    pid_n, pid_tile, pid_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # H is complete
    site = site_ptr + pid_s * 3
    width = tl.multiple_of(tl.load(site + 2), 16)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    first, last = tl.load(tile_start_ptr + pid_tile), tl.load(tile_start_ptr + pid_tile + 1)
    if pid_n * BLOCK_N >= width:
        return
    if IN_PLACE:
        if first == last:
            return
    offs_m = tl.arange(0, BLOCK_M)
    rows = pid_tile.to(tl.int64) * BLOCK_M + offs_m
    mask_m = rows < num_rows
    if IN_PLACE:
        mask_m = tl.load(row_slot_ptr + rows, mask=mask_m, other=-1) >= 0
    mask = mask_m[:, None] & (offs_n < width)[None, :]
    y_tile = y_ptr + rows[:, None] * y_stride + tl.multiple_of(tl.load(site + 1), 16) + offs_n[None, :]
    if IN_PLACE:
        acc = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = add_items(
        acc, first, last, pid_s, offs_n, width, arena_ptr, h_ptr, entry_ptr, max_items, BLOCK_M, BLOCK_J, ITEM, FP8, UPCAST
    )
    tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), mask=mask)
