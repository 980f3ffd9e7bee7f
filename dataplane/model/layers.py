"""The small pieces of a Llama layer: norm, rotary positions, gated activation. All keep the dtype of their input."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dataplane.model.config import LlamaConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `x / sqrt(mean(x²) + eps) · weight`; the mean in float32. x is [T, H], weight [H]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns `silu(gate) · up` of a fused [T, 2·I] projection, gate first, as [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class Rotary:
    """Tables of cosines and sines for every position.

    Attributes:
        cos: [max_context, head_dim / 2] in the model's dtype.
        sin: Likewise.
    """

    def __init__(self, config: LlamaConfig, *, max_context: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_context, dtype=torch.float32), rotary_frequencies(config))
        self.cos = angles.cos().to(dtype).to(device)
        self.sin = angles.sin().to(dtype).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines for positions [T], each [T, 1, head_dim / 2]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotary_frequencies(config: LlamaConfig) -> Tensor:
    """Returns the head_dim / 2 angular frequencies, float32; `llama3` scaling included.

    Source: the rotary embedding paper (arXiv 2104.09864) and the Llama 3.1 release for the scaled form.
    """
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) * 2 / config.head_dim)
    scaled = config.rope_llama3
    if scaled is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaled.original_max_position / scaled.high_freq_factor
    shortest_stretched = scaled.original_max_position / scaled.low_freq_factor
    blend = (scaled.original_max_position / wavelengths - scaled.low_freq_factor) / (
        scaled.high_freq_factor - scaled.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaled.factor + blend * frequencies
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / scaled.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, stretched)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each head by its position's angles: `(a·cos − b·sin, b·cos + a·sin)` for the halves a, b of the head.

    Args:
        heads: [T, heads, head_dim], may be a strided view; is not changed.
        cos: [T, 1, head_dim / 2].
        sin: Likewise.

    Returns:
        A new contiguous tensor of the same shape.
    """
    half = heads.shape[-1] // 2
    a, b = heads[..., :half], heads[..., half:]
    turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    torch.mul(a, cos, out=turned[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=turned[..., half:]).addcmul_(a, sin)
    return turned
