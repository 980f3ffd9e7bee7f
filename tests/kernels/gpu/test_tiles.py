from __future__ import annotations

import pytest
import torch
from triton import knobs

from kernels.gpu.device import UnsupportedDeviceError, probe
from kernels.gpu.tiles import TILES, tiles_for
from kernels.rows import ALIGN


def test_every_number_of_rows_has_one_configuration():
    assert [tiles_for(rows).max_rows for rows in (1, 16, 17, 64, 65, 128, 129)] == [16, 16, 64, 64, 128, 128, 1 << 20]
    assert list(TILES) == sorted(TILES, key=lambda tiles: tiles.max_rows)


@pytest.mark.parametrize("in_features", [16, 576, 1023, 1024, 4096, 11008, 28672])
def test_k_is_split_into_a_power_of_two_that_depends_on_the_site_alone(in_features):
    for tiles in TILES:
        parts = tiles.split_k(in_features)
        assert parts & (parts - 1) == 0
        assert 1 <= parts <= tiles.max_split
        assert parts == 1 or in_features // parts >= tiles.k_part


def test_products_take_whole_blocks_of_rank_rows_and_whole_matrix_instructions():
    for tiles in TILES:
        assert tiles.block_j % ALIGN == 0
        assert tiles.block_k % ALIGN == 0
        assert tiles.block_m % 16 == 0


def test_a_device_that_cannot_run_the_kernels_is_refused(monkeypatch):
    assert probe("cpu").is_interpreted
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(UnsupportedDeviceError, match="not on cpu"):
        probe("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_missing_device_is_said_to_be_missing():
    with pytest.raises(UnsupportedDeviceError, match="no CUDA"):
        probe("cuda")


def test_an_old_device_is_named_with_what_it_lacks(monkeypatch):
    facts = type("Facts", (), {"name": "Tesla T4", "major": 7, "minor": 5, "multi_processor_count": 40})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    with pytest.raises(UnsupportedDeviceError, match=r"Tesla T4 has compute capability 7\.5"):
        probe("cuda")
    facts.major, facts.minor = 9, 0
    assert probe("cuda").has_dependent_launch
