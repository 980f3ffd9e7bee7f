"""An image file: whatever was changed, cut or exchanged in it is noticed before it is used."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import resource
import struct
import time

import pytest

from dataplane.lora.image import CorruptImageError
from dataplane.lora.image_file import open_image, write_image
from tests.dataplane.lora.test_image import build, pair


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "v1.image"
    write_image(path, build([pair(2, 1, 5), pair(0, 0, 3, scaling=-2.0)]))
    return path


def test_any_changed_byte_of_the_file_is_noticed_unless_it_pads(file):
    good = bytearray(file.read_bytes())
    (length,) = struct.unpack_from("<I", good, 8)
    padding = range(44 + length, 4096)
    for position in [*range(0, 44 + length, 7), *range(4096, len(good), 13), len(good) - 1]:
        assert position not in padding
        bad = good.copy()
        bad[position] ^= 0x10
        file.write_bytes(bad)
        with pytest.raises(CorruptImageError):
            open_image(file)
    file.write_bytes(good)
    open_image(file)


def test_a_file_of_any_other_length_is_noticed(file):
    good = file.read_bytes()
    for length in [0, 1, 43, 44, 100, 4095, 4096, 4097, len(good) - 1]:
        file.write_bytes(good[:length])
        with pytest.raises(CorruptImageError):
            open_image(file)
    file.write_bytes(good + b"\0")
    with pytest.raises(CorruptImageError):
        open_image(file)


def test_what_a_loss_of_power_may_leave_of_a_file_is_noticed(file):
    good = file.read_bytes()
    for kept in (0, 4096, len(good) - 128):
        file.write_bytes(good[:kept] + bytes(len(good) - kept))
        with pytest.raises(CorruptImageError):
            open_image(file)


@pytest.mark.parametrize(
    "change",
    [
        {"a_offset": 128},
        {"rank": 6},
        {"layer": 9},
        {"slice": -1},
        {"scale": float("inf")},
        {"b_offset": -128},
        {"size_bytes": 10**12},
        {"rank": 0},
        {"in_features": "7"},
        {"factor_offset": 0},
        {"loss": float("nan")},
    ],
)
def test_a_block_that_lies_about_its_place_is_noticed_even_with_right_checksums(tmp_path, change):
    image = build([pair(), pair(1, 1)])
    blocks = (dataclasses.replace(image.blocks[0], **change), image.blocks[1])
    write_image(tmp_path / "image", dataclasses.replace(image, blocks=blocks))
    with pytest.raises(CorruptImageError):
        open_image(tmp_path / "image")


@pytest.mark.parametrize("expected", [{"version": "v2"}, {"base_digest": "b2"}, {"dtype": "bfloat16"}])
def test_an_image_of_another_version_base_or_dtype_is_noticed(file, expected):
    with pytest.raises(CorruptImageError, match=next(iter(expected))):
        open_image(file, **expected)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(file):
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # the first page fits, the rest does not
    try:
        with pytest.raises(OSError, match="File too large"):
            write_image(file, build([pair(seed=9)]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_an_open_image_outlives_its_file(file):
    image = open_image(file)
    before = image.payload.tobytes()
    file.unlink()
    assert image.payload.tobytes() == before


def test_a_file_bears_an_earlier_time_so_that_any_later_write_shows(file):
    assert file.stat().st_mtime_ns < time.time_ns() - 500_000_000


@pytest.mark.parametrize("row", [[0] * 12, [None] * 13, [2**70] * 13, ["0"] * 13, [0.5] * 13])
def test_a_header_whose_blocks_are_no_numbers_is_refused(file, row):
    raw = file.read_bytes()
    magic, length, _ = struct.unpack("<8sI32s", raw[:44])
    header = json.loads(raw[44 : 44 + length])
    header["blocks"][0] = row
    changed = json.dumps(header).encode()
    start = -(-(44 + length) // 4096) * 4096
    prefix = struct.pack("<8sI32s", magic, len(changed), hashlib.sha256(changed).digest()) + changed
    file.write_bytes(prefix.ljust(-(-len(prefix) // 4096) * 4096, b"\0") + raw[start:])
    with pytest.raises(CorruptImageError):
        open_image(file)
