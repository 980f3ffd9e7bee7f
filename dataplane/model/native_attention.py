"""Attention over pages in the native CPU form."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv
from dataplane.model.batch import Batch
from kernels.native import Native, NativeFormError

PAGE_SIZE = 16
_MAX_HEAD_DIM = 256


class AttentionStep(ctypes.Structure):
    """Mirrors `AttentionStep` of cpu.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kv_rows", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


def check_shapes(config: Architecture, *, page_size: int) -> None:
    """Refuses what `cpu.cpp` does not attend to.

    Raises:
        NativeFormError: Page size or head dimension.
    """
    if page_size != PAGE_SIZE:
        raise NativeFormError(f"the native CPU form has pages of {PAGE_SIZE} tokens, not of {page_size}")
    if config.head_dim % 16 or config.head_dim > _MAX_HEAD_DIM:
        raise NativeFormError(
            f"the native CPU form has head dimensions that are multiples of 16 up to {_MAX_HEAD_DIM}, not {config.head_dim}"
        )


class NativeAttention:
    """Attention by `cpu.cpp`, which reads pages where they lie; the interface is `Attention`.

    It has an order of its own inside each block of the cache (a page, layer and kind): by key head, then for keys
    `[dim / parts, token, part]`, for values `[token / parts, dim, part]`, where a part is one of the 4 / item size neighbours
    that the processor's pair product takes at once. Queries that share pages walk them together, six at a time: the heads of a
    group for a decode row, rows and heads for a chunk. Contexts longer than 512 tokens are attended to in splits of that length,
    whose results are merged in order, by all threads when there are few rows. Tokens behind a row's own are not read, and neither
    are pages that lie before the window of all rows that walk together.

    Attributes:
        address: Of the `AttentionStep` that native code reads; its contents are those of the step that began last.

    Raises:
        NativeFormError: Page size, head dimension or dtype that `cpu.cpp` does not have.
    """

    def __init__(self, config: Architecture, kv: PagedKv, *, native: Native) -> None:
        check_shapes(config, page_size=kv.page_size)
        self._function = native.function("attention", kv.data.dtype)
        self._kv, self._q_size, self._num_heads = kv, config.q_size, config.num_heads
        self._step = AttentionStep(
            data=kv.data.data_ptr(),
            num_layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap or 0.0,
        )
        self._windows = [layer.window or 0 for layer in config.layers]
        self.address = ctypes.addressof(self._step)

    def begin_step(self, batch: Batch) -> None:
        """Lists the parts that are attended to: a part is the rows of one sequence."""
        self._batch = batch  # keeps the memory that the step points to
        num = batch.num_decode
        parts = np.empty((num + len(batch.chunks), 4), dtype=np.int64)
        if num:
            parts[:num, 0] = np.arange(num)
            parts[:num, 1] = 1
            parts[:num, 2] = batch.decode_lengths.numpy() - 1
            pages = batch.decode_pages
            parts[:num, 3] = pages.data_ptr() + np.arange(num) * (pages.stride(0) * pages.element_size())
        for index, chunk in enumerate(batch.chunks, start=num):
            parts[index] = (chunk.first_row, chunk.num_rows, chunk.context, chunk.pages.data_ptr())
        self._parts = parts
        step = self._step
        step.kv_rows, step.num_rows = batch.kv_rows.data_ptr(), batch.kv_rows.shape[0]
        step.parts, step.num_parts = parts.ctypes.data, len(parts)
        step.threads = torch.get_num_threads()

    def __call__(self, qk: Tensor, v: Tensor, *, layer: int) -> Tensor:
        """See `Attention`; rows of qk and v may lie apart (a view of the fused projection)."""
        out = torch.empty(qk.shape[0], self._q_size, dtype=qk.dtype)
        keys, values, window = qk.data_ptr(), v.data_ptr(), self._windows[layer]
        self._function(self.address, keys, qk.stride(0), values, v.stride(0), out.data_ptr(), layer, window)
        return out
