"""What attention over pages does with one tile of tokens, whether rows decode or come in chunks."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scaled(products, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Returns scores in base 2: `products · SCALE`, or `SOFTCAP · tanh(products · SCALE / SOFTCAP)`, times log2(e).

    The exponent is never positive, so the largest products overflow nothing.
    """
    if SOFTCAP == 0:
        scores = products * (SCALE * LOG2_E)
    else:
        x = products * (SCALE / SOFTCAP)
        falling = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
        bent = (1 - falling) / (1 + falling)
        scores = tl.where(x < 0, -bent, bent) * (SOFTCAP * LOG2_E)
    return scores


@triton.jit
def absorb(acc, best, total, scores, values, UPCAST: tl.constexpr):
    """Adds a tile of tokens to running sums `acc = Σ 2^(score − best) · value` and `total = Σ 2^(score − best)`.

    A row that sees none of the tile keeps its bits.

    Args:
        acc: float32 [rows, dim].
        best: float32 [rows], the largest score so far, −inf before the first.
        total: float32 [rows].
        scores: float32 [rows, tokens] in base 2, −inf where a row does not see a token.
        values: [tokens, dim], 0 for tokens that no row sees.
        UPCAST: Products in float32: the interpreter's product of bfloat16 is wrong.
    """
    highest = tl.maximum(best, tl.max(scores, 1))
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - anchor[:, None])
    kept = tl.exp2(best - anchor)
    total = total * kept + tl.sum(weights, 1)
    weights = weights.to(values.dtype)
    if UPCAST:
        weights, values = weights.to(tl.float32), values.to(tl.float32)
    acc = tl.dot(weights, values, acc * kept[:, None], input_precision="ieee")
    return acc, highest, total
