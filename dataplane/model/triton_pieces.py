"""What lies between a layer's products on a device, a launch each."""

from __future__ import annotations

import torch
from torch import Tensor

from dataplane.model.linear import Linear, PlainLinear
from dataplane.model.pieces import TorchPieces
from kernels.gpu import pieces

_BLOCK = 1024
_HEADS_ELEMENTS = 2048


class TritonPieces(TorchPieces):
    """`TorchPieces` with everything but the products in kernels of ours; a row's bits depend on that row alone.

    Sums are float32, and each result is rounded once. The products are the library's.
    """

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See `Pieces`."""
        return PlainLinear(weight, bias)

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See `Pieces`; heads of a row lie side by side."""
        width = weight.shape[-1]
        groups, block = weight.numel() // width, _power_of_two(width)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out.numel():
            pieces.add_norm[(x.shape[0] * groups,)](
                x, x if y is None else y, weight, out, x.stride(0), x.stride(0) if y is None else y.stride(0), groups, eps,
                WIDTH=width, BLOCK=block, HAS_Y=y is not None, num_warps=min(16, max(1, block // 512)), enable_fp_fusion=True,
            )  # fmt: skip
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Pieces`."""
        return self.add_norm(x, None, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Pieces`; in place."""
        rows, num_heads, dim = heads.shape
        half, block = cos.shape[-1], _power_of_two(cos.shape[-1])
        block_h = min(_power_of_two(num_heads), max(1, _HEADS_ELEMENTS // block))
        pieces.rotate[(rows, -(-num_heads // block_h))](
            heads, cos, sin, heads.stride(0), num_heads,
            HEAD_DIM=dim, HALF=half, BLOCK_H=block_h, BLOCK=block, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        return heads

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Pieces`; rows are contiguous."""
        return _gated(gate_up, gelu=False)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """See `Pieces`; rows are contiguous."""
        return _gated(gate_up, gelu=True)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """See `Pieces`; x is contiguous."""
        if x.numel():
            pieces.softcap[(-(-x.numel() // _BLOCK),)](x, x.numel(), cap, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True)
        return x


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    pieces.gated[(rows, -(-width // _BLOCK))](gate_up, out, width, GELU=gelu, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True)
    return out


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
