"""The object store: files under digests."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import UUID

import pytest

from controlplane.blobs import Blobs, upload_folder
from veneer.errors import DataLossError, UnavailableError

VERSION, DIGEST = "ab" * 32, "cd" * 32
FOLDER = upload_folder(VERSION, UUID(int=7))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def blobs(folder: Path) -> Blobs:
    return Blobs(f"file://{folder}")


def file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "file"
    path.write_bytes(data)
    return path


async def read(blobs: Blobs, offset: int = 0) -> list[bytes]:
    return [part async for part in blobs.read(FOLDER, DIGEST, offset=offset)]


async def test_a_file_lies_under_digests_only_and_is_read_back_from_any_offset(
    blobs: Blobs, folder: Path, tmp_path: Path
) -> None:
    data = os.urandom(9_000_000)
    await blobs.put(FOLDER, DIGEST, file(tmp_path, data))

    assert [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()] == [
        Path("ab", VERSION, UUID(int=7).hex, DIGEST)
    ]
    for offset in (0, 1, 1 << 20, 4 << 20, 8 << 20, len(data) - 1, len(data), len(data) + 5):
        parts = await read(blobs, offset)
        assert b"".join(parts) == data[offset:]
        assert all(0 < len(part) <= 1 << 20 for part in parts)


async def test_writing_again_changes_nothing(blobs: Blobs, folder: Path, tmp_path: Path) -> None:
    await blobs.put(FOLDER, DIGEST, file(tmp_path, b"first"))
    written = next(path for path in folder.rglob("*") if path.is_file())
    before = written.stat().st_ino
    await blobs.put(FOLDER, DIGEST, file(tmp_path, b"first"))
    assert written.stat().st_ino == before


async def test_a_file_cut_short_in_the_store_is_replaced(blobs: Blobs, folder: Path, tmp_path: Path) -> None:
    await blobs.put(FOLDER, DIGEST, file(tmp_path, b"whole"))
    next(path for path in folder.rglob("*") if path.is_file()).write_bytes(b"wh")
    await blobs.put(FOLDER, DIGEST, file(tmp_path, b"whole"))
    assert await read(blobs) == [b"whole"]


async def test_a_file_of_which_nothing_is_left_is_read_as_empty(blobs: Blobs, folder: Path, tmp_path: Path) -> None:
    await blobs.put(FOLDER, DIGEST, file(tmp_path, b"whole"))
    next(path for path in folder.rglob("*") if path.is_file()).write_bytes(b"")
    assert await read(blobs) == []


async def test_a_file_that_is_gone_is_data_loss(blobs: Blobs) -> None:
    with pytest.raises(DataLossError, match="no such file"):
        await read(blobs)


async def test_a_store_that_cannot_be_written_is_unavailable(blobs: Blobs, folder: Path, tmp_path: Path) -> None:
    folder.rmdir()
    folder.write_text("a file where the folder was")
    with pytest.raises(UnavailableError, match="object store"):
        await blobs.put(FOLDER, DIGEST, file(tmp_path, b"x"))


async def test_a_folder_is_removed_with_what_a_killed_writer_left_and_without_the_folders_in_it(
    blobs: Blobs, folder: Path, tmp_path: Path
) -> None:
    first_layout = upload_folder(VERSION, None)
    await blobs.put(first_layout, DIGEST, file(tmp_path, b"old"))
    await blobs.put(FOLDER, DIGEST, file(tmp_path, b"new"))
    await blobs.put(FOLDER, "ef" * 32, file(tmp_path, b"newer"))
    (folder / FOLDER / f"{DIGEST}#1").write_bytes(b"staged")

    assert await blobs.remove(first_layout) == 1
    assert await read(blobs) == [b"new"]
    assert await blobs.remove(FOLDER) == 2
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert await blobs.remove(FOLDER) == 0


async def test_a_folder_cannot_sign(blobs: Blobs) -> None:
    assert await blobs.sign(FOLDER, DIGEST, lifetime_s=60) == ""


def test_an_address_of_no_store_names_the_setting() -> None:
    with pytest.raises(ValueError, match="VENEER_CONTROLPLANE_STORE_URL"):
        Blobs("nowhere://bucket")
