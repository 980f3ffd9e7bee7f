"""The byte arena on the device: images of the resident adapters, and the descriptor table that locates their blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dataplane.lora.image import CorruptImageError, Image, ImageError
from dataplane.lora.lane import CudaLane, StagedCopies
from dataplane.lora.units import Extent
from kernels.descriptors import Blocks, Descriptors
from kernels.edges import Edge
from kernels.rows import ABSENT
from veneer.errors import Violation

ARENA_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "fp8": torch.uint8}
"""What an arena is made of by the dtype of its images: fp8 of bytes, whose meaning the kernels know."""
_PART_BYTES = 8 << 20
"""What is copied before others may have the processor, as much as a block on its way to a device: 0.2 to 0.5 ms. Where it is
busy, each time costs a turn of theirs: an image of 9.8 MB took 2.2 ms in parts of 1 MiB, 0.4 in these and 0.3 in one (2 cores,
ten processes that compute)."""


class Arena:
    """One 1-D tensor in units, of the model's dtype or of bytes in fp8, and `desc[slot, layer, slice]`.

    It holds bytes and decides nothing: `Residency` says which slot and which units an image takes. Nothing is padded to a common
    rank; an image costs its bytes and the rest of its last unit. Owned by the step loop. `copy` may run in another thread while a
    step runs, since nothing reads a slot's units before `publish`; so may `publish` and `clear`, in the loop, of a slot that no
    row in flight names: one without leases.

    Attributes:
        tensor: [num_units · unit_bytes / item size], the arena.
        descriptors: The table.
        num_units: Units in all.
        edges: Pairs on the embedding and the head, by slot: see `kernels.edges`.

    Args:
        num_bytes: Size; whole units of it are used.
        unit_bytes: Bytes of a unit, a multiple of 128.
        max_slots: Slots of the table.
        num_layers: Layers of the model.
        features: (in, out) of each slice of the model, in the order of the slices.
        dtype: Of the images: `bfloat16`, `float16`, `float32` or `fp8`.
        device: Where the arena lies.
        copies: How bytes come there; None for the device's own way.
        edge_features: (in, out) of embedding and head; empty where pairs on these are not computed.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        unit_bytes: int,
        max_slots: int,
        num_layers: int,
        features: Sequence[tuple[int, int]],
        dtype: str,
        device: str | torch.device = "cpu",
        copies: StagedCopies | None = None,
        edge_features: Sequence[tuple[int, int]] = (),
    ) -> None:
        assert unit_bytes % 128 == 0, "units keep the alignment of blocks"
        self.num_units = num_bytes // unit_bytes
        self.descriptors = Descriptors(max_slots, num_layers, len(features), device=device)
        self._unit_bytes = unit_bytes
        self._features, self._edge_features = tuple(features), tuple(edge_features)
        self.edges: dict[int, dict[int, Edge]] = {}
        self._dtype = dtype
        self._bytes = torch.zeros(self.num_units * unit_bytes, dtype=torch.uint8, device=device)
        self.tensor = self._bytes.view(ARENA_DTYPES[dtype])
        if copies is None and self._bytes.is_cuda:
            copies = StagedCopies(CudaLane(self._bytes.device))
        self._copies = copies

    def write(self, slot: int, image: Image, extents: Sequence[Extent]) -> None:
        """Copies an image and makes it visible: `check`, `copy`, `locate`, `publish`.

        Raises:
            CorruptImageError: See `check`.
        """
        self.check(image)
        self.copy(image, extents)
        self.publish(slot, self.locate(image, extents))

    def check(self, image: Image) -> None:
        """Checks that an image was made for this model, since a wider block would be read past its end.

        Raises:
            CorruptImageError: Another dtype, number of layers or slices, or another shape of a slice.
            ImageError: It has a pair on the embedding or the head, which are not computed in fp8.
        """
        _, num_layers, num_slices = self.descriptors.rank.shape
        made_for = (image.dtype, image.num_layers, image.num_slices)
        if made_for != (self._dtype, num_layers, num_slices):
            raise CorruptImageError(f"the image is made for {made_for}, the arena for {(self._dtype, num_layers, num_slices)}")
        if image.has_edges and not self._edge_features:
            raise ImageError.of([Violation("adapter", f"LoRA on embedding or head is not computed in {self._dtype}")])
        for block in image.blocks:
            features = self._features if block.layer < num_layers else self._edge_features
            if (block.in_features, block.out_features) != features[block.slice]:
                raise CorruptImageError(
                    f"the image's block of layer {block.layer}, slice {block.slice} is {block.in_features} in, "
                    f"{block.out_features} out, the model {features[block.slice]}"
                )

    def copy(self, image: Image, extents: Sequence[Extent]) -> None:
        """Copies a checked image's bytes and returns when they are there, in parts between which steps go first.

        On a device the parts are on a stream of their own, beside the steps; on the CPU the copying thread gives the processor up
        between them.
        """
        for extent in extents:
            blocks = image.blocks[extent.first_block : extent.first_block + extent.num_blocks]
            first = blocks[0].offset
            size = blocks[-1].offset + blocks[-1].size_bytes - first
            assert size <= extent.num_units * self._unit_bytes, "the blocks fit the extent"
            start = extent.first_unit * self._unit_bytes
            source = image.payload[first : first + size]
            if self._copies is None:
                _copy_in_parts(self._bytes.numpy()[start : start + size], source)
            else:
                self._copies.copy(self._bytes[start : start + size], source)
        if self._copies is not None:
            self._copies.finish()

    def locate(self, image: Image, extents: Sequence[Extent]) -> Blocks:
        """Returns where the blocks of an image lie that was copied to `extents`."""
        item, grid = self.tensor.element_size(), image.grid
        moved = np.empty(len(image.blocks), np.int64)
        for extent in extents:
            first = extent.first_block
            moved[first : first + extent.num_blocks] = extent.first_unit * self._unit_bytes - image.blocks[first].offset
        by_place = moved[grid.block]
        a_offset, b_offset = (grid.matrices + by_place) // item
        gain_offset = shift_offset = None
        if grid.vectors is not None:
            gain_offset, shift_offset = np.where(grid.vectors == ABSENT, ABSENT, (grid.vectors + by_place) // item)
        edges = {
            block.slice: Edge((block.a_offset + start) // item, (block.b_offset + start) // item, block.rank, block.scale)
            for block, start in zip(image.edges, moved[len(moved) - len(image.edges) :].tolist(), strict=True)
        }
        return Blocks(a_offset, b_offset, grid.rank, grid.scale, gain_offset, shift_offset, edges)

    def publish(self, slot: int, blocks: Blocks) -> None:
        """Points a slot at an image that was copied and located; nothing of the slot's last adapter is left."""
        self.descriptors.set(slot, blocks)
        self.edges.pop(slot, None)
        if blocks.edges:
            self.edges[slot] = blocks.edges

    def clear(self, slot: int) -> None:
        """Empties a slot: whoever still names it gets the base model's output."""
        self.descriptors.clear(slot)
        self.edges.pop(slot, None)


def _copy_in_parts(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """Copies bytes by numpy, which takes read-only memory without a warning and lets other threads run meanwhile."""
    for start in range(0, source.size, _PART_BYTES):
        if start:
            os.sched_yield()
        target[start : start + _PART_BYTES] = source[start : start + _PART_BYTES]
