"""What lies between a layer's products, each in one launch: norm, rotary positions, gated activation, softcap."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["groups"])
def add_norm(
    x_ptr,
    y_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    y_stride,
    groups,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_Y: tl.constexpr,
):
    """`x[t] += y[t]`, rounded; `out[t, g] = x[t, g] / sqrt(mean(x[t, g]²) + eps) · weight[g]` in float32; grid (rows · groups,).

    Args:
        x_ptr: [rows, groups · WIDTH], row stride x_stride.
        y_ptr: Likewise, row stride y_stride; not read without HAS_Y.
        weight_ptr: [groups, WIDTH], in float32 or the dtype of x.
        out_ptr: [rows, groups, WIDTH], contiguous.
    """
    pid = tl.program_id(0)
    row, group = (pid // groups).to(tl.int64), pid % groups
    offs = tl.arange(0, BLOCK)
    mask = offs < WIDTH
    x_row = x_ptr + row * x_stride + group * WIDTH + offs
    x = tl.load(x_row, mask=mask, other=0.0)
    if HAS_Y:
        y = tl.load(y_ptr + row * y_stride + group * WIDTH + offs, mask=mask, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_row, x, mask=mask)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + group * WIDTH + offs, mask=mask, other=0.0).to(tl.float32)
    out = wide * scale * weight
    tl.store(out_ptr + (row * groups + group) * WIDTH + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_heads"])
def rotate(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    row_stride,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`(a, b) ← (a·cos − b·sin, b·cos + a·sin)` for the halves of what turns of a head, in place; grid (rows, head blocks).

    Args:
        heads_ptr: [rows, num_heads, HEAD_DIM], row stride row_stride.
        cos_ptr: [rows, HALF], contiguous.
        sin_ptr: Likewise.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_h, offs = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK)
    mask_d = offs < HALF
    mask = (offs_h < num_heads)[:, None] & mask_d[None, :]
    at = heads_ptr + row * row_stride + offs_h[:, None] * HEAD_DIM + offs[None, :]
    cos = tl.load(cos_ptr + row * HALF + offs, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + row * HALF + offs, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (a * cos - b * sin).to(heads_ptr.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (b * cos + a * sin).to(heads_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated(gate_up_ptr, out_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """`out[t] = act(gate[t]) · up[t]` of rows [gate, up], act silu or the tanh form of gelu; grid (rows, column blocks)."""
    row, offs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < width
    gate = tl.load(gate_up_ptr + row * 2 * width + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + offs, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2 * inner)  # (1 + tanh(z)) / 2 = sigmoid(2 z)
    else:
        active = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * width + offs, (active * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["cap"])
def softcap(x_ptr, size, cap, BLOCK: tl.constexpr):
    """`x = cap · tanh(x / cap)`, in place, of contiguous numbers; grid (blocks,)."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    capped = cap * (2 * tl.sigmoid(2 * x / cap) - 1)
    tl.store(x_ptr + offs, capped.to(x_ptr.dtype.element_ty), mask=mask)
