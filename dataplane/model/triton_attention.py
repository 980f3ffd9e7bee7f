"""Attention over pages on a GPU, behind the interface that all forms share."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv
from dataplane.model.batch import Batch
from kernels.gpu.attention import Heads, PagedAttention
from kernels.gpu.attention_items import AttentionRows, ChunkRows
from kernels.gpu.attention_trial import choose_library
from kernels.gpu.device import Gpu
from kernels.gpu.trial import Clock


class TritonAttention:
    """Attention by the Triton kernels; the interface is `Attention`, the cache is ordered as in `TorchAttention`.

    A captured graph of `__call__` stays valid over steps that have the same kinds of rows, see `PagedAttention`; `begin_step`
    runs outside of it.

    Args:
        config: The model.
        kv: The cache.
        gpu: What the device can do, from `kernels.gpu.device.probe`.
        max_rows: Most rows of a step.
        max_sequences: Most sequences of a step.
        max_context: Most tokens of a sequence.
        batch_invariant: One form for all rows, so that their bits depend on their own sequences alone.

    Raises:
        UnsupportedAttentionError: Head dimension or page size.
    """

    def __init__(
        self,
        config: Architecture,
        kv: PagedKv,
        *,
        gpu: Gpu,
        max_rows: int,
        max_sequences: int,
        max_context: int,
        batch_invariant: bool = False,
    ) -> None:
        heads = Heads(
            config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale, softcap=config.attention_softcap
        )
        self._heads, self._kv, self._gpu = heads, kv, gpu
        self._paged = PagedAttention(
            kv.data,
            heads,
            gpu=gpu,
            max_rows=max_rows,
            max_sequences=max_sequences,
            max_context=max_context,
            batch_invariant=batch_invariant,
        )
        self._windows = [layer.window for layer in config.layers]

    @property
    def scratch_bytes(self) -> int:
        """Memory on the device beside the cache; known without any where the cache is on the device `meta`."""
        return self._paged.scratch_bytes

    def try_library(self, clock: Clock) -> None:
        """Lets a library attend to chunks without a context if one is right and faster; before anything is served."""
        cache = self._kv.data
        library = choose_library(self._heads, gpu=self._gpu, dtype=cache.dtype, device=cache.device, clock=clock)
        if library is not None:
            self._paged.use(library)

    def begin_step(self, batch: Batch) -> None:
        """Lists the step's work on the host and sends it to the device."""
        host = batch.host or batch
        chunks = [ChunkRows(chunk.first_row, chunk.num_rows, chunk.context, chunk.pages.numpy()) for chunk in host.chunks]
        self._paged.begin_step(
            AttentionRows(
                kv_rows=np.ascontiguousarray(host.kv_rows.numpy()),
                lengths=host.decode_lengths.numpy(),
                pages=host.decode_pages.numpy(),
                chunks=chunks,
            )
        )

    def __call__(self, qk: Tensor, v: Tensor, *, layer: int) -> Tensor:
        """See `Attention`; rows of qk and v may lie apart (a view of the fused projection), a row's heads may not."""
        return self._paged(qk, v, layer=layer, window=self._windows[layer])
