"""The descriptor table: where in the arena each (slot, layer, slice) block lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.edges import Edge
from kernels.rows import ABSENT


@dataclass(frozen=True, slots=True)
class Blocks:
    """One adapter's part of the table.

    Attributes:
        a_offset: int64 [L, slices], first element of A in the arena; A is [rank, K], row-major.
        b_offset: int64 [L, slices], first element of B in the arena; B is transposed, [rank, N], row-major.
        rank: int32 [L, slices], rank rows there; 0 where the adapter has none.
        scale: float32 [L, slices], factor of B A x.
        gain_offset: int64 [L, slices], first element of the gain in the arena; float32 [N] whatever the arena's dtype. ABSENT
            where the adapter has none; None when it has none anywhere.
        shift_offset: Likewise of the shift.
        edges: Pairs outside of the layers, which are not in the table: see `kernels.edges`.
    """

    a_offset: npt.NDArray[np.int64]
    b_offset: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float32]
    gain_offset: npt.NDArray[np.int64] | None = None
    shift_offset: npt.NDArray[np.int64] | None = None
    edges: dict[int, Edge] = field(default_factory=dict)


class Descriptors:
    """`desc[slot, layer, slice] = (A offset, B offset, rank, scale, gain offset, shift offset)`, as numpy arrays and as tensors.

    Owned by the arena, which writes a slot when its image becomes visible; everything else reads. On the CPU the tensors share
    the memory of the arrays; elsewhere they are copies that `set` refreshes, in the order of the current stream and without
    waiting for it: the arrays are pinned there, and a slot is not written again while a step that names it may run.

    Offsets count ELEMENTS of the arena's dtype and are int64: an arena of a few GiB has more elements than int32 can count.

    Attributes:
        a_offset, b_offset, rank, scale, gain_offset, shift_offset: numpy arrays [slots, L, slices], see `Blocks`.
        has_epilogue: bool [slots], whether the slot has a gain or a shift anywhere.
        largest_rank: int32 [slots], largest rank of each slot over layers and slices; 0 for an empty slot.
        epoch: int64 [slots], how often the slot was written: whoever keeps something of a slot keeps its epoch with it.
        tensors: The first four arrays on the device, in that order.
        epilogue_tensors: The two others.
    """

    def __init__(self, num_slots: int, num_layers: int, num_slices: int, *, device: str | torch.device = "cpu") -> None:
        shape = (num_slots, num_layers, num_slices)
        dtypes = (torch.int64, torch.int64, torch.int32, torch.float32, torch.int64, torch.int64)
        on_cuda = torch.device(device).type == "cuda"
        self._hosts = tuple(torch.zeros(shape, dtype=dtype, pin_memory=on_cuda) for dtype in dtypes)
        arrays: list[npt.NDArray[Any]] = [host.numpy() for host in self._hosts]
        self.a_offset, self.b_offset, self.rank, self.scale, self.gain_offset, self.shift_offset = arrays
        self.gain_offset[:] = self.shift_offset[:] = ABSENT
        self.largest_rank = np.zeros(num_slots, dtype=np.int32)
        self.has_epilogue = np.zeros(num_slots, dtype=np.bool_)
        self.epoch = np.zeros(num_slots, dtype=np.int64)
        tensors = tuple(host.to(device) for host in self._hosts)
        self.tensors, self.epilogue_tensors = tensors[:4], tensors[4:]
        self._shared = torch.device(device).type == "cpu"

    def set(self, slot: int, blocks: Blocks) -> None:
        """Writes a slot whole, so that nothing of its last adapter is left."""
        self.a_offset[slot] = blocks.a_offset
        self.b_offset[slot] = blocks.b_offset
        self.rank[slot] = blocks.rank
        self.scale[slot] = blocks.scale
        self.gain_offset[slot] = ABSENT if blocks.gain_offset is None else blocks.gain_offset
        self.shift_offset[slot] = ABSENT if blocks.shift_offset is None else blocks.shift_offset
        vectors = [offsets for offsets in (blocks.gain_offset, blocks.shift_offset) if offsets is not None]
        self.has_epilogue[slot] = any(offsets.max(initial=ABSENT) != ABSENT for offsets in vectors)
        self.epoch[slot] += 1
        self.largest_rank[slot] = int(blocks.rank.max(initial=0))
        if not self._shared:
            for host, tensor in zip(self._hosts, self.tensors + self.epilogue_tensors, strict=True):
                tensor[slot].copy_(host[slot], non_blocking=True)

    def clear(self, slot: int) -> None:
        """Empties a slot: rank 0 everywhere, no gain, no shift."""
        _, num_layers, num_slices = self.rank.shape
        shape = (num_layers, num_slices)
        zero = np.zeros(shape, dtype=np.int64)
        self.set(slot, Blocks(zero, zero, np.zeros(shape, np.int32), np.zeros(shape, np.float32)))
