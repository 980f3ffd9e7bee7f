"""Attention of chunks: rows of a prompt over what lies before them, in the cache, and over each other."""

import triton
import triton.language as tl

from kernels.gpu.online_softmax import absorb, scaled


@triton.jit(do_not_specialize=["layer", "window"])
def prefill_attention(
    out_ptr,
    qk_ptr,
    kv_ptr,
    tile_ptr,
    page_ptr,
    count_ptr,
    qk_stride,
    page_stride,
    layer,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`out[t, h] = softmax(scores(q[t, h] · K)) · V` over the last `window` tokens up to row t's own; grid (programs,).

    A unit of work is a tile of rows of one chunk, and a key head with all its query heads: entry m of the tile is query head
    `m % GROUP` of row `m // GROUP`. Programs walk the units. Keys and values of the chunk itself come from the cache too.

    Tiles of tokens start at multiples of BLOCK_N of the sequence, and one that a row does not see changes none of its bits, so
    these do not depend on where the chunk was cut.

    Args:
        out_ptr: [rows, heads, HEAD_DIM], contiguous.
        qk_ptr: [rows, heads + KV_HEADS, HEAD_DIM], row stride qk_stride; the queries come first.
        kv_ptr: The cache, [pages, layers, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM], page stride page_stride.
        tile_ptr: int32 [tiles, 4]: first row of the batch, rows, position of the first row, where the sequence's pages start in
            the page lists.
        page_ptr: int64, page lists.
        count_ptr: int32 [1], tiles of the step.
        window: Tokens that a row sees, itself included.
        DEPENDENT: It is launched before the append in front of it ends.
    """
    offs_m, offs_d, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mask_d = offs_d < HEAD_DIM
    num_units = tl.load(count_ptr) * KV_HEADS
    layer_offset = layer.to(tl.int64) * (2 * PAGE_SIZE * KV_HEADS * HEAD_DIM)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # queries, keys and values are complete
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        tile, head = tile_ptr + unit // KV_HEADS * 4, unit % KV_HEADS
        first_row, num_rows, position = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        pages = page_ptr + tl.load(tile + 3)
        positions = position + offs_m // GROUP
        mask_q = (offs_m < num_rows * GROUP)[:, None] & mask_d[None, :]
        rows, heads = (first_row + offs_m // GROUP).to(tl.int64), head * GROUP + offs_m % GROUP
        q_tile = qk_ptr + rows[:, None] * qk_stride + heads[:, None] * HEAD_DIM + offs_d[None, :]
        q = tl.load(q_tile, mask=mask_q, other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        keys = kv_ptr + layer_offset + head * HEAD_DIM
        values = keys + PAGE_SIZE * KV_HEADS * HEAD_DIM
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        first, end = tl.maximum(position + 1 - window, 0), position + num_rows
        for n in range(first // BLOCK_N * BLOCK_N, end, BLOCK_N):
            tokens = n + offs_n
            reached = (tokens >= first) & (tokens < end)
            page = tl.load(pages + n // PAGE_SIZE + offs_n // PAGE_SIZE, mask=reached, other=0)
            places = page * page_stride + offs_n % PAGE_SIZE * (KV_HEADS * HEAD_DIM)
            k = tl.load(keys + places[None, :] + offs_d[:, None], mask=reached[None, :] & mask_d[:, None], other=0.0)
            v = tl.load(values + places[:, None] + offs_d[None, :], mask=reached[:, None] & mask_d[None, :], other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
            scores = scaled(tl.dot(q, k, input_precision="ieee"), SCALE, SOFTCAP)
            distance = positions[:, None] - tokens[None, :]
            scores = tl.where((distance >= 0) & (distance < window), scores, float("-inf"))
            acc, best, total = absorb(acc, best, total, scores, v, UPCAST)
        out = acc / tl.where(total == 0, 1.0, total)[:, None]  # entries past the tile's rows may have seen nothing
        out_tile = out_ptr + (rows * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=mask_q)
