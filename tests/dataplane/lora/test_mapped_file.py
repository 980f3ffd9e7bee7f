"""Mapped files stay readable as long as anybody looks at them, and cost no descriptor."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dataplane.lora.mapped_file import map_file

MAPS = Path("/proc/self/maps")


def mapped(path: Path) -> npt.NDArray[np.uint8]:
    with path.open("rb") as file:
        return map_file(file.fileno())


def written(folder: Path, data: bytes) -> Path:
    path = folder / "mapped-file"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 100_001])
def test_it_has_the_files_bytes_and_cannot_be_written_to(tmp_path: Path, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    array = mapped(written(tmp_path, data))
    assert array.dtype == np.uint8
    assert array.shape == (num_bytes,)
    assert array.tobytes() == data
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_a_view_outlives_the_array_the_descriptor_and_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, bytes(range(256)) * 64)
    view = mapped(path)[4096:4352].view(np.uint8)[10:20]
    path.unlink()
    gc.collect()
    assert view.tolist() == list(range(10, 20))


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc")
def test_it_is_unmapped_with_the_last_that_looks_at_it(tmp_path: Path) -> None:
    path = written(tmp_path, bytes(4096))
    view = mapped(path)[1:2]
    gc.collect()
    assert str(path) in MAPS.read_text()
    del view
    gc.collect()
    assert str(path) not in MAPS.read_text()


def test_what_cannot_be_mapped_says_why(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        mapped(written(tmp_path, b""))
    assert caught.value.errno == errno.EINVAL
