"""Sequences in a paged cache for the tests of attention, and the judge of what a form makes of their rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention_reference import attend, read_tokens
from kernels.gpu.attention import Heads, PagedAttention
from kernels.gpu.attention_items import AttentionRows, ChunkRows
from kernels.gpu.attention_tiles import AttentionTiles
from kernels.gpu.device import probe
from kernels.gpu.tiles import Launch
from tests.kernels.conftest import ROUNDOFF

NUM_LAYERS = 2
AROUND = 64  # rows
SMALL = AttentionTiles(256, 32, 64, 32, 32, Launch(4, 2), Launch(4, 2), waves=1)


@dataclass(frozen=True)
class Part:
    """Rows [start, start + count) of a sequence; one row decodes, several are a chunk."""

    sequence: int
    start: int
    count: int = 1


def heads_of(head_dim: int, group: int, *, softcap: float | None = None, num_kv_heads: int = 2) -> Heads:
    """Returns heads of which `group` share a key head."""
    return Heads(group * num_kv_heads, num_kv_heads, head_dim, scale=1.3 * head_dim**-0.5, softcap=softcap)


class Sequences:
    """Queries, keys and values of whole sequences, and a cache that holds what was appended and NaN everywhere else."""

    def __init__(self, heads: Heads, lengths: list[int], *, dtype: torch.dtype, page_size: int = 16, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.dtype, self.page_size, self.lengths = heads, dtype, page_size, lengths
        shape = (heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        self.rows = [torch.randn(length, *shape, generator=generator).to(dtype) for length in lengths]
        counts = [-(-length // page_size) for length in lengths]
        self.pages = list((torch.randperm(sum(counts), generator=generator) + 1).split(counts))
        shape = (sum(counts) + 1, NUM_LAYERS, 2, page_size, heads.num_kv_heads, heads.head_dim)
        self.cache = torch.full(shape, torch.nan, dtype=dtype)

    def attention(self, **options) -> PagedAttention:
        """Returns the form over this cache, every scratch value being NaN."""
        limits = {"max_rows": 160, "max_sequences": 12, "max_context": max(self.lengths), "tiles": SMALL}
        attention = PagedAttention(self.cache, self.heads, gpu=probe("cpu"), **{**limits, **options})
        for scratch in (attention._parts, attention._best, attention._totals):
            scratch.fill_(torch.nan)
        return attention

    def write(self, sequence: int, start: int, end: int, *, layer: int) -> None:
        """Puts tokens of a sequence into the cache, as earlier steps would have."""
        k, v = self.keys_values(sequence)
        for token in range(start, end):
            block = self.cache[self.pages[sequence][token // self.page_size], layer]
            block[0, token % self.page_size], block[1, token % self.page_size] = k[token], v[token]

    def keys_values(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [tokens, kv_heads, head_dim]."""
        first, last = self.heads.num_heads, self.heads.num_heads + self.heads.num_kv_heads
        return self.rows[sequence][:, first:last], self.rows[sequence][:, last:]

    def batch(self, parts: list[Part]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns qk and v of a step, views of one fused tensor."""
        fused = torch.cat([self.rows[part.sequence][part.start : part.start + part.count] for part in parts])
        last = self.heads.num_heads + self.heads.num_kv_heads
        return fused[:, :last], fused[:, last:]

    def step(self, parts: list[Part]) -> AttentionRows:
        """Returns a step of parts; single rows come first."""
        num_decode = next((i for i, part in enumerate(parts) if part.count > 1), len(parts))
        tables = [self.pages[part.sequence][: -(-(part.start + part.count) // self.page_size)].numpy() for part in parts]
        width = max((table.size for table in tables[:num_decode]), default=0)
        pages = np.zeros((num_decode, width), dtype=np.int64)
        kv_rows, chunks, first = [], [], 0
        for index, (part, table) in enumerate(zip(parts, tables, strict=True)):
            tokens = np.arange(part.start, part.start + part.count)
            kv_rows.append(table[tokens // self.page_size] * (NUM_LAYERS * 2 * self.page_size) + tokens % self.page_size)
            if index < num_decode:
                pages[index, : table.size] = table
            else:
                chunks.append(ChunkRows(first, part.count, part.start, table))
            first += part.count
        lengths = np.array([part.start + 1 for part in parts[:num_decode]], dtype=np.int64)
        return AttentionRows(np.concatenate(kv_rows), lengths, pages, chunks)

    def run(self, attention: PagedAttention, parts: list[Part], *, layer: int = 1, window: int | None = None) -> torch.Tensor:
        """Returns [rows, heads, head_dim] of a step whose context is in the cache; the output was NaN beforehand."""
        for part in parts:
            self.write(part.sequence, 0, part.start, layer=layer)
        attention.begin_step(self.step(parts))
        return attend_in_nan(attention, *self.batch(parts), layer=layer, window=window).view(
            -1, self.heads.num_heads, self.heads.head_dim
        )

    def check(self, attention: PagedAttention, parts: list[Part], *, layer: int = 1, window: int | None = None) -> None:
        """Runs a step and compares outputs with the reference, and the cache with what has to be in it, bit for bit."""
        out = self.run(attention, parts, layer=layer, window=window)
        before = self.cache.clone()
        for part in parts:
            self.write(part.sequence, part.start, part.start + part.count, layer=layer)
        assert torch.equal(before.nan_to_num(1e9), self.cache.nan_to_num(1e9)), "the cache is not what was appended"
        assert not attention._arrived.any(), "arrivals are counted down"
        worst, at = 0.0, 0
        for part in parts:
            for end in range(part.start + 1, part.start + part.count + 1):
                worst = max(worst, self._error_over_bound(out[at], part.sequence, end, layer=layer, window=window))
                at += 1
        assert worst <= 1, f"{worst:.2f} times the bound"

    def _error_over_bound(self, out: torch.Tensor, sequence: int, end: int, *, layer: int, window: int | None) -> float:
        heads = self.heads
        span = {"layer": layer, "first": 0 if window is None else max(0, end - window), "end": end}
        keys, values = (read_tokens(self.cache, self.pages[sequence], kind=kind, **span) for kind in (0, 1))
        q = self.rows[sequence][end - 1, : heads.num_heads]
        roundoff = ROUNDOFF[self.dtype] * (2 if self.dtype is torch.bfloat16 else 1)  # the interpreter cuts off bfloat16
        want = attend(q, keys, values, scale=heads.scale, softcap=heads.softcap)
        return want.error_over_bound(out, roundoff=roundoff)


def attend_in_nan(attention: PagedAttention, *args, **kwargs) -> torch.Tensor:
    """Calls a form that writes into a larger tensor of NaN, which has to stay so around the output."""
    around = torch.empty(0)

    def output(num_rows: int) -> torch.Tensor:
        nonlocal around
        width = attention._heads.num_heads * attention._heads.head_dim
        around = torch.full((num_rows + 2 * AROUND, width), torch.nan, dtype=attention._cache.dtype)
        return around[AROUND:-AROUND]

    attention._new_output = output
    out = attention(*args, **kwargs)
    assert bool(around[:AROUND].isnan().all()), "written before the output"
    assert bool(around[-AROUND:].isnan().all()), "written behind the output"
    return out
