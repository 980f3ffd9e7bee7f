"""The step's lists of attention work: splits of rows that decode, and tiles of chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.gpu.attention_tiles import MAX_SPLITS

Int32 = npt.NDArray[np.int32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Consecutive rows of one sequence.

    Attributes:
        first_row: Row of the batch at which they start.
        num_rows: How many.
        context: Tokens of the sequence before them, already in the cache.
        pages: int64 [pages that hold context and rows].
    """

    first_row: int
    num_rows: int
    context: int
    pages: Integers


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """One step as attention sees it: rows [0, D) decode, chunks follow.

    Attributes:
        kv_rows: int64 [T], cache row of each token at layer 0; negative where none is to be written.
        lengths: int64 [D], tokens of each sequence with this one; 0 for a row that pads, which gets zeros.
        pages: int64 [D, widest], padded with any page.
        chunks: The other rows.
    """

    kv_rows: Integers
    lengths: Integers
    pages: Integers
    chunks: Sequence[ChunkRows]

    def as_chunks(self) -> AttentionRows:
        """Returns the same step with each row that decodes as a chunk of one row; rows of length 0 are left out."""
        lengths = self.lengths.tolist()
        single = [
            ChunkRows(i, 1, length - 1, pages)
            for i, (length, pages) in enumerate(zip(lengths, self.pages, strict=True))
            if length
        ]
        return AttentionRows(self.kv_rows, self.lengths[:0], self.pages[:0], [*single, *self.chunks])


@dataclass(frozen=True, slots=True)
class Prompts:
    """Chunks without a context whose rows follow each other in the batch.

    Attributes:
        first_row: Row of the batch at which they start.
        counts: Rows of each.
    """

    first_row: int
    counts: list[int]

    @property
    def starts(self) -> list[int]:
        """Where each starts, from the first row, and where the last ends."""
        return list(itertools.accumulate(self.counts, initial=0))


@dataclass(frozen=True, slots=True)
class AttentionItems:
    """The lists; indices are as the kernels read them.

    Attributes:
        rows: int32 [D, 4]: tokens of the sequence, tokens of a split, first entry of `pages`, 0.
        items: int32 [splits], row · MAX_SPLITS + split; all splits of a row follow each other.
        tiles: int32 [tiles, 4]: first row, rows, position of the first row, first entry of `pages`; longest work first.
        pages: int64, the pages of all sequences.
    """

    rows: Int32
    items: Int32
    tiles: Int32
    pages: Integers


def without_prompts(step: AttentionRows) -> tuple[AttentionRows, list[Prompts]]:
    """Returns a step without its chunks that have no context, and these; which they are follows from each chunk alone."""
    prompts: list[Prompts] = []
    for chunk in (chunk for chunk in step.chunks if chunk.context == 0):
        if prompts and prompts[-1].first_row + prompts[-1].starts[-1] == chunk.first_row:
            prompts[-1].counts.append(chunk.num_rows)
        else:
            prompts.append(Prompts(chunk.first_row, [chunk.num_rows]))
    return replace(step, chunks=[chunk for chunk in step.chunks if chunk.context]), prompts


def split_tokens(lengths: Integers, least: int) -> Integers:
    """Returns the tokens of a split for each length: `least`, doubled until MAX_SPLITS splits are enough."""
    tokens = np.full_like(lengths, least)
    while (short := tokens * MAX_SPLITS < lengths).any():
        tokens[short] *= 2
    return tokens


def build_attention_items(step: AttentionRows, *, least_split: int, tile_rows: int) -> AttentionItems:
    """Builds the lists of a step.

    Args:
        step: The step.
        least_split: Fewest tokens of a split.
        tile_rows: Rows of a tile.
    """
    num_rows, width = step.pages.shape
    rows = np.zeros((num_rows, 4), dtype=np.int32)
    tokens = split_tokens(step.lengths, least_split)
    rows[:, 0], rows[:, 1], rows[:, 2] = step.lengths, tokens, np.arange(num_rows) * width
    counts = np.maximum(-(-step.lengths // tokens), 1)
    firsts = np.cumsum(counts) - counts
    items = np.repeat(np.arange(num_rows) * MAX_SPLITS - firsts, counts) + np.arange(counts.sum())
    start = num_rows * width
    tiles: list[npt.NDArray[Any]] = []
    for chunk in step.chunks:
        offsets = np.arange(0, chunk.num_rows, tile_rows)
        tile = np.empty((offsets.size, 4), dtype=np.int32)
        tile[:, 0], tile[:, 2], tile[:, 3] = chunk.first_row + offsets, chunk.context + offsets, start
        tile[:, 1] = np.minimum(chunk.num_rows - offsets, tile_rows)
        tiles.append(tile)
        start += chunk.pages.size
    listed = np.concatenate(tiles) if tiles else np.empty((0, 4), dtype=np.int32)
    return AttentionItems(
        rows=rows,
        items=items.astype(np.int32),
        tiles=listed[np.argsort(-(listed[:, 1] + listed[:, 2]), kind="stable")],
        pages=np.concatenate((step.pages.ravel(), *(chunk.pages for chunk in step.chunks))),
    )
