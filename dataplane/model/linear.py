"""One frozen weight matrix, packed once for the machine that multiplies with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""Maps x [T, in] to x Wᵀ + b [T, out], in the dtype of x."""

_PACK_ROWS = 64
"""Row count that oneDNN is asked to choose the packed layout for; other counts use the same layout."""


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Takes a weight [out, in] and perhaps a bias [out], and returns the product with them.

    bfloat16 on the CPU uses oneDNN's own blocked layout, made once: PyTorch's public `linear` would rearrange the weight at every
    call. That layout is private to this module; the original tensor need not be kept. Everything else is plain `linear`.
    The choice depends on dtype, device and machine only, so it is one choice for the whole model and process.
    """
    if weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and _has_packed_bf16():
        return _Packed(weight, bias)
    return _Plain(weight, bias)


def _has_packed_bf16() -> bool:
    mkldnn = torch.backends.mkldnn
    return (
        mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class _Plain:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class _Packed:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return y
