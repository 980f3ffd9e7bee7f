"""Attention of rows that decode: each over a context of its own, in splits."""

import triton
import triton.language as tl

from kernels.gpu.online_softmax import absorb, scaled


@triton.jit
def merged(
    part_ptr,
    best_ptr,
    total_ptr,
    home,
    num_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Returns numerators and denominators of a row from the sums of its splits, merged in their order.

    Args:
        part_ptr, best_ptr, total_ptr: See `decode_attention`.
        home: int64, place of the first split.
        num_splits: Splits, KV_HEADS places apart.
    """
    offs_g, offs_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    best = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    for split in range(num_splits):
        place = home + split * KV_HEADS
        part_tile = part_ptr + place * (BLOCK_G * BLOCK_D) + offs_g[:, None] * BLOCK_D + offs_d[None, :]
        part = tl.load(part_tile, mask=(offs_g < GROUP)[:, None], other=0.0, cache_modifier=".cg")
        part_best = tl.load(best_ptr + place * BLOCK_G + offs_g, cache_modifier=".cg")
        part_total = tl.load(total_ptr + place * BLOCK_G + offs_g, cache_modifier=".cg")
        highest = tl.maximum(best, part_best)
        kept, added = tl.exp2(best - highest), tl.exp2(part_best - highest)
        acc = acc * kept[:, None] + part * added[:, None]
        total = total * kept + part_total * added
        best = highest
    return acc, total


@triton.jit(do_not_specialize=["layer", "window"])
def decode_attention(
    out_ptr,
    qk_ptr,
    kv_ptr,
    part_ptr,
    best_ptr,
    total_ptr,
    arrived_ptr,
    row_ptr,
    item_ptr,
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
    MAX_SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`out[t, h] = softmax(scores(q[t, h] · K)) · V` over the last `window` tokens of row t's sequence; grid (programs,).

    A unit of work is an item, one split of one row, and a key head with all its query heads. Programs walk the units. A row of
    one split writes its output at once. Otherwise each split leaves its sums, and the last to arrive merges them in their order,
    so the result does not depend on who that was.

    Args:
        out_ptr: [rows, heads, HEAD_DIM], contiguous.
        qk_ptr: [rows, heads + KV_HEADS, HEAD_DIM], row stride qk_stride; the queries come first.
        kv_ptr: The cache, [pages, layers, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM], page stride page_stride.
        part_ptr: float32 [items, KV_HEADS, BLOCK_G, BLOCK_D], sums of values.
        best_ptr, total_ptr: float32 [items, KV_HEADS, BLOCK_G], largest score and sum of weights.
        arrived_ptr: int32 [items, KV_HEADS], zero before and after.
        row_ptr: int32 [rows, 4]: tokens of the sequence, tokens of a split, where its pages start in the page lists, unused.
        item_ptr: int32 [items], row · MAX_SPLITS + split; the splits of a row follow each other.
        page_ptr: int64, page lists.
        count_ptr: int32 [1], items of the step.
        window: Tokens that a row sees, itself included.
        DEPENDENT: It is launched before the append in front of it ends.
    """
    offs_g, offs_d, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mask_g, mask_d = offs_g < GROUP, offs_d < HEAD_DIM
    num_units = tl.load(count_ptr) * KV_HEADS
    layer_offset = layer.to(tl.int64) * (2 * PAGE_SIZE * KV_HEADS * HEAD_DIM)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # queries, keys and values are complete
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        item, head = unit // KV_HEADS, unit % KV_HEADS
        listed = tl.load(item_ptr + item)
        row, split = listed // MAX_SPLITS, listed % MAX_SPLITS
        length, split_tokens = tl.load(row_ptr + row * 4), tl.load(row_ptr + row * 4 + 1)
        pages = page_ptr + tl.load(row_ptr + row * 4 + 2)
        first = tl.maximum(length - window, 0)
        first_split = first // split_tokens
        if split >= first_split:
            begin = tl.maximum(split * split_tokens, first // BLOCK_N * BLOCK_N)
            end = tl.minimum(length, (split + 1) * split_tokens)
            q_tile = qk_ptr + row.to(tl.int64) * qk_stride + (head * GROUP + offs_g)[:, None] * HEAD_DIM + offs_d[None, :]
            q = tl.load(q_tile, mask=mask_g[:, None] & mask_d[None, :], other=0.0)
            if UPCAST:
                q = q.to(tl.float32)
            keys = kv_ptr + layer_offset + head * HEAD_DIM
            values = keys + PAGE_SIZE * KV_HEADS * HEAD_DIM
            acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
            best = tl.full((BLOCK_G,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_G,), tl.float32)
            for n in range(begin, end, BLOCK_N):
                tokens = n + offs_n
                seen = (tokens >= first) & (tokens < end)
                page = tl.load(pages + n // PAGE_SIZE + offs_n // PAGE_SIZE, mask=seen, other=0)
                places = page * page_stride + offs_n % PAGE_SIZE * (KV_HEADS * HEAD_DIM)
                k = tl.load(keys + places[None, :] + offs_d[:, None], mask=seen[None, :] & mask_d[:, None], other=0.0)
                v = tl.load(values + places[:, None] + offs_d[None, :], mask=seen[:, None] & mask_d[None, :], other=0.0)
                if UPCAST:
                    k = k.to(tl.float32)
                scores = scaled(tl.dot(q, k, input_precision="ieee"), SCALE, SOFTCAP)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                acc, best, total = absorb(acc, best, total, scores, v, UPCAST)
            num_splits = tl.cdiv(tl.maximum(length, 1), split_tokens) - first_split
            last = True
            if num_splits > 1:
                place = tl.cast(unit, tl.int64)
                offs_part = offs_g[:, None] * BLOCK_D + offs_d[None, :]
                tl.store(part_ptr + place * (BLOCK_G * BLOCK_D) + offs_part, acc, mask=mask_g[:, None])
                tl.store(best_ptr + place * BLOCK_G + offs_g, best)
                tl.store(total_ptr + place * BLOCK_G + offs_g, total)
                tl.debug_barrier()  # the sums are stored before they are counted
                home = place - (split - first_split) * KV_HEADS
                last = tl.atomic_add(arrived_ptr + home, 1, sem="acq_rel", scope="gpu") == num_splits - 1
                if last:
                    acc, total = merged(part_ptr, best_ptr, total_ptr, home, num_splits, KV_HEADS, GROUP, BLOCK_G, BLOCK_D)
                    tl.atomic_xchg(arrived_ptr + home, 0, sem="release", scope="gpu")
            if last:
                out = acc / tl.where(total == 0, 1.0, total)[:, None]
                out_tile = out_ptr + ((row.to(tl.int64) * KV_HEADS + head) * GROUP + offs_g)[:, None] * HEAD_DIM + offs_d[None, :]
                tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=mask_g[:, None] & mask_d[None, :])
