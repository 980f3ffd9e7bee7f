"""The layers of a decoder in one native call a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dataplane.model.architecture import Architecture, LayerForm
from dataplane.model.attention import Attention
from dataplane.model.layers import Rotary
from dataplane.model.linear import NativeLinear
from dataplane.model.native_attention import NativeAttention
from dataplane.model.rope import Rope
from dataplane.model.stack import DecoderLayer, LowRank
from kernels.native import Native
from kernels.native_low_rank import NativeLowRank

SITES = ("qkv", "o", "gate_up", "down")
PARTS = ("products", "attention", "adapters", "norms, rotation, activation")
"""What `seconds` tells apart, in the order of `Part` of cpp/layers.hpp."""


class LayerPlan(ctypes.Structure):
    """Mirrors `LayerPlan` of cpp/layers.hpp."""

    _fields_ = (
        ("products", ctypes.c_void_p * len(SITES)),
        ("attention_norm", ctypes.c_void_p),
        ("qk_norm", ctypes.c_void_p),
        ("post_attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("post_mlp_norm", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("half", ctypes.c_int64),
        ("window", ctypes.c_int64),
    )


class StackPlan(ctypes.Structure):
    """Mirrors `StackPlan` of cpp/layers.hpp."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("norms_are_float", ctypes.c_int64),
        ("is_gelu", ctypes.c_int64),
        ("seconds", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


class StackStep(ctypes.Structure):
    """Mirrors `StackStep` of cpp/layers.hpp."""

    _fields_ = (
        ("attention", ctypes.c_void_p),
        ("low_rank", ctypes.c_void_p * len(SITES)),
        ("epilogue", ctypes.c_void_p * len(SITES)),
        ("positions", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("narrow", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


def takes(layers: Sequence[DecoderLayer]) -> bool:
    """Returns whether `NativeStack` runs these layers: all products are native. Elsewhere a library multiplies faster."""
    return all(isinstance(getattr(layer, site), NativeLinear) for layer in layers for site in SITES)


class NativeStack:
    """Runs all layers in one call of `cpu.cpp`, by one team of threads; see `Stack`.

    Attention and low-rank part are the native ones. The bits are those of `PieceStack` with native pieces: it is the same code.
    Owned by the step loop, as its buffers are; they grow to the largest step.

    Attributes:
        layers: Their weights, in order.
        rotaries: A position table for each set of rotary parameters that a layer has.

    Args:
        form: The architecture.
        layers: Weights; `takes` must hold.
        rotaries: A position table for each set of rotary parameters that a layer has.
        native: The library.
        dtype: Of the model.
    """

    def __init__(
        self,
        form: Architecture,
        layers: tuple[DecoderLayer, ...],
        rotaries: Mapping[Rope, Rotary],
        *,
        native: Native,
        dtype: torch.dtype,
    ) -> None:
        self.layers, self.rotaries = layers, rotaries
        self._function = native.function("layers", dtype)
        self._plans = (LayerPlan * len(layers))(*map(self._plan, layers, form.layers))
        self._seconds = (ctypes.c_double * len(PARTS))()
        self._stack = StackPlan(
            layers=ctypes.addressof(self._plans),
            num_layers=len(layers),
            hidden=form.hidden,
            inner=form.intermediate,
            norms_are_float=layers[0].attention_norm.dtype is torch.float32,
            is_gelu=form.activation == "gelu_tanh",
            seconds=ctypes.addressof(self._seconds),
            eps=form.norm_eps,
        )
        self._narrow_size = max(form.hidden, form.q_size, form.intermediate)
        self._wide_size = max(form.q_size + 2 * form.kv_size, 2 * form.intermediate)
        self._narrow = self._wide = torch.empty(0, dtype=dtype)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part of the layers, of all steps so far."""
        return dict(zip(PARTS, self._seconds, strict=True))

    def run(self, x: Tensor, positions: Tensor, attention: Attention, low_rank: LowRank) -> Tensor | None:
        """See `Stack`; the result is a buffer of its own, x is contiguous."""
        assert isinstance(attention, NativeAttention), "forms are chosen together"
        rows = x.shape[0]
        if self._narrow.shape[0] < rows:
            self._narrow, self._wide = (x.new_empty(rows, size) for size in (self._narrow_size, self._wide_size))
        y = torch.empty_like(x)
        step = StackStep(
            attention=attention.address,
            positions=positions.data_ptr(),
            x=x.data_ptr(),
            y=y.data_ptr(),
            narrow=self._narrow.data_ptr(),
            wide=self._wide.data_ptr(),
            rows=rows,
            threads=torch.get_num_threads(),
        )
        if isinstance(low_rank, NativeLowRank):
            step.low_rank = _each(low_rank.address)
            step.epilogue = _each(low_rank.epilogue.address)
        self._function(ctypes.addressof(self._stack), ctypes.addressof(step))
        return y

    def _plan(self, layer: DecoderLayer, form: LayerForm) -> LayerPlan:
        rotary = None if form.rope is None else self.rotaries[form.rope]
        return LayerPlan(
            products=_each(lambda site: getattr(layer, site).address),
            attention_norm=_address(layer.attention_norm),
            qk_norm=_address(layer.qk_norm),
            post_attention_norm=_address(layer.post_attention_norm),
            mlp_norm=_address(layer.mlp_norm),
            post_mlp_norm=_address(layer.post_mlp_norm),
            cosines=_address(None if rotary is None else rotary.cos),
            sines=_address(None if rotary is None else rotary.sin),
            half=0 if rotary is None else rotary.cos.shape[-1],
            window=form.window or 0,
        )


def _each(address: Callable[[str], int | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(SITES))(*map(address, SITES))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
