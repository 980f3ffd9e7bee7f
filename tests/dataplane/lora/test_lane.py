"""Copies through two blocks of host memory: what is on its way is not overwritten, and `finish` waits for the last byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataplane.lora.arena import Arena
from dataplane.lora.image import ImagePair, build_image
from dataplane.lora.lane import StagedCopies
from dataplane.lora.units import Extent


class SlowLane:
    """Makes a copy only when somebody waits for it, so a block that is filled too early shows."""

    def __init__(self):
        self.sent = []
        self.waited = 0

    def send(self, target, source):
        self.sent.append((target, source))
        number = len(self.sent)

        def wait():
            for to, of in self.sent[self.waited : number]:
                to.copy_(of)
            self.waited = max(self.waited, number)

        return wait


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 17, 41])
def test_every_byte_arrives_whatever_the_number_of_blocks(size):
    lane = SlowLane()
    copies = StagedCopies(lane, pinned=False, block_bytes=8)
    source = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    source.flags.writeable = False
    target = torch.zeros(size, dtype=torch.uint8)
    copies.copy(target, source)
    assert lane.waited >= len(lane.sent) - 2
    copies.finish()
    assert target.tolist() == source.tolist()


def test_the_arena_returns_when_the_whole_image_is_on_the_device():
    lane = SlowLane()
    arena = Arena(
        4096, unit_bytes=512, max_slots=1, num_layers=1, features=[(8, 6), (5, 9)], dtype="float32",
        copies=StagedCopies(lane, pinned=False, block_bytes=200),
    )  # fmt: skip
    pairs = [ImagePair(0, 0, 1.0, np.ones((3, 8), np.float32), np.full((6, 3), 2, np.float32)),
             ImagePair(0, 1, 1.0, np.full((2, 5), 3, np.float32), np.full((9, 2), 4, np.float32))]  # fmt: skip
    image = build_image(pairs, version="v", base_digest="", dtype="float32", num_layers=1, num_slices=2)
    arena.copy(image, [Extent(0, 2, 0, 1), Extent(4, 2, 1, 1)])
    assert lane.waited == len(lane.sent) > 2
    for block, start in zip(image.blocks, (0, 2048), strict=True):
        expected = image.payload[block.a_offset : block.a_offset + block.size_bytes]
        assert arena.tensor.view(torch.uint8)[start : start + block.size_bytes].tolist() == expected.tolist()


def test_a_load_is_one_copy_an_extent():
    for extents in ([Extent(0, 4, 0, 2)], [Extent(0, 2, 0, 1), Extent(4, 2, 1, 1)]):
        lane = SlowLane()
        arena = Arena(
            4096, unit_bytes=512, max_slots=1, num_layers=1, features=[(8, 6), (5, 9)], dtype="float32",
            copies=StagedCopies(lane, pinned=False, block_bytes=4096),
        )  # fmt: skip
        pairs = [ImagePair(0, index, 1.0, np.ones((2, k), np.float32), np.ones((n, 2), np.float32))
                 for index, (k, n) in enumerate([(8, 6), (5, 9)])]  # fmt: skip
        arena.copy(build_image(pairs, version="v", base_digest="", dtype="float32", num_layers=1, num_slices=2), extents)
        assert len(lane.sent) == len(extents)
