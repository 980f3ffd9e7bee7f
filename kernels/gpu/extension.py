"""The base product with the second half of the low-rank product as an extension of its K."""

import triton
import triton.language as tl

from kernels.gpu.expand import add_items
from kernels.gpu.widen import widen


@triton.jit(do_not_specialize=["num_rows", "max_items"])
def extension(
    y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    arena_ptr,
    h_ptr,
    entry_ptr,
    site_ptr,
    tile_start_ptr,
    y_stride,
    x_stride,
    weight_stride,
    in_features,
    num_rows,
    max_items,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    ITEM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`y = [x | H] · [W | B]ᵀ + bias`, written once; grid (row tiles, column tiles, slices).

    K first, then the list of the row's tile. H is 0 where a row and an item have different slots (`shrink`), so a row's sum has
    the same terms whatever its neighbours are.

    Args:
        y_ptr: [num_rows, N], row stride y_stride; written for every row.
        x_ptr: [num_rows, in_features], row stride x_stride.
        weight_ptr: [N, in_features], row stride weight_stride, of all slices of the site.
        bias_ptr: [N]; unused without HAS_BIAS.
        h_ptr, entry_ptr, site_ptr, tile_start_ptr: As in `expand`.
        BLOCK_K: Columns of x that one product takes.
        HAS_BIAS: The base has a bias here.
        DEPENDENT: It is launched before the shrink in front of it ends, which waited in turn: so x and W are complete, and only H
            and what lies behind it have to be waited for.
    """
    pid_tile, pid_n, pid_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    site = site_ptr + pid_s * 3
    first_column, width = tl.multiple_of(tl.load(site + 1), 16), tl.multiple_of(tl.load(site + 2), 16)
    if pid_n * BLOCK_N >= width:
        return
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = first_column + offs_n
    rows = pid_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_rows = x_ptr + rows[:, None] * x_stride
    weight_rows = weight_ptr + columns.to(tl.int64)[None, :] * weight_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, in_features, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask_k = offs_k < in_features
        x = tl.load(x_rows + offs_k[None, :], mask=(rows < num_rows)[:, None] & mask_k[None, :], other=0.0)
        weight = tl.load(weight_rows + offs_k[:, None], mask=(offs_n < width)[None, :] & mask_k[:, None], other=0.0)
        x, weight = widen(x, h_ptr, FP8=False, UPCAST=UPCAST), widen(weight, h_ptr, FP8=False, UPCAST=UPCAST)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # H is complete
    first, last = tl.load(tile_start_ptr + pid_tile), tl.load(tile_start_ptr + pid_tile + 1)
    acc = add_items(
        acc, first, last, pid_s, offs_n, width, arena_ptr, h_ptr, entry_ptr, max_items, BLOCK_M, BLOCK_J, ITEM, FP8, UPCAST
    )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=offs_n < width, other=0.0).to(tl.float32)[None, :]
    mask = (rows < num_rows)[:, None] & (offs_n < width)[None, :]
    tl.store(y_ptr + rows[:, None] * y_stride + columns[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)
