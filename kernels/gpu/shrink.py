"""The first half of the low-rank product: what each row makes of the rank rows of its adapter."""

import triton
import triton.language as tl

from kernels.gpu.widen import widen


@triton.jit(do_not_specialize=["num_rows", "layer", "num_layers", "num_slices", "max_items"])
def shrink(
    x_ptr,
    arena_ptr,
    h_ptr,
    entry_ptr,
    plane_ptr,
    arrived_ptr,
    a_offset_ptr,
    b_offset_ptr,
    rank_ptr,
    scale_ptr,
    site_ptr,
    row_slot_ptr,
    item_tile_ptr,
    item_slot_ptr,
    item_rank_ptr,
    num_items_ptr,
    x_stride,
    in_features,
    num_rows,
    layer,
    num_layers,
    num_slices,
    max_items,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`H[s, p, m, j] = where(the row and item p have one slot, scale · (x[row] · A_j), 0)`; grid (programs, SPLIT_K, slices).

    Row m of item p is row `tile[p] · BLOCK_M + m` of the batch, and A_j is rank row `rank[p] + j` of the item's adapter at
    (layer, slice). A rank row that the adapter does not have there is not read, and its column of H is 0.

    It also looks up the other half for `expand`: `entry[s, p, j]` is where B_j starts, in units of 16 elements, or -1 where there
    is none, so that there one load stands in front of each row of B instead of a chain of them, and it is seen to be aligned.

    The scale is folded in float32 and H rounded once. With SPLIT_K > 1 each program sums its part of K into a float32 plane; the
    last to arrive adds the planes up in their order, so the sum does not depend on who that was.

    Args:
        x_ptr: [num_rows, in_features], row stride x_stride.
        arena_ptr: Elements of all adapters.
        h_ptr: [slices, max_items, BLOCK_M, BLOCK_J], in the dtype of x.
        entry_ptr: int64 [slices, max_items, BLOCK_J].
        plane_ptr: float32 [slices, max_items, SPLIT_K, BLOCK_M, BLOCK_J]; unused without a split.
        arrived_ptr: int32 [slices, max_items], zero before and after; unused without a split.
        a_offset_ptr, b_offset_ptr, rank_ptr, scale_ptr: The descriptor table, [slots, num_layers, num_slices].
        site_ptr: int32 [slices, 3], (index in the table, first column, columns) of each slice.
        row_slot_ptr: int32 [num_rows]; negative for rows without an adapter.
        item_tile_ptr, item_slot_ptr, item_rank_ptr: int32 [max_items], see `kernels.gpu.items`.
        num_items_ptr: int32 [1].
        FP8: The arena has bytes of fp8 (`kernels.fp8`), and each block factors in front of A; they are folded in with the scale.
        DEPENDENT: The next kernel is launched before this one ends.
        UPCAST: Products in float32: the interpreter's product of bfloat16 is wrong.
    """
    pid_k, pid_s = tl.program_id(1), tl.program_id(2)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # x is complete
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.load(site_ptr + pid_s * 3)
    offs_m, offs_j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_J)
    offs_tile = offs_m[:, None] * BLOCK_J + offs_j[None, :]
    part = tl.cdiv(in_features, SPLIT_K * BLOCK_K) * BLOCK_K
    first_k = pid_k * part
    last_k = tl.minimum(in_features, first_k + part)
    for item in range(tl.program_id(0), tl.load(num_items_ptr), tl.num_programs(0)):
        slot = tl.load(item_slot_ptr + item)
        first_rank = tl.load(item_rank_ptr + item)
        block = (slot * num_layers + layer) * num_slices + index
        num_live = tl.load(rank_ptr + block) - first_rank
        rows = tl.load(item_tile_ptr + item).to(tl.int64) * BLOCK_M + offs_m
        place = (pid_s * max_items + item).to(tl.int64)
        h_tile = h_ptr + place * (BLOCK_M * BLOCK_J) + offs_tile
        if pid_k == 0:
            b_rows = tl.load(b_offset_ptr + block) + (first_rank + offs_j).to(tl.int64) * tl.load(site_ptr + pid_s * 3 + 2)
            tl.store(entry_ptr + place * BLOCK_J + offs_j, tl.where(offs_j < num_live, b_rows // 16, -1))
        if num_live <= 0:
            if pid_k == 0:
                tl.store(h_tile, tl.zeros((BLOCK_M, BLOCK_J), h_ptr.dtype.element_ty))
        else:
            a_block = tl.multiple_of(tl.load(a_offset_ptr + block), 16)
            a_start = a_block + first_rank.to(tl.int64) * in_features
            a_rows = arena_ptr + a_start + offs_j[None, :] * in_features
            x_rows = x_ptr + rows[:, None] * x_stride
            acc = tl.zeros((BLOCK_M, BLOCK_J), tl.float32)
            for k in range(first_k, last_k, BLOCK_K):
                offs_k = k + tl.arange(0, BLOCK_K)
                mask_k = offs_k < in_features
                x = tl.load(x_rows + offs_k[None, :], mask=(rows < num_rows)[:, None] & mask_k[None, :], other=0.0)
                a = tl.load(a_rows + offs_k[:, None], mask=(offs_j < num_live)[None, :] & mask_k[:, None], other=0)
                x, a = widen(x, h_ptr, FP8=False, UPCAST=UPCAST), widen(a, h_ptr, FP8=FP8, UPCAST=UPCAST)
                acc = tl.dot(x, a, acc, input_precision="ieee")
            last = True
            if SPLIT_K > 1:
                planes = plane_ptr + place * (SPLIT_K * BLOCK_M * BLOCK_J) + offs_tile
                tl.store(planes + pid_k * (BLOCK_M * BLOCK_J), acc)
                tl.debug_barrier()  # the whole plane is stored before it is counted
                last = tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1
                if last:
                    acc = tl.zeros((BLOCK_M, BLOCK_J), tl.float32)
                    for p in tl.static_range(SPLIT_K):
                        acc += tl.load(planes + p * (BLOCK_M * BLOCK_J), cache_modifier=".cg")
                    tl.atomic_xchg(arrived_ptr + place, 0, sem="release", scope="gpu")
            if last:
                own = tl.load(row_slot_ptr + rows, mask=rows < num_rows, other=-1) == slot
                acc *= tl.load(scale_ptr + block)
                if FP8:
                    factors = arena_ptr + a_block - tl.cdiv((num_live + first_rank) * 4, 128) * 128
                    factors = factors.to(tl.pointer_type(tl.float32)) + first_rank + offs_j
                    acc *= tl.load(factors, mask=offs_j < num_live, other=0.0)[None, :]
                h = tl.where(own[:, None] & (offs_j < num_live)[None, :], acc, 0.0)
                tl.store(h_tile, h.to(h_ptr.dtype.element_ty))
