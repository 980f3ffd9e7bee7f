"""The pieces of a layer in two forms: PyTorch's operations, and one native call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dataplane.model.layers import gelu_tanh_mul, rms_norm, rotate, silu_mul, softcap
from dataplane.model.linear import Linear, pack_linear
from kernels.huge_pages import HugePages
from kernels.native import Native


class Pieces(Protocol):
    """The products of a layer and what lies between them. All keep the dtype of their input."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Returns the product with a weight, [out, in], which need not be kept, and a bias, [out]."""
        ...

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds y, [T, H], to x in place, unless it is None, and returns `rms_norm(x, weight, eps)`."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns `rms_norm(x, weight, eps)` of x, [T, H] or [T, heads, head_dim], which may be a strided view."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns heads, [T, heads, head_dim], turned as `layers.rotate` says; may work in place."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns `silu(gate) · up` of [T, 2·I] as [T, I]."""
        ...

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """Returns `gelu(gate) · up` of [T, 2·I] as [T, I], with gelu in its tanh form."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Returns `cap · tanh(x / cap)`, in place."""
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

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Pieces`."""
        return rms_norm(x, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Pieces`; a new tensor."""
        return rotate(heads, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Pieces`."""
        return silu_mul(gate_up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """See `Pieces`."""
        return gelu_tanh_mul(gate_up)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """See `Pieces`."""
        return softcap(x, cap)

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pieces`."""
        largest, tokens = logits.max(dim=-1)
        return tokens, largest.isfinite()


class NativePieces:
    """One call of `cpu.cpp` each: float32 inside, rounded once. Tensors lie on the CPU and have contiguous rows.

    Attributes:
        native: The library.

    Args:
        native: The library.
        dtype: Of all tensors but the weights of norms.
        invariant: Products are native too, in every dtype and on every machine, so that a row's bits depend on that row alone.

    Raises:
        NativeFormError: The library does not compute in the dtype.
    """

    def __init__(self, native: Native, dtype: torch.dtype, *, invariant: bool = False) -> None:
        self.native, self._invariant, self._pages = native, invariant, HugePages()
        self._add_norm = native.function("add_norm", dtype)
        self._rotate = native.function("rotate", dtype)
        self._silu_mul = native.function("silu_mul", dtype)
        self._gelu_tanh_mul = native.function("gelu_tanh_mul", dtype)
        self._softcap = native.function("softcap", dtype)
        self._likeliest = native.function("likeliest", dtype)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See `Pieces`."""
        return pack_linear(weight, bias, native=self.native, pages=self._pages, invariant=self._invariant)

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See `Pieces`; the weight has the dtype of x, or float32."""
        out = torch.empty(x.shape, dtype=x.dtype)
        groups, width = (1, *weight.shape)[-2:]
        self._add_norm(
            x.data_ptr(),
            x.stride(0),
            None if y is None else y.data_ptr(),
            weight.data_ptr(),
            weight.dtype is torch.float32,
            out.data_ptr(),
            x.shape[0],
            groups,
            width,
            eps,
            torch.get_num_threads(),
        )
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Pieces`; heads of a row lie side by side."""
        return self.add_norm(x, None, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Pieces`; in place."""
        rows, num_heads, dim = heads.shape
        half, threads = cos.shape[-1], torch.get_num_threads()
        self._rotate(heads.data_ptr(), heads.stride(0), cos.data_ptr(), sin.data_ptr(), rows, num_heads, dim, half, threads)
        return heads

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Pieces`."""
        return self._gated(self._silu_mul, gate_up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """See `Pieces`."""
        return self._gated(self._gelu_tanh_mul, gate_up)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """See `Pieces`; x is contiguous."""
        self._softcap(x.data_ptr(), x.numel(), cap, torch.get_num_threads())
        return x

    @staticmethod
    def _gated(function: Callable[..., None], gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype)
        function(gate_up.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads())
        return out

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pieces`."""
        rows, width = logits.shape
        tokens, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        self._likeliest(logits.data_ptr(), tokens.data_ptr(), finite.data_ptr(), rows, width, torch.get_num_threads())
        return tokens, finite
