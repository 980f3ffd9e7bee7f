"""A step's metadata on the device: fixed addresses, one copy a step."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.gpu.items import Int32, Items

_SECTION = 32  # elements, 128 bytes: every section starts where wide loads may
_NONE = np.empty(0, dtype=np.int64)


class StepMetadata:
    """What the kernels read of a step, behind addresses that never change, so that a captured graph stays valid.

    Two host buffers take turns, each with the event of its last copy: the next step is written while the last may still be on its
    way. Owned by one `TritonLowRank`.

    Attributes:
        row_slot: int32 [max_rows]; entries past the step's rows are old.
        item_tile, item_slot, item_rank: int32 [max_items], see `Items`; entries past the count are old.
        tile_start: int32 [max_tiles + 1]; entries past the step's tiles are old.
        num_items: int32 [1].
        epilogue_row: int32 [max_rows], rows of adapters with a gain or a shift; entries past the count are old.
        num_epilogue_rows: int32 [1].

    Args:
        max_rows: Most rows of a step.
        max_items: Most items of a step.
        max_tiles: Most row tiles of a step.
        device: Where the kernels run.
    """

    def __init__(self, *, max_rows: int, max_items: int, max_tiles: int, device: torch.device) -> None:
        sizes = (max_rows, max_items, max_items, max_items, max_tiles + 1, 1, max_rows, 1)
        ends = list(itertools.accumulate(-(-size // _SECTION) * _SECTION for size in sizes))
        starts = [0, *ends[:-1]]
        self._on_cuda = device.type == "cuda"
        self._device = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        sections = [self._device[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        self.row_slot, self.item_tile, self.item_slot, self.item_rank, self.tile_start, self.num_items = sections[:6]
        self.epilogue_row, self.num_epilogue_rows = sections[6:]
        self._hosts = [torch.zeros(ends[-1], dtype=torch.int32, pin_memory=self._on_cuda) for _ in range(2)]
        self._sections = [_views(host, starts, sizes) for host in self._hosts]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def fill(self, row_slot: Int32, items: Items, epilogue_row: npt.NDArray[np.int64] = _NONE) -> None:
        """Writes a step's metadata and starts its copy on the current stream."""
        self._turn ^= 1
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        counts = np.array([[items.slot.size], [epilogue_row.size]], dtype=np.int32)
        values = (row_slot, items.tile, items.slot, items.rank, items.tile_start, counts[0], epilogue_row, counts[1])
        for section, value in zip(self._sections[self._turn], values, strict=True):
            section[: value.size] = value
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        if self._on_cuda:
            event = self._copied[self._turn] = copied or torch.cuda.Event()
            event.record()


def _views(host: Tensor, starts: list[int], sizes: tuple[int, ...]) -> list[npt.NDArray[np.int32]]:
    array = host.numpy()
    return [array[start : start + size] for start, size in zip(starts, sizes, strict=True)]
