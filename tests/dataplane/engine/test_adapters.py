"""From host memory to the arena, beside the step loop."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.engine import adapters as adapters_module
from dataplane.engine.adapters import DeviceAdapters, Note
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Fail, Moved, Wanted
from dataplane.lora.arena import Arena
from dataplane.lora.host_image import HostImage
from dataplane.lora.image import ImagePair, build_image
from dataplane.lora.image_file import write_image
from dataplane.lora.mapped_file import map_file

FEATURES = ((64, 64), (64, 32))


def image_file(folder: Path, version: str, rank: int) -> str:
    pairs = [
        ImagePair(0, i, 1.0, np.ones((rank, k), np.float32), np.ones((n, rank), np.float32)) for i, (k, n) in enumerate(FEATURES)
    ]
    image = build_image(pairs, version=version, base_digest="b", dtype="float32", num_layers=1, num_slices=2)
    write_image(folder / version, image)
    return str(folder / version)


class Harness:
    def __init__(self, *, units: int = 8, max_rank: int = 16, max_slots: int = 2, **settings: Any) -> None:
        self.wake = threading.Event()
        config = EngineConfig(
            model_dir="", dtype="float32", arena_unit_bytes=4096, arena_bytes=units * 4096, max_rank=max_rank,
            max_slots=max_slots, **settings,
        )  # fmt: skip
        self.arena = Arena(
            units * 4096, unit_bytes=4096, max_slots=max_slots, num_layers=1, features=FEATURES, dtype=config.arena_dtype
        )
        self.adapters = DeviceAdapters(config, self.arena, wake=self.wake)
        self.notes: list[Note] = []

    def settle_until(self, condition: Callable[[], bool]) -> list[Note]:
        while True:
            self.wake.clear()
            self.notes += self.adapters.settle()
            if condition():
                return self.notes
            assert self.wake.wait(60), "nothing happens"

    def is_resident(self, version: str) -> bool:
        return any(holding.version == version and holding.place == "device" for holding in self.adapters.residency.holdings())


@pytest.fixture
def make() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(**changes: Any) -> Harness:
        made.append(Harness(**changes))
        return made[-1]

    yield build
    for harness in made:
        harness.adapters.stop()


def test_a_missed_version_is_asked_for_once_loaded_when_staged_and_then_leased(
    make: Callable[..., Harness], tmp_path: Path
) -> None:
    harness = make()
    assert harness.adapters.acquire("v") is None
    assert harness.adapters.settle() == [Wanted("v")]
    assert harness.adapters.settle() == []
    harness.adapters.stage("v", image_file(tmp_path, "v", 3))
    notes = harness.settle_until(lambda: harness.is_resident("v"))
    assert [(note.place, note.rank, note.size_bytes > 0) for note in notes if isinstance(note, Moved)] == [
        ("opened", 3, True),
        ("device", 3, True),
    ]
    lease = harness.adapters.acquire("v")
    assert lease is not None
    assert harness.arena.descriptors.largest_rank[lease.slot] == 3


def test_what_a_pin_asked_for_that_ended_a_request_asks_for_again(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.adapters.pin("v", "acme")
    assert harness.adapters.settle() == [Wanted("v")]
    harness.adapters.unpin("v")
    assert harness.adapters.settle() == []
    assert harness.adapters.acquire("v") is None
    assert harness.adapters.settle() == [Wanted("v")]


def test_staging_alone_loads_nothing(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make()
    harness.adapters.stage("v", image_file(tmp_path, "v", 3))
    harness.settle_until(lambda: harness.adapters.is_in_host("v"))
    assert not harness.is_resident("v")
    assert not harness.adapters.want("v")
    harness.settle_until(lambda: harness.is_resident("v"))
    assert harness.adapters.want("v")


def test_an_image_is_on_the_disk_until_the_loop_hears_that_it_was_opened(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make()
    places = [harness.adapters.place_of("v")]
    harness.adapters.stage("v", image_file(tmp_path, "v", 3))
    places.append(harness.adapters.place_of("v"))
    harness.settle_until(lambda: harness.adapters.place_of("v") == "host")
    harness.adapters.unstage("v", drop_device=False)
    assert [*places, harness.adapters.place_of("v")] == ["store", "disk", "store"]
    (opened,) = (note for note in harness.notes if isinstance(note, Moved))
    assert opened.place == "opened"
    assert opened.seconds > 0


@pytest.mark.parametrize(("rank", "units", "status"), [(17, 64, "INVALID_ARGUMENT"), (16, 2, "RESOURCE_EXHAUSTED")])
def test_an_image_beyond_a_limit_fails_its_requests(
    make: Callable[..., Harness], tmp_path: Path, rank: int, units: int, status: str
) -> None:
    harness = make(units=units)
    harness.adapters.stage("v", image_file(tmp_path, "v", rank))
    (note,) = harness.settle_until(lambda: bool(harness.notes))
    assert isinstance(note, Fail)
    assert (note.version, note.status) == ("v", status)
    assert not harness.adapters.is_in_host("v")


def test_an_image_that_loses_more_in_fp8_than_the_limit_fails_its_requests_by_name(
    make: Callable[..., Harness], tmp_path: Path
) -> None:
    path = tmp_path / "v"
    numbers = np.random.default_rng(0)
    pairs = [
        ImagePair(0, i, 1.0, numbers.standard_normal((2, k), np.float32), numbers.standard_normal((n, 2), np.float32))
        for i, (k, n) in enumerate(FEATURES)
    ]
    write_image(path, build_image(pairs, version="v", base_digest="b", dtype="fp8", num_layers=1, num_slices=2))
    for limit, fits in ((0.1, True), (0.01, False)):
        harness = make(cpu_form="triton", adapter_dtype="fp8", max_adapter_loss=limit)
        harness.adapters.want("v")
        harness.adapters.stage("v", str(path))
        if fits:
            harness.settle_until(lambda harness=harness: harness.is_resident("v"))
            (holding,) = harness.adapters.residency.holdings()
            assert holding.loss is not None
            assert 0.02 < holding.loss.error < 0.06
        else:
            harness.settle_until(lambda harness=harness: any(isinstance(note, Fail) for note in harness.notes))
            (note,) = (note for note in harness.notes if isinstance(note, Fail))
            assert (note.version, note.status) == ("v", "INVALID_ARGUMENT")
            assert "of its norm in fp8, max_adapter_loss is 0.01" in note.message


def test_an_image_of_another_dtype_than_the_arenas_is_no_image_of_it(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make(cpu_form="triton", adapter_dtype="fp8")
    harness.adapters.stage("v", image_file(tmp_path, "v", 3))
    assert harness.settle_until(lambda: bool(harness.notes)) == [Moved("v", "corrupt")]


def test_an_image_of_another_version_or_no_file_is_corrupt(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make()
    harness.adapters.stage("v", image_file(tmp_path, "w", 3))
    harness.adapters.stage("x", str(tmp_path / "nothing"))
    notes = harness.settle_until(lambda: len(harness.notes) == 2)
    assert notes == [Moved("v", "corrupt"), Moved("x", "corrupt")]


class Scarce:
    """Opening a file fails for want of something, so often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.times = 0
        self._number = number
        monkeypatch.setattr("dataplane.lora.image_file.map_file", self._map)
        monkeypatch.setattr(adapters_module, "_AGAIN_S", 0.001)

    def _map(self, descriptor: int) -> Any:
        if self.times:
            self.times -= 1
            raise OSError(self._number, os.strerror(self._number))
        return map_file(descriptor)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_an_image_that_the_machine_cannot_open_now_is_not_corrupt_and_opened_later(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    Scarce(monkeypatch, number).times = 3
    harness = make()
    for version in ("v", "w"):
        assert harness.adapters.acquire(version) is None
        harness.adapters.stage(version, image_file(tmp_path, version, 3))
    harness.settle_until(lambda: harness.is_resident("v") and harness.is_resident("w"))
    assert {note.place for note in harness.notes if isinstance(note, Moved)} == {"opened", "device"}


def test_what_was_taken_away_meanwhile_is_not_opened_later(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(monkeypatch, errno.EMFILE)
    scarce.times = 1 << 30
    harness = make()
    harness.adapters.stage("v", image_file(tmp_path, "v", 3))
    while scarce.times > (1 << 30) - 3:
        harness.wake.wait(0.001)
    harness.adapters.unstage("v", drop_device=True)
    scarce.times = 0
    harness.adapters.stage("w", image_file(tmp_path, "w", 3))
    harness.settle_until(lambda: harness.adapters.is_in_host("w"))
    assert not harness.adapters.is_in_host("v")
    assert not any(isinstance(note, Moved) and note.version == "v" for note in harness.notes)


def test_a_copy_that_must_open_its_image_again_and_cannot_is_made_later(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(monkeypatch, errno.EMFILE)
    harness = make()
    path = image_file(tmp_path, "v", 3)
    harness.adapters.stage("v", path)
    harness.settle_until(lambda: harness.adapters.is_in_host("v"))
    os.utime(path, ns=(10**18, 10**18))  # it may be another one now
    scarce.times = 2
    assert harness.adapters.acquire("v") is None
    harness.settle_until(lambda: harness.adapters.acquire("v") is not None)
    assert scarce.times == 0
    assert {note.place for note in harness.notes if isinstance(note, Moved)} == {"opened", "device"}


def test_what_was_taken_away_while_it_was_opened_does_not_come_back(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    opened, go_on = threading.Event(), threading.Event()
    real = harness.arena.check

    def slow(image: object) -> None:
        opened.set()
        assert go_on.wait(60)
        real(image)  # type: ignore[arg-type]

    monkeypatch.setattr(harness.arena, "check", slow)
    harness.adapters.stage("v", image_file(tmp_path, "v", 3))
    assert opened.wait(60)
    harness.adapters.unstage("v", drop_device=True)
    go_on.set()
    harness.adapters.stage("w", image_file(tmp_path, "w", 3))
    harness.settle_until(lambda: harness.adapters.is_in_host("w"))
    assert not harness.adapters.is_in_host("v")
    assert {holding.version for holding in harness.adapters.residency.holdings()} == {"w"}


def test_no_room_because_of_leases_is_starvation_until_one_goes(make: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make(max_slots=1)
    for version in ("v", "w"):
        harness.adapters.stage(version, image_file(tmp_path, version, 3))
    assert harness.adapters.acquire("v") is None
    harness.settle_until(lambda: harness.is_resident("v"))
    lease = harness.adapters.acquire("v")
    assert lease is not None
    harness.adapters.withdraw("v")
    assert harness.adapters.acquire("w") is None
    harness.adapters.settle()
    while not harness.adapters.is_starved("w"):
        harness.adapters.settle()
    harness.adapters.release(lease)
    harness.settle_until(lambda: harness.is_resident("w"))
    assert Moved("v", "host", reason="room") in harness.notes
    assert not harness.is_resident("v")


def test_a_dead_copying_thread_stops_the_engine(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(harness.arena, "check", fail)
    harness.adapters.stage("v", image_file(tmp_path, "v", 3))
    with pytest.raises(RuntimeError, match="planted"):
        harness.settle_until(lambda: False)


def test_a_miss_that_comes_up_in_planning_wakes_the_step_loop_once(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.adapters.settle()
    harness.wake.clear()
    assert harness.adapters.acquire("late") is None
    assert harness.wake.is_set()
    harness.wake.clear()
    assert Wanted("late") in harness.adapters.settle()
    assert harness.adapters.acquire("late") is None
    assert not harness.wake.is_set()


def test_a_version_that_must_leave_goes_with_its_last_lease_and_may_come_back(
    make: Callable[..., Harness], tmp_path: Path
) -> None:
    harness = make()
    harness.adapters.stage("v", image_file(tmp_path, "v", 3))
    assert not harness.adapters.want("v")
    harness.settle_until(lambda: harness.is_resident("v"))
    leases = [harness.adapters.acquire("v") for _ in range(2)]
    harness.adapters.evict("v")
    assert harness.adapters.acquire("v") is None
    for lease in leases:
        assert lease is not None
        assert harness.is_resident("v")
        harness.adapters.release(lease)
    assert not harness.is_resident("v")
    harness.settle_until(lambda: harness.is_resident("v"))
    assert Moved("v", "host", reason="yield") in harness.notes
    assert harness.adapters.residency.counters.evictions == 1


def test_an_image_that_a_request_waits_for_is_opened_before_those_that_nobody_waits_for(
    make: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    class Slow(HostImage):
        def __init__(self, path: Path, *, version: str, **options: Any) -> None:
            opened.append(version)
            begun.set()
            assert go_on.wait(60)
            super().__init__(path, version=version, **options)

    monkeypatch.setattr("dataplane.engine.image_opener.HostImage", Slow)
    harness = make()
    paths = {version: image_file(tmp_path, version, 3) for version in ("first", "second", "third", "wanted")}
    harness.adapters.stage("first", paths["first"])
    assert begun.wait(60)
    for version in ("second", "third", "wanted"):
        harness.adapters.stage(version, paths[version])
    assert not harness.adapters.want("wanted")
    go_on.set()
    harness.settle_until(lambda: harness.adapters.is_in_host("third") and harness.is_resident("wanted"))
    assert opened == ["first", "wanted", "second", "third"]
