"""Low-rank rows outside the layers: on the token embedding and on the head, for the adapters that have any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

EMBED, HEAD = 0, 1
"""Places of the two edges of a model, where a layer has its slices."""

_TILE = 16


@dataclass(frozen=True, slots=True)
class Edge:
    """Where the pair of one edge lies in the arena.

    Attributes:
        a_offset: First element of A, [rank, K]; on the embedding K is the vocabulary.
        b_offset: First element of B transposed, [rank, N]; on the head N is the vocabulary.
        rank: Rank rows.
        scale: Factor of B A x.
    """

    a_offset: int
    b_offset: int
    rank: int
    scale: float


class Edges:
    """Adds what the adapters of a step's rows contribute to embedded tokens and to logits, in place.

    `x[t] += scale · A[:, id_t] B` and `logits[t] += (scale · h[t] Aᵀ) B`; the scale is applied in float32, and what B
    multiplies is rounded to the model's dtype, as in the layers. The rows of one adapter go in tiles of 16, padded with
    zeros, so that a row's bits depend on that row and its own adapter alone. Adapters go one by one: the work follows those
    that have an edge, and a step without such rows does nothing. Where each row goes is worked out in host memory, so nothing
    waits for a device; what goes there is the numbers of a tile's rows.

    Owned by the step loop; not thread-safe.

    Args:
        arena: 1-D, of the model's dtype; on the CPU or a device, like all tensors but those that are said to be in host memory.
        table: The edges of each slot, by EMBED and HEAD. The arena writes it, this reads it.
        hidden: Width of the residual stream.
        vocab_size: Rows of the embedding.
    """

    def __init__(self, arena: torch.Tensor, table: Mapping[int, Mapping[int, Edge]], *, hidden: int, vocab_size: int) -> None:
        self._arena, self._table = arena, table
        self._hidden, self._vocab_size = hidden, vocab_size
        self._row_slot = np.empty(0, dtype=np.int32)
        self._is_active = False

    def is_needed(self, row_slot: npt.NDArray[np.int32]) -> bool:
        """Whether a step whose rows have these slots, int32 [T], has work here."""
        return bool(self._table) and not self._table.keys().isdisjoint(row_slot.tolist())

    def begin_step(self, row_slot: npt.NDArray[np.int32]) -> None:
        """Takes the slots of the step's rows, int32 [T]."""
        self._row_slot = row_slot
        self._is_active = self.is_needed(row_slot)

    def embed_(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        """Adds to x, [T, hidden], embedded tokens before any factor; ids are int64 [T]."""
        for edge, rows in self._tiles(EMBED, self._row_slot):
            a = self._matrix(edge.a_offset, edge.rank, self._vocab_size)
            self._expand(x, rows, a[:, ids[rows]].t(), edge, self._hidden)

    def head_(self, logits: torch.Tensor, h: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Adds to logits, [S, vocab], before any cap, what adapters make of the head's input h, [S, hidden].

        Args:
            logits: Of the base.
            h: What they are made of.
            rows: int64 [S] in host memory, their rows in the step; None for all rows in order.
        """
        if not self._is_active:
            return
        row_slot = self._row_slot if rows is None else self._row_slot[rows.numpy()]
        for edge, tile in self._tiles(HEAD, row_slot):
            a = self._matrix(edge.a_offset, edge.rank, self._hidden)
            shrunk = F.linear(F.pad(h[tile], (0, 0, 0, _TILE - len(tile))), a)[: len(tile)]
            self._expand(logits, tile, shrunk, edge, self._vocab_size)

    def _tiles(self, kind: int, row_slot: npt.NDArray[np.int32]) -> Iterator[tuple[Edge, torch.Tensor]]:
        if not self._is_active:
            return
        for slot in np.unique(row_slot).tolist():
            edge = self._table.get(slot, {}).get(kind)
            if edge is not None:
                for rows in torch.from_numpy(np.flatnonzero(row_slot == slot)).split(_TILE):
                    yield edge, rows.to(self._arena.device, non_blocking=True)

    def _expand(self, y: torch.Tensor, rows: torch.Tensor, shrunk: torch.Tensor, edge: Edge, width: int) -> None:
        h = (shrunk.float() * edge.scale).to(y.dtype)
        y[rows] += (F.pad(h, (0, 0, 0, _TILE - len(rows))) @ self._matrix(edge.b_offset, edge.rank, width))[: len(rows)]

    def _matrix(self, offset: int, rank: int, width: int) -> torch.Tensor:
        return self._arena[offset : offset + rank * width].view(rank, width)
