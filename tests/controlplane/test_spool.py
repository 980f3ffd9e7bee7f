"""Folders of uploads: gone when an upload ends, and swept when its process was killed."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from controlplane import spool as spools
from controlplane.spool import CONFIG, WEIGHTS, MinRate, Part, Spool, remove_abandoned
from tests.fixtures.descriptors import num_open_files
from veneer.errors import DeadlineExceededError, UnavailableError

_LIMITS = {CONFIG: 100, WEIGHTS: 100}
# Ends as a kill would: no block is left, nothing is cleaned up.
_KILLED = """
import asyncio, os, sys
from pathlib import Path
from controlplane.spool import Spool
async def main():
    async with Spool(Path(sys.argv[1]), {}, part_timeout_s=1):
        os._exit(9)
asyncio.run(main())
"""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The folder of an upload whose process was killed."""
    assert subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False).returncode == 9
    [folder] = tmp_path.iterdir()
    return folder


async def test_what_a_killed_process_left_is_removed_and_a_running_upload_stays(tmp_path: Path, left: Path) -> None:
    other = tmp_path / "something-else"
    other.mkdir()
    async with Spool(tmp_path, _LIMITS, part_timeout_s=1) as spool:
        received = await spool.receive(_parts())
        for folder in tmp_path.iterdir():
            os.utime(folder, (0, 0))

        assert remove_abandoned(tmp_path) == 1

        assert not left.exists()
        assert received[WEIGHTS].path.read_bytes() == b"weights"
    assert list(tmp_path.iterdir()) == [other]


def test_a_folder_that_was_just_made_is_left_the_time_to_be_locked(tmp_path: Path) -> None:
    (tmp_path / "veneer-publish-new").mkdir()
    assert remove_abandoned(tmp_path) == 0
    assert remove_abandoned(tmp_path / "absent") == 0


def test_a_folder_that_cannot_be_locked_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = num_open_files()
    with pytest.raises(UnavailableError):
        asyncio.run(Spool(tmp_path, _LIMITS, part_timeout_s=1).__aenter__())
    assert list(tmp_path.iterdir()) == []
    assert num_open_files() <= before


async def test_a_folder_for_which_there_is_no_descriptor_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))  # no descriptor is free
    try:
        with pytest.raises(UnavailableError):
            await Spool(tmp_path, _LIMITS, part_timeout_s=1).__aenter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_that_cannot_be_removed_is_told_and_its_lock_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    before = num_open_files()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        async with Spool(tmp_path, _LIMITS, part_timeout_s=1):
            pass
    assert "cannot be removed" in caplog.text
    assert num_open_files() <= before
    [left] = tmp_path.iterdir()
    os.utime(left, (0, 0))
    assert remove_abandoned(tmp_path) == 1


async def test_a_block_that_ends_twice_closes_nothing_of_others(tmp_path: Path) -> None:
    spool = Spool(tmp_path, _LIMITS, part_timeout_s=1)
    async with spool:
        await spool.receive(_parts())
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # the numbers that were just closed are among them
    await spool.__aexit__(None, None, None)
    for other in others:
        os.close(other)


async def test_a_file_is_closed_after_the_last_byte_when_its_upload_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, begun, go = spools._File.write, threading.Event(), threading.Event()
    written: list[bytes] = []

    def slow(self: spools._File, data: bytes) -> None:
        begun.set()
        go.wait(30)
        write(self, data)  # raises if the file was closed meanwhile
        written.append(data)

    monkeypatch.setattr(spools._File, "write", slow)

    async def upload() -> None:
        async with Spool(tmp_path, _LIMITS, part_timeout_s=60) as spool:
            await spool.receive(_parts())

    task = asyncio.create_task(upload())
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert written == [b"{}"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["write", "finish"])
async def test_a_disk_that_is_full_at_any_step_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(spools._File, step, refuse)
    with pytest.raises(UnavailableError, match="no room"):
        async with Spool(tmp_path, _LIMITS, part_timeout_s=1) as spool:
            await spool.receive(_parts())
    assert list(tmp_path.iterdir()) == []


async def test_an_upload_below_the_least_rate_ends_and_names_it(tmp_path: Path, clock: Clock) -> None:
    async def dripping() -> AsyncIterator[Part]:
        while True:
            clock.now_s += 2
            yield Part(CONFIG, b"x")

    async with Spool(tmp_path, {CONFIG: 1 << 20}, part_timeout_s=30, rate=MinRate(1000, 10)) as spool:
        with pytest.raises(DeadlineExceededError, match="min_upload_bytes_per_s is 1000, and upload_rate_grace_s 10"):
            await spool.receive(dripping())
    assert 10 < clock.now_s <= 14


async def test_bytes_that_came_at_once_pay_for_no_more_than_the_grace(tmp_path: Path, clock: Clock) -> None:
    async def dripping_after_much() -> AsyncIterator[Part]:
        yield Part(CONFIG, bytes(1 << 20))
        while True:
            clock.now_s += 1
            yield Part(CONFIG, b"x")

    async with Spool(tmp_path, {CONFIG: 1 << 30}, part_timeout_s=30, rate=MinRate(1000, 10)) as spool:
        with pytest.raises(DeadlineExceededError):
            await spool.receive(dripping_after_much())
    assert clock.now_s <= 12


@pytest.mark.parametrize(("rate", "part_bytes"), [(1000, 3000), (0, 1)])
async def test_an_upload_at_the_least_rate_or_without_one_goes_on(
    tmp_path: Path, clock: Clock, rate: int, part_bytes: int
) -> None:
    async def steady() -> AsyncIterator[Part]:
        yield Part(CONFIG, b"{}")
        for _ in range(20):
            clock.now_s += 3
            yield Part(WEIGHTS, bytes(part_bytes))

    limits = {CONFIG: 100, WEIGHTS: 1 << 20}
    async with Spool(tmp_path, limits, part_timeout_s=30, rate=MinRate(rate, 10)) as spool:
        assert (await spool.receive(steady()))[WEIGHTS].size_bytes == 20 * part_bytes


@dataclass
class Clock:
    """The spool's clock."""

    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spools, "time", clock)
    return clock


async def _parts() -> AsyncIterator[Part]:
    yield Part(CONFIG, b"{}")
    yield Part(WEIGHTS, b"weights")
