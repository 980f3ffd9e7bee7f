"""The paged KV tensor and attention over it: the torch form, behind the interface that faster forms share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dataplane.model.architecture import Architecture
from dataplane.model.batch import Batch, Chunk
from dataplane.model.layers import softcap


class PagedKv:
    """Keys and values of all sequences, `[pages, layers, 2, page_size, kv_heads, head_dim]`.

    One page is contiguous over all layers, so handing a page out clears it with one fill and moving it is one copy; inside,
    tokens are the outer axis, so that a gather of pages is already the `[sequence, token, head, dim]` that attention reads,
    without another transposing copy, and appending a token writes one run of memory.

    That is the order of `TorchAttention`. Another form of attention may keep its own inside the last three axes, a block: it
    alone reads and writes them.

    Page 0 belongs to nobody and stays zero: page tables are padded with it.

    Attributes:
        data: The whole tensor; the runner's step thread is the only one that writes.
        page_size: Tokens in a page.
    """

    def __init__(self, config: Architecture, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (num_pages, config.num_layers, 2, page_size, config.num_kv_heads, config.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size
        self._num_layers = config.num_layers

    @property
    def rows(self) -> Tensor:
        """View [pages · layers · 2 · page_size, kv_heads, head_dim]: one row a token, layer and kind."""
        return self.data.view(-1, *self.data.shape[4:])

    @property
    def blocks(self) -> Tensor:
        """View [pages · layers · 2, page_size · kv_heads · head_dim]: one block a page, layer and kind."""
        return self.data.view(-1, self.data[0, 0, 0].numel())

    @property
    def rows_per_page(self) -> int:
        """Rows of `rows` from one page to the next."""
        return self._num_layers * 2 * self.page_size

    def row_of(self, page: int, offset: int) -> int:
        """Returns the row in `rows` of the key at layer 0 of a token; layer l and value lie `(2·l + 1) · page_size` further."""
        return page * self.rows_per_page + offset

    def clear(self, pages: Tensor) -> None:
        """Zeroes pages (int64 [n]) that are handed out: what a former owner left there, NaN included, reaches nobody."""
        self.data.index_fill_(0, pages, 0)


class Attention(Protocol):
    """Appends the step's keys and values to the cache and attends over it."""

    def begin_step(self, batch: Batch) -> None:
        """Prepares what all layers share."""

    def __call__(self, qk: Tensor, v: Tensor, *, layer: int) -> Tensor:
        """Attends at one layer.

        Args:
            qk: [T, heads + kv_heads, head_dim], rotated queries, then rotated keys; may be a strided view.
            v: [T, kv_heads, head_dim]; may be a strided view.
            layer: The layer.

        Returns:
            [T, heads · head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks that are attended to together: several of equal length without context, or one with context.

    Attributes:
        first_row: Row of the batch at which the first starts; the others follow without a gap.
        num_chunks: Chunks.
        num_rows: Rows of each.
        blocks: int64 [layers, 2, pages] of the cache that hold context and chunk; None without context.
        masks: For each window, [rows, tokens of those pages] or, without context, [rows, rows]; None where causality is all.
    """

    first_row: int
    num_chunks: int
    num_rows: int
    blocks: Tensor | None
    masks: dict[int | None, Tensor | None]


