"""Images are opened beside each other, in the order in which requests wait, and computed with one at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane.engine.image_opener import ImageFile, ImageOpener
from dataplane.lora.host_image import HostImage
from dataplane.lora.image import CorruptImageError, Image
from tests.dataplane.engine.test_adapters import Harness, image_file
from veneer.errors import VeneerError


class Opening:
    """An opener, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wanted: tuple[str, ...] = ()
        self.opened: list[str] = []
        self.failed: list[str] = []
        self.faults: list[Exception] = []
        self.told = threading.Condition()
        self.check: Callable[[Image], None] = lambda image: None
        self.opener = ImageOpener(
            dtype="float32",
            check=lambda image: self.check(image),
            wanted=lambda: self.wanted,
            on_opened=self._note_opened,
            on_failed=self._note_failed,
            on_fault=self._note_fault,
        )

    def _note_opened(self, file: ImageFile, opened: HostImage, seconds: float) -> None:
        assert seconds > 0
        assert opened.image().version == file.version
        self._note(self.opened, file.version)

    def _note_failed(self, file: ImageFile, error: OSError | VeneerError) -> None:
        assert isinstance(error, OSError | CorruptImageError)
        self._note(self.failed, file.version)

    def _note_fault(self, error: Exception) -> None:
        self._note(self.faults, error)

    def _note(self, those: list[Any], one: object) -> None:
        with self.told:
            those.append(one)
            self.told.notify_all()

    def put(self, version: str, path: Path | None = None) -> None:
        self.opener.put(ImageFile(version, path or Path(image_file(self.folder, version, 3)), 1))

    def until(self, holds: Callable[[], object]) -> None:
        with self.told:
            assert self.told.wait_for(holds, timeout=60)


@pytest.fixture
def opening(tmp_path: Path) -> Iterator[Opening]:
    made = Opening(tmp_path)
    yield made
    made.opener.stop()


@contextlib.contextmanager
def slow_file(path: Path) -> Iterator[Path]:
    """A file that whoever opens it waits for until the end of the block: a pipe that nobody writes to."""
    os.mkfifo(path)
    try:
        yield path
    finally:
        writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # who waits goes on, and finds it empty
        path.unlink()
        os.close(writer)


def test_a_file_that_the_disk_is_slow_to_give_holds_no_other_up(opening: Opening, tmp_path: Path) -> None:
    opening.wanted = ("slow", "slow too", "first", "second")
    with slow_file(tmp_path / "a pipe") as one, slow_file(tmp_path / "another") as other:
        opening.put("slow", one)
        opening.put("slow too", other)
        for version in ("first", "second"):
            opening.put(version)
        opening.until(lambda: opening.opened == ["first", "second"])
        assert opening.failed == []
    opening.until(lambda: sorted(opening.failed) == ["slow", "slow too"])


def test_of_those_that_nobody_waits_for_one_is_opened_at_a_time_and_none_before_a_wanted_one(
    opening: Opening, tmp_path: Path
) -> None:
    with slow_file(tmp_path / "a pipe") as slow:
        opening.put("slow", slow)
        opening.put("next")
        opening.put("other")
        opening.wanted = ("wanted",)
        opening.put("wanted")
        opening.until(lambda: opening.opened == ["wanted"])
        opening.wanted = ("other",)
        opening.opener.poke()
        opening.until(lambda: opening.opened == ["wanted", "other"])
    opening.until(lambda: opening.opened == ["wanted", "other", "next"])


def test_threads_compute_in_turns(opening: Opening) -> None:
    computing, most = 0, 0

    def check(image: Image) -> None:
        nonlocal computing, most
        computing += 1
        most = max(most, computing)
        os.sched_yield()
        computing -= 1

    opening.check = check
    opening.wanted = tuple(f"v{number}" for number in range(20))
    for version in opening.wanted:
        opening.put(version)
    opening.until(lambda: len(opening.opened) == 20)
    assert most == 1


def test_what_is_put_off_is_opened_later_and_a_newer_file_takes_its_place(opening: Opening, tmp_path: Path) -> None:
    assert opening.opener.put_off(ImageFile("v", tmp_path / "gone", 1), pause_s=0.05)
    assert not opening.opener.put_off(ImageFile("w", Path(image_file(tmp_path, "w", 3)), 1), pause_s=0.05)
    opening.wanted = ("x",)
    with slow_file(tmp_path / "a pipe") as slow:
        opening.put("busy", slow)
        opening.put("v")
        opening.opener.put_off(ImageFile("v", tmp_path / "gone", 1), pause_s=0.0)
    opening.until(lambda: {"v", "w"} <= set(opening.opened))


def test_a_mistake_of_ours_is_told_and_no_other_thread_ends(opening: Opening) -> None:
    def check(image: Image) -> None:
        raise RuntimeError("planted")

    opening.check = check
    opening.put("v")
    opening.until(lambda: opening.faults)
    opening.check = lambda image: None
    opening.put("w")
    opening.until(lambda: opening.opened == ["w"])


def test_a_load_does_not_wait_for_a_file_that_hangs_and_that_a_request_wants_too(tmp_path: Path) -> None:
    harness = Harness()
    try:
        with slow_file(tmp_path / "a pipe") as slow:
            assert harness.adapters.acquire("slow") is None
            harness.adapters.stage("slow", str(slow))
            assert harness.adapters.acquire("v") is None
            harness.adapters.stage("v", image_file(tmp_path, "v", 3))
            harness.settle_until(lambda: harness.is_resident("v"))
            assert not harness.adapters.is_in_host("slow")
    finally:
        harness.adapters.stop()
