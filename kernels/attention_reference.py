"""Attention over pages in plain loops: what the GPU kernels are tested against. Never serves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Attended:
    """What one row gets.

    Attributes:
        out: float64 [heads, head_dim].
        weight: float64 [heads, head_dim], the sum of the absolute terms of `out`: what a relative error of a weight can change.
        score: float64 [heads], the largest sum of absolute terms of a score, scaled.
    """

    out: Tensor
    weight: Tensor
    score: Tensor


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
    q, keys, values = q.double(), (keys.double().repeat_interleave(group, 1)), values.double().repeat_interleave(group, 1)
    scores = torch.einsum("hd,nhd->hn", q, keys) * scale
    terms = torch.einsum("hd,nhd->hn", q.abs(), keys.abs()) * abs(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.softmax(-1)
    out, weight = (torch.einsum("hn,nhd->hd", weights, of) for of in (values, values.abs()))
    return Attended(out, weight, terms.amax(-1))