class TorchAttention:
    """Attention from PyTorch's own operations.

    Decode rows go together: their pages are gathered by table and attended to in one masked product, in which the query heads
    that share a key head stand where a sequence of queries would (grouped-query attention without repeated keys). Prefill
    chunks that have context go one by one, others of equal length together. The mask replaces scores (−inf is selected, nothing
    is multiplied), and values behind it are zeros or the sequence's own. A layer's window is part of the mask: pages before it
    are read all the same.
    """

    def __init__(self, config: Architecture, kv: PagedKv) -> None:
        self._config = config
        self._rows, self._blocks = kv.rows, kv.blocks
        self._page_size = kv.page_size
        self._scale, self._softcap = config.attention_scale, config.attention_softcap
        self._windows = list(dict.fromkeys(layer.window for layer in config.layers))
        kinds = torch.arange(config.num_layers * 2, device=kv.data.device).view(config.num_layers, 2, 1)
        self._block_offsets = kinds
        self._row_offsets = kinds * kv.page_size
        self._blocks_per_page = config.num_layers * 2

    def begin_step(self, batch: Batch) -> None:
        """Computes the cache rows, the page lists and the masks that every layer uses."""
        self._batch = batch
        self._append_at = batch.kv_rows + self._row_offsets
        if batch.num_decode:
            self._decode_blocks = batch.decode_pages.flatten() * self._blocks_per_page + self._block_offsets
            lengths, num_tokens = batch.decode_lengths[:, None], batch.decode_pages.shape[1] * self._page_size
            self._decode_masks = {window: self._mask(lengths, num_tokens, window)[:, None, None, :] for window in self._windows}
        self._groups = self._group(batch.chunks)

    def __call__(self, qk: Tensor, v: Tensor, *, layer: int) -> Tensor:
        """See `Attention`."""
        config, batch = self._config, self._batch
        q, k = qk[:, : config.num_heads], qk[:, config.num_heads :]
        self._rows.index_copy_(0, self._append_at[layer, 0], k)
        self._rows.index_copy_(0, self._append_at[layer, 1], v)
        if batch.num_decode == q.shape[0]:
            return self._decode(q, layer)
        out = torch.empty(q.shape[0], config.q_size, dtype=q.dtype, device=q.device)
        if batch.num_decode:
            out[: batch.num_decode] = self._decode(q[: batch.num_decode], layer)
        for group in self._groups:
            shape = (group.num_chunks, group.num_rows)
            rows = slice(group.first_row, group.first_row + group.num_chunks * group.num_rows)
            if group.blocks is None:
                keys, values = k[rows].unflatten(0, shape), v[rows].unflatten(0, shape)
            else:
                keys, values = self._gather(group.blocks[layer], 1)
            out[rows] = self._attend(q[rows].unflatten(0, shape), keys, values, group.masks[config.layers[layer].window])
        return out

    def _decode(self, q: Tensor, layer: int) -> Tensor:
        config = self._config
        num = q.shape[0]
        keys, values = self._gather(self._decode_blocks[layer], num)
        grouped = q.reshape(num, config.num_kv_heads, -1, config.head_dim)
        mask = self._decode_masks[config.layers[layer].window]
        out = self._product(grouped, keys.transpose(1, 2), values.transpose(1, 2), mask)
        return out.reshape(num, config.q_size)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        out = self._product(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask)
        return out.transpose(1, 2).reshape(-1, self._config.q_size)

    def _product(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Returns softmax(scores) · values for [sequences, heads, rows, head_dim]; without a mask, causally."""
        if self._softcap is None:
            causal, gqa = mask is None, q.shape[1] != keys.shape[1]
            return F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, is_causal=causal, scale=self._scale, enable_gqa=gqa
            )
        grouped = q.unflatten(1, (keys.shape[1], -1))
        scores = softcap(grouped @ keys.unsqueeze(2).transpose(-1, -2) * self._scale, self._softcap)
        assert mask is not None, "a softcap is given masks for all chunks"
        scores += mask if mask.dim() == 2 else mask.unsqueeze(2)
        shares = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        return (shares @ values.unsqueeze(2)).flatten(1, 2)

    def _gather(self, blocks: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values [sequences, tokens of all their pages, kv_heads, head_dim]."""
        config = self._config
        gathered = self._blocks.index_select(0, blocks.flatten())
        keys, values = gathered.view(2, num_sequences, -1, config.num_kv_heads, config.head_dim)
        return keys, values

    def _group(self, chunks: tuple[Chunk, ...]) -> list[_Group]:
        groups: list[_Group] = []
        for chunk in chunks:
            if chunk.context:
                num_tokens = chunk.pages.shape[0] * self._page_size
                blocks = chunk.pages * self._blocks_per_page + self._block_offsets
                groups.append(_Group(chunk.first_row, 1, chunk.num_rows, blocks, self._masks(chunk, num_tokens)))
            elif groups and groups[-1].blocks is None and groups[-1].num_rows == chunk.num_rows:
                last = groups.pop()
                groups.append(_Group(last.first_row, last.num_chunks + 1, last.num_rows, None, last.masks))
            else:
                groups.append(_Group(chunk.first_row, 1, chunk.num_rows, None, self._masks(chunk, chunk.num_rows)))
        return groups

    def _masks(self, chunk: Chunk, num_tokens: int) -> dict[int | None, Tensor | None]:
        """Returns the mask of a chunk over its first tokens for each window; None where PyTorch's own causal form will do."""
        ends = torch.arange(chunk.context + 1, chunk.context + 1 + chunk.num_rows, device=chunk.pages.device)[:, None]

        def is_plain(window: int | None) -> bool:
            return not chunk.context and self._softcap is None and (window is None or window >= chunk.num_rows)

        return {window: None if is_plain(window) else self._mask(ends, num_tokens, window) for window in self._windows}

    def _mask(self, lengths: Tensor, num_tokens: int, window: int | None) -> Tensor:
        """Returns [..., tokens] in the cache's dtype: 0 for the last `window` tokens before `lengths`, −inf elsewhere."""
        tokens = torch.arange(num_tokens, device=lengths.device)
        hidden = tokens >= lengths
        if window is not None:
            hidden |= tokens < lengths - window
        mask = torch.zeros(lengths.shape[0], num_tokens, dtype=self._blocks.dtype, device=lengths.device)
        return mask.masked_fill_(hidden, float("-inf"))
