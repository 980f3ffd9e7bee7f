"""A version's files come whole, or not at all, wherever they are kept meanwhile."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

import pytest

from dataplane import transfer as transfer_module
from dataplane.load_room import Amount
from dataplane.signed_urls import SignedReads
from dataplane.transfer import CorruptVersionError, DeletedVersionError, Transfer, TransferLimits, WithdrawnVersionError
from tests.dataplane.doubles import FolderSource, until
from tests.fixtures.adapters import make_adapter_folder
from veneer.artifact import BaseDescription
from veneer.errors import FailedPreconditionError, NotFoundError, UnavailableError, VeneerError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def source(tmp_path: Path, tiny_base: BaseDescription) -> FolderSource:
    return FolderSource(make_adapter_folder(tmp_path / "adapter", tiny_base, ranks=4), base_digest=tiny_base.digest)


def reading(source: FolderSource, folder: Path) -> Transfer:
    limits = TransferLimits(max_config_bytes=1 << 20, max_weights_bytes=1 << 20, max_resumes=2, backoff_s=0.001)
    base_digest = source.grant.base_digest
    return Transfer(
        source, SignedReads(2), base_digest=base_digest, folder=folder, limits=limits, observe=lambda part, seconds: None
    )


@pytest.mark.parametrize(("in_memory", "window"), [(1 << 20, 1 << 20), (0, 1 << 20), (0, 1500), (1 << 20, 1)])
async def test_files_are_whole_in_memory_or_without_a_name_on_the_disk(
    source: FolderSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int, window: int
) -> None:
    monkeypatch.setattr(transfer_module, "_IN_MEMORY_BYTES", in_memory)
    monkeypatch.setattr(transfer_module, "_WINDOW_BYTES", window)
    source.faults[WEIGHTS] = [UnavailableError("cut")]
    with await reading(source, tmp_path).read(source.version, by_url=True) as files:
        assert files.config == source.files[CONFIG]
        files.weights.seek(0)
        assert files.weights.read() == source.files[WEIGHTS]
    assert files.weights.closed
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


async def test_both_files_come_at_the_same_time(source: FolderSource, tmp_path: Path) -> None:
    source.open.clear()
    task = asyncio.create_task(reading(source, tmp_path).read(source.version, by_url=True))
    await until(lambda: source.num_running == 2)
    source.open.set()
    (await task).weights.close()


async def test_one_wrong_file_ends_the_transfer_of_the_other(source: FolderSource, tmp_path: Path) -> None:
    source.faults[CONFIG] = [lambda data: data + b" "]
    with pytest.raises(CorruptVersionError):
        await reading(source, tmp_path).read(source.version, by_url=True)
    assert source.num_running == 0


async def test_whoever_sets_the_pace_hears_of_every_byte_and_holds_the_rest_back(source: FolderSource, tmp_path: Path) -> None:
    heard: list[int] = []
    go = asyncio.Event()

    async def pace(num_bytes: int) -> None:
        heard.append(num_bytes)
        if sum(heard) > 2000:
            await go.wait()

    task = asyncio.create_task(reading(source, tmp_path).read(source.version, by_url=True, pace=pace))
    await until(lambda: sum(heard) > 2000)
    for _ in range(100):
        await asyncio.sleep(0)
    assert sum(heard) < sum(map(len, source.files.values()))
    go.set()
    (await task).weights.close()
    assert sum(heard) == sum(map(len, source.files.values()))


async def test_what_files_take_is_said_before_a_byte_is_read(
    source: FolderSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "_IN_MEMORY_BYTES", len(source.files[CONFIG]))
    monkeypatch.setattr(transfer_module, "_WINDOW_BYTES", 1000)
    told: list[Amount] = []
    go = asyncio.Event()

    async def room(amount: Amount) -> None:
        told.append(amount)
        await go.wait()

    task = asyncio.create_task(reading(source, tmp_path).read(source.version, by_url=True, room=room))
    await until(lambda: told)
    for _ in range(20):
        await asyncio.sleep(0)
    assert source.num_transfers == 0
    config, weights = len(source.files[CONFIG]), len(source.files[WEIGHTS])
    assert told == [Amount(memory=config + min(config, 2000) + 2000, disk=weights)]
    go.set()
    (await task).weights.close()


@pytest.mark.parametrize(
    ("refusal", "kind", "words"),
    [
        (NotFoundError("no such version"), DeletedVersionError, "no such adapter, alias or version"),
        (FailedPreconditionError("the version is retired"), WithdrawnVersionError, "cannot be served any more"),
    ],
)
async def test_a_version_whose_bytes_may_not_be_read_is_one_that_may_not_be_served(
    source: FolderSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: VeneerError,
    kind: type[VeneerError],
    words: str,
) -> None:
    async def refuse(version: str) -> object:
        raise refusal

    monkeypatch.setattr(source, "grant_blobs", refuse)
    with pytest.raises(kind, match=words):
        await reading(source, tmp_path).read(source.version, by_url=True)


async def test_a_read_that_is_cancelled_while_its_file_is_made_leaves_none_open(
    source: FolderSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, begun, go = tempfile.TemporaryFile, threading.Event(), threading.Event()
    made: list[IO[bytes]] = []

    def slowly(**kwargs: Any) -> IO[bytes]:
        begun.set()
        go.wait(60)
        made.append(make(**kwargs))
        return made[0]

    monkeypatch.setattr(transfer_module, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(tempfile, "TemporaryFile", slowly)
    task = asyncio.create_task(reading(source, tmp_path).read(source.version, by_url=False))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [file.closed for file in made] == [True]
