"""An engine that dies is replaced, and nobody talks to the dead one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from dataplane.engine.messages import Holding, Moved, NotFinite, Ready, Sampling, State, Submit, Unloaded, Wanted
from dataplane.supervision import EngineSupervisor
from tests.dataplane.doubles import VERSION, ScriptedEngine, delta, make_metrics, make_state, until
from veneer.errors import FailedPreconditionError, UnavailableError, VeneerError

SUBMIT = Submit(request_id="r", tenant="acme", prompt=(1,), sampling=Sampling(max_tokens=9))


class FakeClient(ScriptedEngine):
    """An engine client that dies when the test says."""

    def __init__(self, *, slower: str = "") -> None:
        super().__init__((delta(1, finish="stop"),))
        self.ready = Ready(("plan",), 64, 160, slower)
        self.is_alive = True
        self.stopped = False
        self.killed = False
        self.hangs = False
        self.asked_for_s: list[float] = []
        self.on_wanted: Callable[[Wanted], None] | None = None
        self.on_moved: Callable[[Moved], None] | None = None
        self.on_unloaded: Callable[[Unloaded], None] | None = None
        self.on_state: Callable[[State], None] | None = None
        self.on_not_finite: Callable[[NotFinite], None] | None = None
        self.on_death: Callable[[], None] | None = None

    def stage(self, version: str, path: Path, /) -> None:  # type: ignore[override]
        super().stage(version, str(path))

    def fail(self, version: str, *, status: str, message: str) -> None:  # type: ignore[override]
        super().fail(version, status, message)

    def die(self) -> None:
        self.is_alive = False
        assert self.on_death is not None
        self.on_death()

    async def state(self, *, timeout_s: float = 30.0) -> None:
        self.asked_for_s.append(timeout_s)
        if self.hangs:
            raise UnavailableError("the engine did not answer")

    def kill(self) -> None:
        self.killed = True
        self.die()

    async def stop(self) -> None:
        self.stopped = True


class Watcher:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, ...]] = []

    def show(self, holdings: Iterable[Holding], /) -> None:
        self.heard += [("show", holding.version) for holding in holdings]

    def moved(self, event: Moved, /) -> None:
        self.heard.append(("moved", event.version))

    def unloaded(self, version: str, /) -> None:
        self.heard.append(("unloaded", version))

    def engine_lost(self) -> None:
        self.heard.append(("lost",))


class Rig:
    """A supervisor whose engines the test makes."""

    def __init__(self, *, slower: str = "") -> None:
        self.slower = slower
        self.clients: list[FakeClient] = []
        self.errors: list[VeneerError] = []
        self.heard: list[tuple[Any, ...]] = []
        self.reported: list[str] = []
        self.metrics = make_metrics()
        self.supervisor = EngineSupervisor(
            self.make, metrics=self.metrics, report_not_finite=self.report, check_s=0.001, hang_s=7.0
        )
        self.supervisor.attach(self)

    async def make(self) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        self.clients.append(FakeClient(slower=self.slower))
        return self.clients[-1]

    async def report(self, version: str) -> None:
        self.reported.append(version)
        raise UnavailableError("away")

    def want(self, version: str) -> None:
        self.heard.append(("want", version))

    def moved(self, version: str, place: str, *, seconds: float, reason: str) -> None:
        self.heard.append(("moved", version, place, seconds, reason))

    def unloaded(self, event: Unloaded) -> None:
        self.heard.append(("unloaded", event.version))

    def forget_engine(self) -> None:
        self.heard.append(("forget",))

    def meet_engine(self) -> None:
        self.heard.append(("meet",))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.supervisor.start()
    task = asyncio.create_task(made.supervisor.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await made.supervisor.stop()


async def read(streams: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in streams]


async def test_requests_and_images_go_to_the_engine_that_runs(rig: Rig) -> None:
    (client,) = rig.clients
    assert len(await read(rig.supervisor.submit(SUBMIT))) == 1
    rig.supervisor.stage(VERSION, "/image")
    rig.supervisor.unstage(VERSION, drop_device=True)
    rig.supervisor.fail(VERSION, "UNAVAILABLE", "away")
    assert client.calls == [("stage", VERSION, "/image"), ("unstage", VERSION, "drop"), ("fail", VERSION, "UNAVAILABLE")]


async def test_what_the_engine_says_of_adapters_is_passed_on(rig: Rig) -> None:
    (client,) = rig.clients
    assert client.on_wanted is not None
    assert client.on_moved is not None
    client.on_wanted(Wanted(VERSION))
    client.on_moved(Moved(VERSION, "host", 0.5, "room"))
    assert client.on_unloaded is not None
    client.on_unloaded(Unloaded(VERSION))
    told = [("forget",), ("meet",), ("want", VERSION), ("moved", VERSION, "host", 0.5, "room"), ("unloaded", VERSION)]
    assert rig.heard == told


async def test_a_slower_form_is_warned_of_once_with_its_reason_however_often_the_engine_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = "PyTorch's operations serve in place of the native CPU form: no C++ compiler"
    made = Rig(slower=reason)
    await made.supervisor.start()
    task = asyncio.create_task(made.supervisor.run())
    made.clients[0].die()
    await until(lambda: len(made.clients) == 2 and made.supervisor.is_running)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await made.supervisor.stop()
    [warning] = [record for record in caplog.records if "slower form" in record.message]
    assert (warning.levelname, warning.__dict__["cause"]) == ("WARNING", reason)


async def test_an_engine_in_its_best_form_is_not_warned_of(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.clients[0].die()
    await until(lambda: len(rig.clients) == 2 and rig.supervisor.is_running)
    assert not [record for record in caplog.records if "slower form" in record.message]


async def test_who_watches_hears_of_every_state_and_move_and_of_the_engines_end(rig: Rig) -> None:
    watcher = Watcher()
    rig.supervisor.attach(rig, watcher)
    (client,) = rig.clients
    assert client.on_state is not None
    assert client.on_moved is not None
    assert client.on_unloaded is not None
    client.on_state(make_state(Holding(VERSION, "device", 8, 100, 1, 1)))
    client.on_moved(Moved(VERSION, "host", reason="room"))
    client.on_unloaded(Unloaded(VERSION))
    client.on_unloaded(Unloaded(VERSION, came_back=True))
    client.die()
    assert watcher.heard == [("show", VERSION), ("moved", VERSION), ("unloaded", VERSION), ("lost",)]


async def test_reading_an_image_from_the_disk_is_a_hop_of_its_own(rig: Rig) -> None:
    watcher = Watcher()
    rig.supervisor.attach(rig, watcher)
    assert rig.clients[0].on_moved is not None
    for seconds in (0.5, 0.25):
        rig.clients[0].on_moved(Moved(VERSION, "opened", seconds, rank=8, size_bytes=100))
    assert rig.metrics.mean_load_s("disk", "host") == 0.375
    assert watcher.heard == [("moved", VERSION)] * 2
    assert ("moved", VERSION) not in [call[:2] for call in rig.heard]


async def test_without_an_engine_nothing_of_a_version_is_left_to_unload(rig: Rig) -> None:
    rig.errors = [FailedPreconditionError("no")] * 1000
    rig.clients[0].die()
    rig.supervisor.unstage(VERSION, drop_device=True)
    assert rig.heard[-1] == ("unloaded", VERSION)


async def test_a_version_with_logits_that_are_not_finite_is_reported_and_a_failed_report_harms_nobody(rig: Rig) -> None:
    (client,) = rig.clients
    assert client.on_not_finite is not None
    client.on_not_finite(NotFinite(None, "r"))
    client.on_not_finite(NotFinite(VERSION, "r"))
    await until(lambda: rig.reported)
    await until(lambda: not rig.supervisor._reports)
    assert rig.reported == [VERSION]


async def test_an_engine_that_does_not_answer_is_killed_and_replaced(rig: Rig) -> None:
    (first,) = rig.clients
    await until(lambda: first.asked_for_s)
    assert not first.killed
    first.hangs = True
    await until(lambda: len(rig.clients) == 2 and rig.supervisor.is_running)
    assert first.killed
    assert set(first.asked_for_s) == {7.0}
    assert not rig.clients[1].killed


async def test_a_dead_engine_is_replaced_and_missed_meanwhile(rig: Rig) -> None:
    rig.errors = [FailedPreconditionError("no memory yet")]
    rig.clients[0].die()
    with pytest.raises(UnavailableError, match="the engine restarts"):
        rig.supervisor.submit(SUBMIT)
    with pytest.raises(UnavailableError):
        await rig.supervisor.state()
    rig.supervisor.stage(VERSION, "/image")  # nobody hears it, and nothing breaks
    assert not rig.supervisor.is_running
    await until(lambda: rig.supervisor.is_running)
    assert len(rig.clients) == 2
    assert rig.heard == [("forget",), ("meet",), ("forget",), ("meet",)]
    assert len(await read(rig.supervisor.submit(SUBMIT))) == 1
    assert rig.clients[0].calls == rig.clients[1].calls == []


async def test_an_engine_may_die_more_than_once(rig: Rig) -> None:
    for count in (2, 3):
        rig.clients[-1].die()
        await until(lambda count=count: len(rig.clients) == count and rig.supervisor.is_running)


async def test_a_first_engine_that_does_not_start_stops_the_node() -> None:
    rig = Rig()
    rig.errors = [FailedPreconditionError("kv_bytes do not fit")]
    with pytest.raises(FailedPreconditionError, match="do not fit"):
        await rig.supervisor.start()


async def test_stopping_stops_the_engine(rig: Rig) -> None:
    await rig.supervisor.stop()
    assert rig.clients[0].stopped
    with pytest.raises(UnavailableError):
        rig.supervisor.submit(SUBMIT)


def test_every_callback_of_the_client_is_used() -> None:
    from dataplane.engine.client import EngineClient

    async def names() -> set[str]:
        return {name for name in vars(EngineClient()) if name.startswith("on_")}

    assert asyncio.run(names()) == {name for name in vars(FakeClient()) if name.startswith("on_")}
