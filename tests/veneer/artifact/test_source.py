"""Bytes of a file by offset, from whoever opened it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from veneer.artifact.source import Source
from veneer.errors import DataLossError


@pytest.mark.parametrize("in_memory", [False, True])
def test_bytes_are_read_by_offset_and_never_fewer(tmp_path: Path, *, in_memory: bool) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with io.BytesIO(b"0123456789") if in_memory else (tmp_path / "file").open("rb") as file:
        source = Source(file)
        assert source.size_bytes == 10
        assert source.read(2, 3) == b"234"
        with pytest.raises(DataLossError):
            source.read(8, 3)


def test_a_file_that_was_closed_is_not_read_under_the_number_that_another_has_now(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    (tmp_path / "another").write_bytes(b"its own bytes")
    with (tmp_path / "file").open("rb") as file:
        source = Source(file)
        number = file.fileno()
    with (tmp_path / "another").open("rb") as another:
        assert another.fileno() == number
        with pytest.raises(ValueError, match="closed file"):
            source.read(0, 4)
