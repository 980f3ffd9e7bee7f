"""Attention over pages on a GPU: an append, then one launch for rows that decode and one for chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.gpu.attention_items import AttentionRows, Prompts, build_attention_items, without_prompts
from kernels.gpu.attention_metadata import AttentionMetadata
from kernels.gpu.attention_tiles import MAX_HEAD_DIM, MAX_SPLITS, PAGE_SIZES, AttentionTiles, attention_tiles_for
from kernels.gpu.decode_attention import decode_attention
from kernels.gpu.device import Gpu
from kernels.gpu.kv_append import kv_append
from kernels.gpu.library_attention import Library
from kernels.gpu.prefill_attention import prefill_attention
from veneer.errors import FailedPreconditionError

_LEAST_GROUP = 16  # rows of the smallest matrix instruction
APPEND_BLOCK = 1024
_UNBOUNDED = 1 << 30


class UnsupportedAttentionError(FailedPreconditionError):
    """The model's heads or the cache's pages have a shape that the kernels do not attend to."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of a head.
        scale: Factor of the scores.
        softcap: Scores s become `softcap · tanh(s / softcap)`; None leaves them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None


class PagedAttention:
    """Appends a step's keys and values to their pages and attends over them.

    A row that decodes gets bits that depend on its own sequence alone, and so does a row of a chunk, however the chunk was cut;
    the two differ. Under `batch_invariant` rows that decode are computed as chunks of one row, and none differ. Once a library
    attends to chunks without a context (`use`), a row of one gets other bits there than behind a cut.

    Every launch has a grid and arguments that do not depend on the step, given the rows of `qk` and whether there are rows that
    decode and chunks: a captured graph serves any step of as many rows or fewer, once `begin_step` has sent the step's metadata.

    Owned by the step loop; not thread-safe.

    Args:
        cache: [pages, layers, 2, page_size, kv_heads, head_dim], of the model's dtype.
        heads: Of the model.
        gpu: What the device can do, from `kernels.gpu.device.probe`.
        max_rows: Most rows of a step.
        max_sequences: Most sequences of a step.
        max_context: Most tokens of a sequence.
        batch_invariant: One form for all rows.
        tiles: Sizes; the product's unless told.

    Raises:
        UnsupportedAttentionError: Head dimension or page size.
    """

    def __init__(
        self,
        cache: Tensor,
        heads: Heads,
        *,
        gpu: Gpu,
        max_rows: int,
        max_sequences: int,
        max_context: int,
        batch_invariant: bool = False,
        tiles: AttentionTiles | None = None,
    ) -> None:
        page_size, head_dim, group = cache.shape[3], heads.head_dim, heads.num_heads // heads.num_kv_heads
        if head_dim % 16 or head_dim > MAX_HEAD_DIM:
            raise UnsupportedAttentionError(f"heads are multiples of 16 up to {MAX_HEAD_DIM} wide, not {head_dim}")
        if page_size not in PAGE_SIZES:
            raise UnsupportedAttentionError(f"pages hold {' or '.join(map(str, PAGE_SIZES))} tokens on a GPU, not {page_size}")
        self._tiles = tiles = tiles or attention_tiles_for(head_dim, cache.element_size())
        if group > tiles.prefill_m:
            raise UnsupportedAttentionError(f"at most {tiles.prefill_m} query heads share a key head, not {group}")
        self._cache, self._heads, self._gpu, self._batch_invariant = cache, heads, gpu, batch_invariant
        self._max_rows = max_rows
        self._tile_rows = tiles.rows_per_tile(group)
        self._metadata = AttentionMetadata(
            max_rows=max_rows,
            max_sequences=max_sequences,
            max_pages=-(-max_context // page_size),
            max_tiles=max_rows // self._tile_rows + max_sequences,
            device=cache.device,
        )
        block_g, block_d = max(_LEAST_GROUP, _power_of_two(group)), _power_of_two(head_dim)
        places = max_sequences * min(MAX_SPLITS, -(-max_context // tiles.split_tokens)) * heads.num_kv_heads
        self._parts = torch.zeros(places * block_g * block_d, dtype=torch.float32, device=cache.device)
        self._best, self._totals = (torch.zeros(places * block_g, dtype=torch.float32, device=cache.device) for _ in range(2))
        self._arrived = torch.zeros(places, dtype=torch.int32, device=cache.device)
        dependent = gpu.has_dependent_launch
        self._shared: dict[str, Any] = {"PAGE_SIZE": page_size, "DEPENDENT": dependent}
        self._attends: dict[str, Any] = {
            **self._shared,
            "KV_HEADS": heads.num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "SCALE": heads.scale,
            "SOFTCAP": heads.softcap or 0.0,
            "BLOCK_D": block_d,
            "UPCAST": gpu.is_interpreted and cache.dtype is torch.bfloat16,
            **({"launch_pdl": True} if dependent else {}),
        }
        self._block_g = block_g
        self._programs = tiles.waves * gpu.num_multiprocessors
        self._num_items = self._num_tiles = 0
        self._library: Library | None = None
        self._prompts: list[Prompts] = []

    @property
    def scratch_bytes(self) -> int:
        """Memory on the device beside the cache."""
        scratch = (self._parts, self._best, self._totals, self._arrived)
        return self._metadata.size_bytes + sum(each.numel() * each.element_size() for each in scratch)

    def use(self, library: Library) -> None:
        """Lets a library attend to chunks without a context from now on; not under `batch_invariant`."""
        assert not self._batch_invariant, "a library gives a prompt other bits than the kernels its continuation"
        self._library = library

    def begin_step(self, step: AttentionRows) -> None:
        """Sends the step's metadata to the device; call it once before the step's first layer."""
        assert step.kv_rows.size <= self._max_rows, f"{step.kv_rows.size} rows of {self._max_rows}"
        if self._batch_invariant:
            step = step.as_chunks()
        if self._library is not None:
            step, self._prompts = without_prompts(step)
        items = build_attention_items(step, least_split=self._tiles.split_tokens, tile_rows=self._tile_rows)
        self._num_items, self._num_tiles = items.items.size, len(items.tiles)
        self._metadata.fill(step.kv_rows, items, self._prompts)

    def __call__(self, qk: Tensor, v: Tensor, *, layer: int, window: int | None) -> Tensor:
        """Appends and attends at one layer.

        Args:
            qk: [T, heads + kv_heads, head_dim], queries, then keys; rows may lie apart, a row's heads may not. T is at least the
                rows of the step: what lies behind these is neither appended nor attended to.
            v: [T, kv_heads, head_dim], likewise.
            layer: The layer.
            window: A row sees this many tokens, itself included; None for all before it.

        Returns:
            [T, heads · head_dim], not written for rows behind those of the step.
        """
        heads, tiles, step, cache = self._heads, self._tiles, self._metadata, self._cache
        assert qk.dtype is cache.dtype, f"rows are {qk.dtype}, the cache is {cache.dtype}"
        num_rows, width = qk.shape[0], heads.num_kv_heads * heads.head_dim
        reach = _UNBOUNDED if window is None else window
        kv_append[(num_rows, -(-width // APPEND_BLOCK))](
            cache, qk, v, step.kv_rows, step.num_rows, qk.stride(0), v.stride(0), layer,
            WIDTH=width, FIRST=heads.num_heads * heads.head_dim, BLOCK=APPEND_BLOCK, **self._shared,
        )  # fmt: skip
        out = self._new_output(num_rows)
        if self._num_items:
            decode_attention[(self._programs,)](
                out, qk, cache, self._parts, self._best, self._totals, self._arrived,
                step.rows, step.items, step.pages, step.num_items, qk.stride(0), cache.stride(0), layer, reach,
                MAX_SPLITS=MAX_SPLITS, BLOCK_G=self._block_g, BLOCK_N=tiles.decode_n,
                **self._attends, **tiles.decode.options(),
            )  # fmt: skip
        if self._num_tiles:
            prefill_attention[(self._programs,)](
                out, qk, cache, step.tiles, step.pages, step.num_tiles, qk.stride(0), cache.stride(0), layer, reach,
                BLOCK_M=tiles.prefill_m, BLOCK_N=tiles.prefill_n,
                **self._attends, **tiles.prefill.options(),
            )  # fmt: skip
        if self._library is not None:
            self._attend_to_prompts(self._library, out, qk, v, window=window)
        return out

    def _attend_to_prompts(self, library: Library, out: Tensor, qk: Tensor, v: Tensor, *, window: int | None) -> None:
        end, num_heads = 0, self._heads.num_heads
        for prompts in self._prompts:
            first, end = end, end + len(prompts.starts)
            rows = slice(prompts.first_row, prompts.first_row + prompts.starts[-1])
            q, k = qk[rows, :num_heads], qk[rows, num_heads:]
            starts, longest = self._metadata.starts[first:end], max(prompts.counts)
            out[rows] = library(q, k, v[rows], starts=starts, longest=longest, window=window).flatten(1)

    def _new_output(self, num_rows: int) -> Tensor:
        width = self._heads.num_heads * self._heads.head_dim
        return torch.empty(num_rows, width, dtype=self._cache.dtype, device=self._cache.device)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
