"""A step's attention work on the device: fixed addresses, one copy a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.gpu.attention_items import AttentionItems, Integers, Prompts
from kernels.gpu.attention_tiles import MAX_SPLITS

_SECTION = 32  # words, 128 bytes: every section starts where wide loads may


class AttentionMetadata:
    """What the kernels read of a step, behind addresses that never change, so that a captured graph stays valid.

    Two host buffers take turns, each with the event of its last copy: the next step is written while the last may still be on its
    way. The page lists come last, and what lies behind those of the step is not copied. Owned by one `PagedAttention`.

    Attributes:
        num_rows, num_items, num_tiles: int32 [1].
        kv_rows: int64 [max_rows]; entries past the step's rows are old, and likewise in the lists.
        starts: int32 [2 · max_sequences], those of each `Prompts` in turn.
        rows, items, tiles, pages: See `AttentionItems`.

    Args:
        max_rows: Most rows of a step.
        max_sequences: Most sequences of a step.
        max_pages: Most pages of a sequence.
        max_tiles: Most tiles of a step.
        device: Where the kernels run.
    """

    def __init__(self, *, max_rows: int, max_sequences: int, max_pages: int, max_tiles: int, device: torch.device) -> None:
        words = (
            *(1, 1, 1, 2 * max_rows),
            *(2 * max_sequences, 4 * max_sequences, MAX_SPLITS * max_sequences, 4 * max_tiles, 2 * max_pages * max_sequences),
        )
        *starts, end = itertools.accumulate((-(-size // _SECTION) * _SECTION for size in words), initial=0)
        self._pages_start, self._on_cuda = starts[-1], device.type == "cuda"
        self._device = torch.zeros(end, dtype=torch.int32, device=device)
        parts = [self._device[start : start + size] for start, size in zip(starts, words, strict=True)]
        self.num_rows, self.num_items, self.num_tiles, kv_rows, self.starts, self.rows, self.items, self.tiles, pages = parts
        self.kv_rows, self.pages = kv_rows.view(torch.int64), pages.view(torch.int64)
        self._hosts = [torch.zeros(end, dtype=torch.int32, pin_memory=self._on_cuda) for _ in range(2)]
        self._sections = [
            [host.numpy()[start : start + size] for start, size in zip(starts, words, strict=True)] for host in self._hosts
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    @property
    def size_bytes(self) -> int:
        """Memory on the device."""
        return self._device.numel() * self._device.element_size()

    def fill(self, kv_rows: Integers, items: AttentionItems, prompts: Sequence[Prompts] = ()) -> None:
        """Writes a step's work and starts its copy on the current stream; prompts are what a library attends to."""
        self._turn ^= 1
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        counts = (kv_rows.size, items.items.size, len(items.tiles))
        pages = items.pages.view(np.int32)
        starts = [start for each in prompts for start in each.starts]
        lists = (items.rows, items.items, items.tiles, pages)
        values: tuple[npt.ArrayLike, ...] = (*counts, kv_rows.view(np.int32), starts, *lists)
        for section, value in zip(self._sections[self._turn], values, strict=True):
            flat: npt.NDArray[Any] = np.ravel(value)
            section[: flat.size] = flat
        end = self._pages_start + pages.size
        self._device[:end].copy_(self._hosts[self._turn][:end], non_blocking=True)
        if self._on_cuda:
            event = self._copied[self._turn] = copied or torch.cuda.Event()
            event.record()
