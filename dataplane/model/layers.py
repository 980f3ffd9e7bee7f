"""The small pieces of a layer: norm, rotary positions, gated activation. All keep the dtype of their input."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dataplane.model.rope import FreeScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `x / sqrt(mean(x²) + eps) · weight` over the last dimension of x; the mean in float32.

    Args:
        x: [T, H], or [T, heads, head_dim].
        weight: [H], or [heads, head_dim]. When its dtype is float32 and that of x is not, everything is computed in float32 and
            rounded once.
        eps: Keeps rows of zeros finite.
    """
    if weight.dtype is not x.dtype:
        return rms_norm(x.float(), weight, eps).to(x.dtype)
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns `silu(gate) · up` of a fused [T, 2·I] projection, gate first, as [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Returns `gelu(gate) · up`, with gelu in its tanh form; see `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def softcap(x: Tensor, cap: float) -> Tensor:
    """Returns `cap · tanh(x / cap)`, in place: nearly x where it is small, never beyond the cap."""
    return x.div_(cap).tanh_().mul_(cap)


class Rotary:
    """Tables of cosines and sines for every position.

    Attributes:
        cos: [max_context, width / 2] in the model's dtype.
        sin: Likewise.
    """

    def __init__(self, rope: Rope, *, max_context: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_context, dtype=torch.float32), rotary_frequencies(rope))
        self.cos = (angles.cos() * rope.magnitude).to(dtype).to(device)
        self.sin = (angles.sin() * rope.magnitude).to(dtype).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines for positions [T], each [T, 1, width / 2]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotary_frequencies(rope: Rope) -> Tensor:
    """Returns the width / 2 angular frequencies, float32, scaled.

    Source: the rotary embedding paper (arXiv 2104.09864); YaRN (arXiv 2309.00071); the Llama 3.1 release for `llama3`.
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.width, 2, dtype=torch.float32) / rope.width)
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case FreeScaling(divisors):
            return frequencies / torch.tensor(divisors)
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _yarn(frequencies, scaling, rope)


def _llama3(frequencies: Tensor, scaled: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaled.original_max_position / scaled.high_freq_factor
    shortest_stretched = scaled.original_max_position / scaled.low_freq_factor
    blend = (scaled.original_max_position / wavelengths - scaled.low_freq_factor) / (
        scaled.high_freq_factor - scaled.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaled.factor + blend * frequencies
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / scaled.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, stretched)


def _yarn(frequencies: Tensor, scaled: YarnScaling, rope: Rope) -> Tensor:
    def dimension(turns: float) -> float:
        """The dimension that turns this often within the original context."""
        return rope.width * math.log(scaled.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(scaled.beta_fast), dimension(scaled.beta_slow)
    if scaled.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.width - 1)
    steps = torch.arange(rope.width // 2, dtype=torch.float32) - first
    stretched = (steps / ((last - first) or 0.001)).clamp(0, 1)
    return frequencies / scaled.factor * stretched + frequencies * (1 - stretched)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each head by its position's angles: `(a·cos − b·sin, b·cos + a·sin)` for the halves a, b of what turns of it.

    Args:
        heads: [T, heads, head_dim], may be a strided view; is not changed.
        cos: [T, 1, width / 2]; entries of a head from `width` on stay as they are.
        sin: Likewise.

    Returns:
        A new contiguous tensor of the same shape.
    """
    half = cos.shape[-1]
    width = 2 * half
    a, b = heads[..., :half], heads[..., half:width]
    turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    torch.mul(a, cos, out=turned[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=turned[..., half:width]).addcmul_(a, sin)
    if width < heads.shape[-1]:
        turned[..., width:] = heads[..., width:]
    return turned
