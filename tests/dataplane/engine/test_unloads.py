"""A version that is taken away lets running requests end, serves nobody else, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dataplane.engine.client import EngineClient
from dataplane.engine.messages import Unloaded
from dataplane.engine.unloads import Unloads
from dataplane.lora.image_file import open_image
from tests.dataplane.engine.driving import FakeAdapters, Loop, add, assert_idle, expected, make, submit
from tests.dataplane.engine.serving import collect, idle, request
from tests.dataplane.engine.test_loads import Gate
from veneer.errors import FailedPreconditionError

SALT = "5a" * 16
LONG = list(range(5, 70))


class Taken:
    """An engine of which versions are taken away, and what it said of them."""

    def __init__(self, client: EngineClient, adapters: Any) -> None:
        self.client = client
        self.adapters = adapters
        self.unloaded: list[Unloaded] = []
        self.heard = asyncio.Event()
        client.on_unloaded = self._hear
        client.on_wanted = lambda wanted: client.fail(wanted.version, status="FAILED_PRECONDITION", message="gone")

    def _hear(self, event: Unloaded) -> None:
        self.unloaded.append(event)
        self.heard.set()

    def take(self, version: str) -> None:
        self.client.unstage(version, drop_device=True)

    async def proof(self) -> Unloaded:
        async with asyncio.timeout(60):
            await self.heard.wait()
        (event,) = self.unloaded
        return event

    def num_bytes(self, version: str) -> int:
        return open_image(self.adapters[version][0]).num_bytes

    async def assert_nothing_is_left(self) -> None:
        state = await idle(self.client)
        assert (state.arena_bytes_used, state.host_bytes, state.kv_pages_kept, state.holdings) == (0, 0, 0, ())


async def test_what_nobody_uses_is_free_at_once_and_counted_by_tier(started: Any, adapters: Any) -> None:
    taken = Taken(await started(), adapters)
    taken.client.stage("v1", adapters["v1"][0])
    await collect(taken.client, request("a", LONG, version="v1", cache_salt=SALT))
    before = await idle(taken.client)
    assert before.kv_pages_kept > 0
    taken.take("v1")
    proof = await taken.proof()
    assert proof.device_bytes == before.arena_bytes_used > 0
    assert proof.host_bytes == before.host_bytes == taken.num_bytes("v1")
    assert proof.kv_bytes == before.kv_pages_kept * before.kv_page_bytes > 0
    await taken.assert_nothing_is_left()


@pytest.mark.parametrize("stepping", ["serial", "overlapped"])
async def test_a_running_stream_ends_on_its_version_and_only_then_all_is_free(started: Any, adapters: Any, stepping: str) -> None:
    taken = Taken(await started(stepping=stepping), adapters)
    taken.client.stage("v1", adapters["v1"][0])
    stream = taken.client.submit(request("a", LONG, version="v1", cache_salt=SALT, max_tokens=100))
    ids = list((await anext(stream)).ids)
    taken.take("v1")
    with pytest.raises(FailedPreconditionError, match="gone"):
        await collect(taken.client, request("late", LONG, version="v1", cache_salt=SALT))
    state = await taken.client.state()
    assert (state.leases, state.host_bytes, state.kv_pages_kept) == (1, 0, 0), "only what the stream needs is left"
    assert not taken.unloaded
    ids += [id_ async for delta in stream for id_ in delta.ids]
    assert ids == adapters["v1"][1].greedy(LONG, 100)
    proof = await taken.proof()
    assert proof.device_bytes > 0
    await taken.assert_nothing_is_left()


async def test_a_version_taken_away_while_it_loads_never_serves(
    started: Any, adapters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Taken(await started(), adapters)
    gate = Gate(taken.client, monkeypatch)
    taken.client.stage("v1", adapters["v1"][0])
    waits = asyncio.create_task(collect(taken.client, request("a", LONG, version="v1")))
    await gate.wait()
    taken.take("v1")
    state = await taken.client.state()
    assert state.arena_bytes_used > 0, "the copy is under way"
    assert not taken.unloaded
    gate.open()
    with pytest.raises(FailedPreconditionError, match="gone"):
        await waits
    assert (await taken.proof()).device_bytes == state.arena_bytes_used
    await taken.assert_nothing_is_left()


async def test_a_request_between_admission_and_load_is_failed_and_nothing_is_loaded(started: Any, adapters: Any) -> None:
    taken = Taken(await started(), adapters)
    asked = asyncio.Event()
    taken.client.on_wanted = lambda _: asked.set()
    waits = asyncio.create_task(collect(taken.client, request("a", LONG, version="v1")))
    await asked.wait()
    taken.client.stage("v1", adapters["v1"][0])
    taken.take("v1")
    taken.client.fail("v1", status="FAILED_PRECONDITION", message="gone")
    with pytest.raises(FailedPreconditionError, match="gone"):
        await waits
    proof = await taken.proof()
    assert (proof.device_bytes, proof.kv_bytes) == (0, 0)
    await taken.assert_nothing_is_left()


async def test_a_version_that_is_staged_again_meanwhile_comes_back(started: Any, adapters: Any) -> None:
    taken = Taken(await started(), adapters)
    taken.client.stage("v1", adapters["v1"][0])
    stream = taken.client.submit(request("a", LONG, version="v1", max_tokens=60))
    await anext(stream)
    taken.take("v1")
    taken.client.stage("v1", adapters["v1"][0])
    proof = await taken.proof()
    assert (proof.came_back, proof.device_bytes) == (True, 0)
    assert proof.host_bytes == taken.num_bytes("v1")
    assert await collect(taken.client, request("b", [9, 8], version="v1")) == adapters["v1"][1].greedy([9, 8], 8)
    async for _ in stream:
        pass
    assert (await idle(taken.client)).arena_bytes_used > 0


async def test_a_version_that_is_taken_twice_and_staged_meanwhile_is_answered_once_for_both(started: Any, adapters: Any) -> None:
    """The second time finds the first still open, since a stream runs: what comes back ends both."""
    taken = Taken(await started(), adapters)
    taken.client.stage("v1", adapters["v1"][0])
    stream = taken.client.submit(request("a", LONG, version="v1", max_tokens=60))
    await anext(stream)
    taken.take("v1")
    taken.take("v1")
    taken.client.stage("v1", adapters["v1"][0])
    proof = await taken.proof()
    assert (proof.came_back, proof.num_asked, proof.device_bytes) == (True, 2, 0)
    async for _ in stream:
        pass
    await collect(taken.client, request("b", [9, 8], version="v1"))
    assert (await idle(taken.client)).arena_bytes_used > 0
    assert len(taken.unloaded) == 1, "it came back; nothing is told when it makes room later"


async def test_every_time_that_a_version_is_taken_is_answered(started: Any, adapters: Any) -> None:
    taken = Taken(await started(), adapters)
    taken.client.stage("v1", adapters["v1"][0])
    stream = taken.client.submit(request("a", LONG, version="v1", max_tokens=60))
    await anext(stream)
    for _ in range(3):
        taken.take("v1")
        taken.client.stage("v1", adapters["v1"][0])
    taken.take("v1")
    async for _ in stream:
        pass
    async with asyncio.timeout(60):
        while sum(event.num_asked for event in taken.unloaded) < 4:  # noqa: ASYNC110  the double only notes
            await asyncio.sleep(0.01)
    assert [event.came_back for event in taken.unloaded] == [True, True, True, False]
    await taken.assert_nothing_is_left()


def test_a_version_that_a_request_has_to_return_to_comes_back_with_what_was_open_before() -> None:
    """The first time begins; the second waits for a preempted request; staged again, both end."""
    adapters = FakeAdapters({"v1r8"})
    scheduler = make(num_pages=8, max_sequences=2, adapters=adapters)
    has_to_return = False
    unloads = Unloads(_Held(5), scheduler, page_bytes=1)  # type: ignore[arg-type]
    scheduler.has_to_return = lambda _version: has_to_return  # type: ignore[method-assign]
    unloads.ask("v1r8")
    assert unloads.settle() == [], "a lease is held"
    has_to_return = True
    unloads.ask("v1r8")
    assert unloads.settle() == []
    assert unloads.cancel("v1r8") == Unloaded("v1r8", host_bytes=7, came_back=True, num_asked=2)
    has_to_return = False
    assert unloads.settle() == [], "nothing is open any more"
    assert unloads.cancel("v1r8") is None


class _Held:
    """Adapters of which a copy is held whatever is told."""

    def __init__(self, arena_bytes: int) -> None:
        self.residency = self
        self._arena_bytes = arena_bytes

    def arena_bytes(self, _version: str) -> int:
        return self._arena_bytes

    def unstage(self, _version: str, *, drop_device: bool) -> int:
        assert drop_device
        return 7


async def test_a_version_that_the_engine_never_knew_is_gone_too(started: Any, tmp_path: Path, adapters: Any) -> None:
    taken = Taken(await started(), adapters)
    taken.take("nowhere")
    assert await taken.proof() == Unloaded("nowhere")


@pytest.mark.parametrize("dropped", [False, True])
def test_a_stream_whose_reader_is_slow_keeps_a_lease_that_it_could_not_have_again(*, dropped: bool) -> None:
    adapters = FakeAdapters({"v1r8"})
    scheduler = make(num_pages=8, max_sequences=2, adapters=adapters)
    loop = Loop(scheduler)
    add(scheduler, submit("slow", version="v1r8", max_tokens=12))
    loop.turn()
    scheduler.pause("slow", paused=True)
    if dropped:
        adapters.dropped.add("v1r8")
    add(scheduler, submit("grows", 4, max_tokens=28, tenant="u"))
    loop.run()
    assert loop.finished == {"grows": "length"}
    assert scheduler.num_waiting == 1, "the slow one gave up its pages"
    assert bool(adapters.leases) is dropped
    scheduler.pause("slow", paused=False)
    loop.run()
    assert loop.outputs["slow"] == expected((1, 2, 3, 4), 12, ())
    assert_idle(scheduler, adapters)


def test_a_version_that_could_not_come_back_makes_no_room_for_a_tenant_below_its_share() -> None:
    for dropped in (set[str](), {"v2r8"}):
        adapters = FakeAdapters({"v1r8", "v2r8"})
        adapters.num_slots = 2
        adapters.starved.add("v9r8")
        adapters.dropped = dropped
        scheduler = make(max_sequences=4, adapters=adapters)
        loop = Loop(scheduler)
        for name, version in (("old", "v1r8"), ("new", "v2r8")):
            add(scheduler, submit(name, version=version, max_tokens=25))
        loop.turn()
        add(scheduler, submit("starved", version="v9r8", tenant="u"))
        for _ in range(20):
            loop.turn()
        assert adapters.reserved == ([] if dropped else ["v9r8"])
        assert ("v2r8" in adapters.leases.values()) is bool(dropped)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_that_has_begun_and_waits_for_its_version_again_has_to_return(*, has_begun: bool) -> None:
    adapters = FakeAdapters({"v1r8"} if has_begun else set())
    scheduler = make(num_pages=8, max_sequences=2, adapters=adapters)
    loop = Loop(scheduler)
    add(scheduler, submit("slow", version="v1r8", max_tokens=12))
    loop.turn()
    scheduler.pause("slow", paused=True)
    add(scheduler, submit("grows", 4, max_tokens=28, tenant="u"))
    loop.run()
    assert scheduler.has_to_return("v1r8") is has_begun
