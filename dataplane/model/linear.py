"""One frozen weight matrix, packed once for the machine that multiplies with it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.huge_pages import HugePages
from kernels.native import Native, Weight

Linear = Callable[[Tensor], Tensor]
"""Maps x [T, in] to x Wᵀ + b [T, out], in the dtype of x."""

_BLOCK_COLUMNS = 48
"""Columns of a block of weights in the native form; `COLUMNS` of cpu.cpp."""

_PACK_ROWS = 64
"""Row count that oneDNN is asked to choose the packed layout for; other counts use the same layout."""


def pack_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    native: Native | None = None,
    pages: HugePages | None = None,
    invariant: bool = False,
) -> Linear:
    """Takes a weight [out, in] and perhaps a bias [out], and returns the product with them.

    bfloat16 on a CPU that multiplies pairs but has no matrix unit uses the native form, when one is given: in it a row's bits do
    not depend on the number of rows. Milliseconds at 64 / 8 / 1 rows of [3072, 576], two threads of a Zen 4, weights from memory:
    0.52 / 0.091 / 0.058 against 0.70 / 0.17 / 0.16 of oneDNN; 0.48 / 0.060 / 0.055 are what its arithmetic and memory allow.

    Otherwise bfloat16 on the CPU uses oneDNN's own blocked layout, made once: PyTorch's public `linear` would rearrange the
    weight at every call. That layout is private to this module; the original tensor need not be kept. Everything else is plain
    `linear`.
    The choice depends on dtype, device and machine only, so it is one choice for the whole model and process. `invariant` takes
    the native form in every dtype and on every machine, where others are faster too.
    """
    if native is not None and invariant:
        return NativeLinear(weight, native, bias, pages=pages)
    if native is not None and native.has_best_product and weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0:
        return NativeLinear(weight, native, bias, pages=pages)
    if weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and _has_packed_bf16():
        return _Packed(weight, bias)
    return PlainLinear(weight, bias)


def _has_packed_bf16() -> bool:
    mkldnn = torch.backends.mkldnn
    return (
        mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class NativeLinear:
    """The product of `cpu.cpp`: weights in blocks of 48 columns, in words of 4 bytes along the input.

    Attributes:
        address: Of the `Weight` that native code reads; valid as long as this object lives.
        out_features: Columns of the product.

    Args:
        weight: bfloat16 or float32 [out, in] on the CPU; in is even for bfloat16.
        native: The library.
        bias: [out], added to what is already rounded; None without.
        pages: Memory for the packed weight; None for its own.
    """

    def __init__(self, weight: Tensor, native: Native, bias: Tensor | None = None, *, pages: HugePages | None = None) -> None:
        self._function = native.function("linear", weight.dtype)
        width, depth = weight.shape
        blocks, parts = -(-width // _BLOCK_COLUMNS), 4 // weight.element_size()
        padded = F.pad(weight, (0, 0, 0, blocks * _BLOCK_COLUMNS - width))
        packed = padded.view(blocks, _BLOCK_COLUMNS, depth // parts, parts).transpose(1, 2)
        self._memory = (pages or HugePages()).copy(packed), bias
        self._weight = Weight(self._memory[0].data_ptr(), None if bias is None else bias.data_ptr(), depth, width)
        self.address, self.out_features = ctypes.addressof(self._weight), width

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product with x, [T, in], whose rows may lie apart."""
        rows = x.shape[0]
        y = torch.empty(rows, self.out_features, dtype=x.dtype)
        self._function(self.address, x.data_ptr(), x.stride(0), y.data_ptr(), rows, torch.get_num_threads())
        return y


class PlainLinear:
    """The library's product.

    Attributes:
        weight: [out, in].
        bias: [out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product with x, [T, in]."""
        return F.linear(x, self.weight, self.bias)


class _Packed:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return y
