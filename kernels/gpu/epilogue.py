"""What adapters with a magnitude or a bias do to the columns of the output, after the low-rank product."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer", "num_layers", "num_slices"])
def epilogue(
    y_ptr,
    arena_ptr,
    gain_offset_ptr,
    shift_offset_ptr,
    site_ptr,
    row_slot_ptr,
    epilogue_row_ptr,
    num_epilogue_rows_ptr,
    y_stride,
    layer,
    num_layers,
    num_slices,
    BLOCK_N: tl.constexpr,
):
    """`y[t, columns(s)] = gain ⊙ y[t, columns(s)] + shift` over the listed rows; grid (column tiles, programs, slices).

    A row whose adapter has neither here is not written, and what it lacks is not computed: nothing is multiplied by one.

    Args:
        y_ptr: [num_rows, N], row stride y_stride.
        arena_ptr: Elements of all adapters; each block starts on a multiple of 128 bytes.
        gain_offset_ptr, shift_offset_ptr: int64 [slots, num_layers, num_slices], first element of each vector, which is float32
            whatever the arena's dtype is; -1 where there is none.
        site_ptr: int32 [slices, 3], (index in the table, first column, columns) of each slice.
        row_slot_ptr: int32 [num_rows].
        epilogue_row_ptr: int32, the rows whose adapter has a vector anywhere.
        num_epilogue_rows_ptr: int32 [1].
    """
    pid_n, pid_s = tl.program_id(0), tl.program_id(2)
    index = tl.load(site_ptr + pid_s * 3)
    first_column = tl.multiple_of(tl.load(site_ptr + pid_s * 3 + 1), 16)
    width = tl.multiple_of(tl.load(site_ptr + pid_s * 3 + 2), 16)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < width
    for i in range(tl.program_id(1), tl.load(num_epilogue_rows_ptr), tl.num_programs(1)):
        row = tl.load(epilogue_row_ptr + i)
        block = (tl.load(row_slot_ptr + row) * num_layers + layer) * num_slices + index
        gain_offset, shift_offset = tl.load(gain_offset_ptr + block), tl.load(shift_offset_ptr + block)
        if (gain_offset >= 0) | (shift_offset >= 0):
            y_row = y_ptr + row.to(tl.int64) * y_stride + first_column + offs_n
            y = tl.load(y_row, mask=mask_n, other=0.0).to(tl.float32)
            if gain_offset >= 0:
                gain = (arena_ptr + tl.multiple_of(gain_offset, 16)).to(tl.pointer_type(tl.float32))
                y *= tl.load(gain + offs_n, mask=mask_n, other=0.0)
            if shift_offset >= 0:
                shift = (arena_ptr + tl.multiple_of(shift_offset, 16)).to(tl.pointer_type(tl.float32))
                y += tl.load(shift + offs_n, mask=mask_n, other=0.0)
            tl.store(y_row, y.to(y_ptr.dtype.element_ty), mask=mask_n)
