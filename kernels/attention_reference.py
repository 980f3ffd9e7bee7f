"""Attention over pages in plain loops: what the GPU kernels are tested against. Never serves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDOFF = 2.0**-24  # of float32, in which scores and sums are computed
_ROUNDINGS = 8  # of a score between its products and its power of two


@dataclass(frozen=True, slots=True)
class Attended:
    """What one row gets.

    Attributes:
        out: float64 [heads, head_dim].
        weight: float64 [heads, head_dim], the sum of the absolute terms of `out`: what a relative error of a weight can change.
        score: float64 [heads], the largest sum of absolute terms of a score, scaled.
        softcap: Of the scores; 0 without.
        num_tokens: Tokens that the row sees.
    """

    out: Tensor
    weight: Tensor
    score: Tensor
    softcap: float
    num_tokens: int

    def error_over_bound(self, out: Tensor, *, roundoff: float) -> float:
        """Returns the largest error of `out`, [heads, head_dim], over what roundings may make of it.

        Weights, and at last the output, are rounded to the dtype; what a score is off by is a weight's relative error, twice,
        since their sum divides.

        Args:
            out: What a kernel gave.
            roundoff: Of the dtype.
        """
        of_scores = _ROUNDOFF * ((out.shape[1] + _ROUNDINGS) * self.score + _ROUNDINGS * self.softcap)
        relative = 2 * roundoff + 2 * of_scores + _ROUNDOFF * (self.num_tokens + 2 * _ROUNDINGS)
        bound = roundoff * self.out.abs() + relative[:, None] * self.weight
        return float(((out.double() - self.out).abs() / bound).nan_to_num(torch.inf).max())


def read_tokens(cache: Tensor, pages: Tensor, *, layer: int, kind: int, first: int, end: int) -> Tensor:
    """Returns [end - first, kv_heads, head_dim] of a sequence: keys for kind 0, values for kind 1.

    Args:
        cache: [pages, layers, 2, page_size, kv_heads, head_dim].
        pages: int64 [pages of the sequence].
        layer: The layer.
        kind: 0 or 1.
        first: First token.
        end: The token after the last.
    """
    page_size = cache.shape[3]
    return torch.stack([cache[pages[token // page_size], layer, kind, token % page_size] for token in range(first, end)])


def attend(q: Tensor, keys: Tensor, values: Tensor, *, scale: float, softcap: float | None) -> Attended:
    """Returns `softmax(scores(q · K)) · V` in float64 for one row.

    Args:
        q: [heads, head_dim].
        keys: [tokens, kv_heads, head_dim], exactly the tokens that the row sees.
        values: Likewise.
        scale: Factor of the scores.
        softcap: Scores s become `softcap · tanh(s / softcap)`; None leaves them.
    """
    group = q.shape[0] // keys.shape[1]
    q, keys, values = q.double(), keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
    scores = torch.einsum("hd,nhd->hn", q, keys) * scale
    terms = torch.einsum("hd,nhd->hn", q.abs(), keys.abs()) * abs(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.softmax(-1)
    out, weight = (torch.einsum("hn,nhd->hd", weights, of) for of in (values, values.abs()))
    return Attended(out, weight, terms.amax(-1), softcap or 0.0, keys.shape[0])
