from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from dataplane.lora import host_image
from dataplane.lora.host_image import HostImage
from dataplane.lora.image import CorruptImageError, Image, ImagePair, build_image
from dataplane.lora.image_file import write_image


def image_file(folder: Path, value: float = 1.0) -> Path:
    pair = ImagePair(0, 0, 1.0, np.full((2, 64), value, np.float32), np.full((64, 2), value, np.float32))
    image = build_image([pair], version="v", base_digest="b", dtype="float32", num_layers=1, num_slices=1)
    path = folder / "v.image"
    write_image(path, image)
    return path


@pytest.fixture
def checks() -> list[Image]:
    """What was checked."""
    return []


def opened(path: Path, checks: list[Image]) -> HostImage:
    return HostImage(path, version="v", dtype="float32", check=checks.append)


def test_a_file_is_checked_once_however_often_it_is_loaded(tmp_path: Path, checks: list[Image]) -> None:
    held = opened(image_file(tmp_path), checks)
    assert held.image() is held.image()
    assert len(checks) == 1


def num_descriptors() -> int:
    """Returns how many of the first thousand descriptors are open."""
    count = 0
    for descriptor in range(1000):
        with contextlib.suppress(OSError):
            os.fstat(descriptor)
            count += 1
    return count


def test_images_cost_no_open_descriptor(tmp_path: Path, checks: list[Image]) -> None:
    path = image_file(tmp_path)
    before = num_descriptors()
    held = [opened(path, checks) for _ in range(20)]
    assert num_descriptors() < before + 20
    assert all(one.image().rank == 2 for one in held)


def test_a_file_that_is_another_one_now_is_known_before_it_is_read_again(tmp_path: Path, checks: list[Image]) -> None:
    held = opened(image_file(tmp_path), checks)
    assert not held.has_changed
    path = image_file(tmp_path)
    assert held.has_changed
    held.image()
    assert not held.has_changed
    path.unlink()
    assert not held.has_changed, "nobody writes into it any more"


def test_a_file_that_was_just_written_is_read_through_once(tmp_path: Path, checks: list[Image]) -> None:
    held = opened(image_file(tmp_path), checks)
    for _ in range(3):
        held.image()
    assert len(checks) == 1


def test_a_write_just_after_the_check_is_noticed_however_coarse_the_clock(tmp_path: Path, checks: list[Image]) -> None:
    for _ in range(20):
        path = image_file(tmp_path)
        held = opened(path, checks)
        with path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"changed!")
        with pytest.raises(CorruptImageError):
            held.image()


def test_a_file_that_was_written_to_is_checked_again_and_refused(tmp_path: Path, checks: list[Image]) -> None:
    path = image_file(tmp_path)
    held = opened(path, checks)
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"changed!")
    with pytest.raises(CorruptImageError):
        held.image()


def test_a_file_that_was_replaced_is_checked_and_used(tmp_path: Path, checks: list[Image]) -> None:
    held = opened(image_file(tmp_path), checks)
    image_file(tmp_path, 2.0)
    assert held.image().payload.view(np.float32).max() == 2.0
    assert len(checks) == 2


def test_a_file_that_was_deleted_stays_mapped(tmp_path: Path, checks: list[Image]) -> None:
    path = image_file(tmp_path)
    held = opened(path, checks)
    path.unlink()
    assert held.image().payload.view(np.float32).max() == 1.0
    assert len(checks) == 1


def test_a_file_that_is_too_young_to_be_told_from_a_later_one_is_checked_again(
    tmp_path: Path, checks: list[Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_image, "_RACY_NS", 1 << 60)
    opened(image_file(tmp_path), checks).image()
    assert len(checks) == 2
