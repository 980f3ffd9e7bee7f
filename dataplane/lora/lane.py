"""Copies from host memory to the device beside the steps, which never wait for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BLOCK_BYTES = 8 << 20


class Lane(Protocol):
    """Where copies run in order, beside everything else."""

    def send(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Starts a copy from pinned memory; what it returns waits, in the calling thread alone, until the copy is made."""
        ...


class CudaLane:
    """A stream of its own, and an event for each copy. Waiting sleeps, and lets other threads run."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def send(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """See `Lane`."""
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied.record(self._stream)
        wait: Callable[[], None] = copied.synchronize
        return wait


class StagedCopies:
    """Copies bytes that are not pinned, such as a mapped file's, in blocks through two pinned blocks that take turns.

    The host fills one block while the other is on its way. Used by the loading thread alone.

    Args:
        lane: Where copies run.
        pinned: Whether blocks are pinned, which needs a device.
        block_bytes: Size of a block.
    """

    def __init__(self, lane: Lane, *, pinned: bool = True, block_bytes: int = _BLOCK_BYTES) -> None:
        self._lane = lane
        self._blocks = [torch.empty(block_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._waits: list[Callable[[], None]] = [_nothing, _nothing]

    def copy(self, target: Tensor, source: npt.NDArray[np.uint8]) -> None:
        """Starts the copy of bytes to a target of their size; the last two blocks may still be on their way."""
        size = self._blocks[0].numel()
        for start in range(0, source.size, size):
            part = source[start : start + size]
            self._waits[0]()
            self._blocks[0].numpy()[: part.size] = part
            self._waits[0] = self._lane.send(target[start : start + part.size], self._blocks[0][: part.size])
            self._blocks.reverse()
            self._waits.reverse()

    def finish(self) -> None:
        """Waits until every byte is on the device."""
        for wait in self._waits:
            wait()


def _nothing() -> None:
    pass
