"""The step's keys and values, written to their pages."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer"])
def kv_append(
    kv_ptr,
    qk_ptr,
    v_ptr,
    place_ptr,
    count_ptr,
    qk_stride,
    v_stride,
    layer,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`kv[place[t] + 2 · layer · PAGE_SIZE] = k[t]`, v one kind further; grid (rows, column blocks).

    Args:
        kv_ptr: The cache as rows of WIDTH elements, see `PagedKv.rows`.
        qk_ptr: [rows, FIRST + WIDTH], row stride qk_stride; the keys are its last WIDTH columns.
        v_ptr: [rows, WIDTH], row stride v_stride.
        place_ptr: int64 [rows], cache row of each token at layer 0; a negative one is not written.
        count_ptr: int32 [1], rows of the step; programs past it end.
        DEPENDENT: The attention behind it is launched before this one ends.
    """
    row = tl.program_id(0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    if row >= tl.load(count_ptr):
        return
    place = tl.load(place_ptr + row)
    if place < 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    far = row.to(tl.int64)
    key = tl.load(qk_ptr + far * qk_stride + FIRST + columns, mask=mask)
    value = tl.load(v_ptr + far * v_stride + columns, mask=mask)
    target = kv_ptr + (place + 2 * layer * PAGE_SIZE) * WIDTH + columns
    tl.store(target, key, mask=mask)
    tl.store(target + PAGE_SIZE * WIDTH, value, mask=mask)
