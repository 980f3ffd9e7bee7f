"""The pieces of a layer in two forms: PyTorch's operations, and one native call each."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dataplane.model.layers import rms_norm, rotate, silu_mul
from dataplane.model.linear import Linear, pack_linear
from kernels.native import Native


class Pieces(Protocol):
    """The products of a layer and what lies between them. All keep the dtype of their input."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Returns the product with a weight, [out, in], which need not be kept, and a bias, [out]."""
        ...

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds y, [T, H], to x in place, unless it is None, and returns `rms_norm(x, weight, eps)`."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns heads, [T, heads, head_dim], turned as `layers.rotate` says; may work in place."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns `silu(gate) · up` of [T, 2·I] as [T, I]."""
        ...

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns int64 [S], first index of each row's largest value, and bool [S], whether that is finite and none is NaN."""
        ...


class TorchPieces:
    """Plain PyTorch, on every device and in every dtype."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See `Pieces`."""
        return pack_linear(weight, bias)

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See `Pieces`."""
        if y is not None:
            x += y
        return rms_norm(x, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Pieces`; a new tensor."""
        return rotate(heads, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Pieces`."""
        return silu_mul(gate_up)

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pieces`."""
        largest, tokens = logits.max(dim=-1)
        return tokens, largest.isfinite()


class NativePieces:
    """One call of `cpu.cpp` each: float32 inside, rounded once. Tensors lie on the CPU and have contiguous rows.

    Raises:
        NativeFormError: The library does not compute in the dtype.
    """

    def __init__(self, native: Native, dtype: torch.dtype) -> None:
        self._native, self._torch = native, TorchPieces()
        self._add_norm = native.function("add_norm", dtype)
        self._rotate = native.function("rotate", dtype)
        self._silu_mul = native.function("silu_mul", dtype)
        self._likeliest = native.function("likeliest", dtype)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See `Pieces`."""
        return pack_linear(weight, bias, native=self._native)

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See `Pieces`; a weight of another dtype than x is left to PyTorch."""
        if weight.dtype is not x.dtype:
            return self._torch.add_norm(x, y, weight, eps)
        out = torch.empty_like(x)
        added = None if y is None else y.data_ptr()
        rows, width = x.shape
        self._add_norm(x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), rows, width, eps, torch.get_num_threads())
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Pieces`; in place, unless a part of each head does not turn."""
        rows, num_heads, dim = heads.shape
        if 2 * cos.shape[-1] != dim:
            return self._torch.rotate(heads, cos, sin)
        threads = torch.get_num_threads()
        self._rotate(heads.data_ptr(), heads.stride(0), cos.data_ptr(), sin.data_ptr(), rows, num_heads, dim, threads)
        return heads

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Pieces`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads())
        return out

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pieces`."""
        rows, width = logits.shape
        tokens, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        self._likeliest(logits.data_ptr(), tokens.data_ptr(), finite.data_ptr(), rows, width, torch.get_num_threads())
        return tokens, finite
