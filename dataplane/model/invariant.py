"""The torch form in fixed shapes: a row's bits depend on that row alone (`batch_invariant`).

PyTorch's products and vectorised loops choose how they add up, and where their scalar tails lie, by the number of rows. Here
every product and every piece sees tiles of `TILE` rows, the last one padded with zeros, and every row attends by itself to
exactly the tokens that it sees. `kernels.tiled_low_rank` does the same for adapters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv, TorchAttention
from dataplane.model.batch import Batch
from dataplane.model.linear import Linear
from dataplane.model.pieces import TorchPieces

TILE = 64
"""Rows that are computed together: the one bucket of this form."""


def in_tiles(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Applies a function of rows to tiles of `TILE` rows and returns its rows in order.

    Args:
        function: Maps tensors of `TILE` rows to one.
        rows: Tensors of equally many rows, [T, ...].
    """
    count = rows[0].shape[0]
    tiles = [F.pad(each, (0, 0) * (each.dim() - 1) + (0, -count % TILE)).split(TILE) for each in rows]
    return torch.cat([function(*tile) for tile in zip(*tiles, strict=True)])[:count]


class TiledPieces(TorchPieces):
    """`TorchPieces` tile by tile. What lies in a row's neighbours, or in how many there are, changes no bit of it."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See `Pieces`."""
        product = super().pack(weight, bias)
        return lambda x: in_tiles(product, x)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Pieces`."""
        return in_tiles(lambda tile: super(TiledPieces, self).norm(tile, weight, eps), x)

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See `Pieces`; a single sum is rounded the same everywhere."""
        if y is not None:
            x += y
        return self.norm(x, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Pieces`; a new tensor."""
        return in_tiles(super().rotate, heads, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Pieces`."""
        return in_tiles(super().silu_mul, gate_up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """See `Pieces`."""
        return in_tiles(super().gelu_tanh_mul, gate_up)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """See `Pieces`; a new tensor."""
        return in_tiles(lambda tile: super(TiledPieces, self).softcap(tile, cap), x)


class RowAttention(TorchAttention):
    """Attention of every row by itself, over exactly the tokens that it sees; the cache is ordered as in `TorchAttention`."""

    def __init__(self, config: Architecture, kv: PagedKv) -> None:
        super().__init__(config, kv)
        self._no_mask = torch.zeros(1, 1, dtype=kv.data.dtype, device=kv.data.device)

    def begin_step(self, batch: Batch) -> None:
        """Lists the pages and the length of every row."""
        self._batch = batch
        self._append_at = batch.kv_rows + self._row_offsets
        of_rows = list(zip(batch.decode_pages, batch.decode_lengths.tolist(), strict=True))
        for chunk in batch.chunks:
            of_rows += [(chunk.pages, chunk.context + 1 + i) for i in range(chunk.num_rows)]
        self._of_rows = [
            (pages[: -(-length // self._page_size)] * self._blocks_per_page + self._block_offsets, length)
            for pages, length in of_rows
        ]

    def __call__(self, qk: Tensor, v: Tensor, *, layer: int) -> Tensor:
        """See `Attention`."""
        config = self._config
        self._rows.index_copy_(0, self._append_at[layer, 0], qk[:, config.num_heads :])
        self._rows.index_copy_(0, self._append_at[layer, 1], v)
        window = config.layers[layer].window
        out = torch.empty(len(qk), config.q_size, dtype=qk.dtype, device=qk.device)
        for t, (blocks, length) in enumerate(self._of_rows):
            keys, values = self._gather(blocks[layer], 1)
            seen = slice(0 if window is None else max(0, length - window), length)
            q = qk[t, : config.num_heads].reshape(1, config.num_kv_heads, -1, config.head_dim)
            mask = self._no_mask.expand(1, seen.stop - seen.start)
            out[t] = self._product(q, keys[:, seen].transpose(1, 2), values[:, seen].transpose(1, 2), mask).flatten()
        return out
