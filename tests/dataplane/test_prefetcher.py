"""What requests, the engine, traffic and hints ask for is told to the engine once, failed to everybody who waits, and counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from dataplane.engine.messages import Unloaded
from dataplane.loads import LoadLimits
from dataplane.lora.host_cache import HostCache, TenantHostFullError, TenantHostLimitError
from dataplane.metrics import Metrics
from dataplane.prefetcher import Prefetcher
from dataplane.transfer import Pace
from dataplane.unloads import Unloads
from tests.dataplane.doubles import OTHER, VERSION, ScriptedEngine, make_metrics, until
from veneer.errors import FailedPreconditionError, NotFoundError, UnavailableError, VeneerError

THIRD = "d" * 64


class Fetches:
    """A store that writes an image of 100 bytes when the test lets it."""

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache
        self.started: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        self.errors: list[Exception] = []
        self.on_stored: Callable[[], object] = lambda: None
        self.on_evicted: Callable[[tuple[str, ...]], object] = lambda _: None

    async def fetch(self, version: str, *, pace: Pace, is_ahead: Callable[[], bool]) -> Path:
        self.started.append(version)
        await self.open.wait()
        await pace(100)
        if self.errors:
            raise self.errors.pop(0)
        path = self._cache.path(version)
        self.on_evicted(self._cache.reserve(version, size_bytes=100, ahead=is_ahead()))
        path.write_bytes(b"i" * 100)
        self._cache.add(version, size_bytes=100)
        self.on_stored()
        return path


class Rig:
    """A prefetcher with a scripted store, engine and control plane."""

    def __init__(self, folder: Path) -> None:
        self.cache = HostCache(folder, dtype="float32", max_bytes=1000)
        self.store = Fetches(self.cache)
        self.engine = ScriptedEngine()
        self.skipped_s = 0.0
        self.refused: dict[str, VeneerError] = {}
        self.registry = CollectorRegistry()
        self.unloads = Unloads(make_metrics())
        self.prefetcher = Prefetcher(
            store=self.store,
            cache=self.cache,
            engine=self.engine,
            may_serve=self.may_serve,
            metrics=Metrics(self.registry, base_name="tiny"),
            unloads=self.unloads,
            limits=LoadLimits(load_timeout_s=0.5, max_ahead=2, max_failures=2, restage_bytes=250),
            clock=lambda: time.monotonic() + self.skipped_s,
        )
        self.store.on_evicted = self.prefetcher.evicted
        self.asked: list[str] = []
        self.was_asked = asyncio.Event()

    async def may_serve(self, version: str) -> object:
        self.asked.append(version)
        self.was_asked.set()
        if version in self.refused:
            raise self.refused[version]
        return None

    def ahead(self, outcome: str, source: str = "hinted") -> float:
        labels = {"source": source, "outcome": outcome}
        return self.registry.get_sample_value("veneer_adapter_prefetch_total", labels) or 0.0

    def staged(self, version: str) -> tuple[str, ...]:
        return ("stage", version, str(self.cache.path(version)))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    background = asyncio.create_task(made.prefetcher.run())
    yield made
    background.cancel()
    await asyncio.gather(background, return_exceptions=True)
    await made.prefetcher.close()
    assert made.prefetcher.num_loads == 0


async def test_requests_for_one_version_share_one_load(rig: Rig) -> None:
    claims = [rig.prefetcher.ensure(VERSION) for _ in range(20)]
    await asyncio.gather(*(claim.loaded for claim in claims))
    assert rig.store.started == [VERSION]
    assert rig.engine.calls == [rig.staged(VERSION)]


async def test_what_is_in_host_memory_is_staged_without_a_load_and_only_once(rig: Rig) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.forget_engine()
    for _ in range(3):
        assert rig.prefetcher.ensure(VERSION).loaded.done()
    assert rig.store.started == [VERSION]
    assert rig.engine.calls == [rig.staged(VERSION)] * 2


async def test_what_is_on_the_device_needs_no_host_image(rig: Rig) -> None:
    rig.prefetcher.moved(VERSION, "device", seconds=0.1)
    assert rig.prefetcher.ensure(VERSION).loaded.done()
    rig.prefetcher.moved(VERSION, "host", seconds=0)
    await rig.prefetcher.ensure(VERSION).loaded
    assert rig.store.started == [VERSION]


async def test_an_image_is_kept_while_a_claim_is_held(rig: Rig) -> None:
    claim = rig.prefetcher.ensure(VERSION)
    await claim.loaded
    assert rig.cache.reserve(OTHER, size_bytes=900) == ()
    rig.cache.cancel(OTHER)
    claim.release()
    claim.release()
    assert rig.cache.reserve(OTHER, size_bytes=1000) == (VERSION,)


async def test_an_image_that_made_room_is_taken_from_the_engine_and_fetched_again_when_wanted(rig: Rig) -> None:
    claim = rig.prefetcher.ensure(VERSION)
    await claim.loaded
    claim.release()
    rig.prefetcher.evicted(rig.cache.reserve(OTHER, size_bytes=1000))
    rig.cache.cancel(OTHER)
    assert rig.engine.calls[-1] == ("unstage", VERSION, "")
    rig.prefetcher.want(VERSION)
    await rig.prefetcher.ensure(VERSION).loaded
    assert rig.store.started == [VERSION] * 2
    assert rig.engine.calls[-1] == rig.staged(VERSION)


async def test_a_store_that_is_away_for_a_while_is_tried_again(rig: Rig) -> None:
    rig.store.errors = [UnavailableError("away")]
    await rig.prefetcher.ensure(VERSION).loaded
    assert rig.store.started == [VERSION] * 2


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ([UnavailableError("away")] * 20, "UNAVAILABLE"),
        ([FailedPreconditionError("corrupt")], "FAILED_PRECONDITION"),
        ([OSError("disk")], "INTERNAL"),
    ],
)
async def test_a_load_that_fails_for_good_tells_everybody_and_is_forgotten(
    rig: Rig, errors: list[Exception], status: str
) -> None:
    rig.store.errors = list(errors)
    claims = [rig.prefetcher.ensure(VERSION) for _ in range(2)]
    for claim in claims:
        with pytest.raises(VeneerError) as caught:
            await claim.loaded
        assert caught.value.status == status
    assert rig.engine.calls == [("fail", VERSION, status)]
    rig.store.errors = []
    rig.prefetcher.recheck(VERSION)
    await rig.prefetcher.ensure(VERSION).loaded


async def test_a_slow_load_delays_no_other_version(rig: Rig) -> None:
    rig.store.open.clear()
    slow = rig.prefetcher.ensure(VERSION)
    rig.cache.path(OTHER).write_bytes(b"i" * 100)
    rig.cache.add(OTHER, size_bytes=100)
    assert rig.prefetcher.ensure(OTHER).loaded.done()
    assert not slow.loaded.done()
    rig.store.open.set()
    await slow.loaded


async def test_a_corrupt_image_is_fetched_again_once(rig: Rig) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    await rig.prefetcher.ensure(VERSION).loaded
    assert rig.store.started == [VERSION] * 2
    rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    assert rig.engine.calls[-1] == ("fail", VERSION, "FAILED_PRECONDITION")
    assert not rig.cache.path(VERSION).exists()
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.moved(VERSION, "device", seconds=0.1)
    assert rig.store.started == [VERSION] * 3


async def test_a_hint_stages_ahead_of_requests(rig: Rig) -> None:
    rig.store.open.clear()
    rig.prefetcher.hint(VERSION)
    await until(lambda: rig.store.started)
    claim = rig.prefetcher.ensure(VERSION)
    rig.store.open.set()
    await claim.loaded
    assert rig.store.started == [VERSION]


async def test_hints_beyond_what_may_wait_are_dropped(rig: Rig) -> None:
    rig.store.open.clear()
    for number in range(50):
        rig.prefetcher.hint(f"{number:064x}")
    await until(lambda: rig.store.started)
    assert rig.prefetcher.num_loads == 2
    assert (rig.ahead("started"), rig.ahead("dropped")) == (2, 48)
    rig.store.open.set()


async def test_hints_never_make_others_leave(rig: Rig) -> None:
    rig.cache.path(OTHER).write_bytes(b"i" * 950)
    rig.cache.add(OTHER, size_bytes=950)
    rig.prefetcher.hint(VERSION)
    assert rig.ahead("no_room") == 1
    rig.cache.remove(OTHER)
    rig.prefetcher.hint(THIRD)
    await until(lambda: THIRD in rig.cache)
    assert rig.store.started == [THIRD]


async def test_what_came_ahead_was_of_use_late_or_in_vain(rig: Rig) -> None:
    rig.prefetcher.hint(VERSION)
    rig.prefetcher.expect(OTHER)
    await until(lambda: rig.prefetcher.num_loads == 0)
    for _ in range(2):
        rig.prefetcher.ensure(VERSION).release()
    assert (rig.ahead("used"), rig.ahead("late"), rig.ahead("wasted")) == (1, 0, 0)
    rig.prefetcher.evicted((VERSION, OTHER))
    assert (rig.ahead("wasted"), rig.ahead("wasted", "expected")) == (0, 1)

    rig.store.open.clear()
    rig.prefetcher.hint(THIRD)
    claim = rig.prefetcher.ensure(THIRD)
    rig.store.open.set()
    await claim.loaded
    assert (rig.ahead("late"), rig.ahead("used")) == (1, 1)


async def test_what_is_held_already_is_not_brought_ahead(rig: Rig) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.hint(VERSION)
    rig.prefetcher.moved(OTHER, "device", seconds=0.1)
    rig.prefetcher.expect(OTHER)
    assert (rig.ahead("held"), rig.ahead("held", "expected"), rig.prefetcher.num_loads) == (1, 1, 0)


async def test_a_claim_says_where_the_version_was(rig: Rig) -> None:
    first = rig.prefetcher.ensure(VERSION)
    await first.loaded
    second = rig.prefetcher.ensure(VERSION)
    rig.prefetcher.moved(VERSION, "device", seconds=0.1)
    assert [claim.level for claim in (first, second, rig.prefetcher.ensure(VERSION))] == ["store", "host", "device"]


async def test_requests_for_what_fails_again_and_again_are_answered_without_a_load(rig: Rig) -> None:
    rig.store.errors = [FailedPreconditionError("corrupt")]
    with pytest.raises(FailedPreconditionError):
        await rig.prefetcher.ensure(VERSION).loaded
    for _ in range(5):
        claim = rig.prefetcher.ensure(VERSION)
        assert isinstance(claim.loaded.exception(), FailedPreconditionError)
        claim.release()
    rig.prefetcher.want(VERSION)
    assert rig.engine.calls == [("fail", VERSION, "FAILED_PRECONDITION")] * 2
    rig.prefetcher.hint(VERSION)
    assert (rig.ahead("broken"), rig.store.started) == (1, [VERSION])
    await rig.prefetcher.ensure(OTHER).loaded


async def test_a_change_of_the_catalogue_lets_it_be_tried_again(rig: Rig) -> None:
    rig.store.errors = [FailedPreconditionError("corrupt")]
    with pytest.raises(FailedPreconditionError):
        await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.recheck(VERSION)
    await rig.prefetcher.ensure(VERSION).loaded


async def test_an_image_that_is_lost_after_it_was_there_is_told_to_who_holds_a_claim(rig: Rig) -> None:
    claim = rig.prefetcher.ensure(VERSION)
    await claim.loaded
    rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    await until(lambda: rig.prefetcher.num_loads == 0)
    assert claim.lost is None
    rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    assert isinstance(claim.lost, FailedPreconditionError)


async def test_a_hint_for_what_does_not_exist_costs_one_question(rig: Rig) -> None:
    rig.store.errors = [FailedPreconditionError("the version cannot be served any more")]
    rig.prefetcher.hint(VERSION)
    rig.prefetcher.hint(OTHER)
    await until(lambda: OTHER in rig.cache)
    assert sorted(rig.store.started) == [VERSION, OTHER]


@pytest.mark.parametrize("error", [NotFoundError("gone"), FailedPreconditionError("quarantined")])
async def test_a_version_that_may_not_be_served_any_more_is_dropped_everywhere(rig: Rig, error: VeneerError) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.refused[VERSION] = error
    rig.prefetcher.recheck(VERSION)
    await until(lambda: rig.engine.calls[-1][0] == "unstage")
    assert rig.engine.calls[-1] == ("unstage", VERSION, "drop")
    assert not rig.cache.path(VERSION).exists()


async def test_a_version_stays_while_the_control_plane_is_away_or_content(rig: Rig) -> None:
    for version in (VERSION, OTHER):
        await rig.prefetcher.ensure(version).loaded
    rig.refused[VERSION] = UnavailableError("away")
    rig.prefetcher.recheck_all()
    while len(rig.asked) < 2:
        await rig.was_asked.wait()
        rig.was_asked.clear()
    await asyncio.sleep(0)
    assert set(rig.cache.versions()) == {VERSION, OTHER}


async def test_nobody_is_asked_about_a_version_that_is_not_held(rig: Rig) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.recheck(THIRD)
    rig.prefetcher.recheck(VERSION)
    await rig.was_asked.wait()
    assert rig.asked == [VERSION]


async def test_closing_ends_loads_and_those_who_wait(rig: Rig) -> None:
    rig.store.open.clear()
    claims = [rig.prefetcher.ensure(VERSION)]
    await until(lambda: rig.store.started)
    claims.append(rig.prefetcher.ensure(OTHER))
    await rig.prefetcher.close()
    assert rig.prefetcher.num_loads == 0
    for claim in claims:
        with pytest.raises(UnavailableError, match="stopping"):
            await claim.loaded


async def test_a_version_that_was_retired_while_it_was_loaded_never_reaches_the_engine(rig: Rig) -> None:
    rig.store.open.clear()
    claim = rig.prefetcher.ensure(VERSION)
    await asyncio.sleep(0)
    rig.prefetcher.recheck(VERSION)
    rig.refused[VERSION] = FailedPreconditionError("retired")
    rig.store.open.set()
    with pytest.raises(FailedPreconditionError, match="any more"):
        await claim.loaded
    assert ("unstage", VERSION, "drop") in rig.engine.calls
    assert rig.staged(VERSION) not in rig.engine.calls
    assert rig.cache.versions() == ()
    rig.prefetcher.unloaded(Unloaded(VERSION))
    unload = rig.unloads.last(VERSION)
    assert unload is not None
    assert unload.disk_bytes == 100


async def test_a_version_that_changed_while_it_was_loaded_is_served_while_nobody_can_be_asked(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.prefetcher._RECHECK_AGAIN_S", 0.01)
    rig.store.open.clear()
    claim = rig.prefetcher.ensure(VERSION)
    await asyncio.sleep(0)
    rig.prefetcher.recheck(VERSION)
    rig.refused[VERSION] = UnavailableError("away")
    rig.store.open.set()
    await claim.loaded
    rig.refused[VERSION] = FailedPreconditionError("retired")
    await until(lambda: ("unstage", VERSION, "drop") in rig.engine.calls)
    assert rig.cache.versions() == ()


async def test_a_version_that_is_unloaded_goes_from_engine_and_disk_and_comes_back_for_a_request(rig: Rig) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.unload(VERSION)
    assert rig.engine.calls[-1] == ("unstage", VERSION, "drop")
    assert rig.cache.versions() == ()
    assert rig.unloads.num_pending == 1
    await rig.prefetcher.ensure(VERSION).loaded
    assert rig.store.started == [VERSION, VERSION]


async def test_a_question_that_the_control_plane_could_not_answer_is_asked_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.prefetcher._RECHECK_AGAIN_S", 0.01)
    await rig.prefetcher.ensure(VERSION).loaded
    rig.refused[VERSION] = UnavailableError("away")
    rig.prefetcher.recheck(VERSION)
    await until(lambda: len(rig.asked) >= 2)
    rig.refused[VERSION] = FailedPreconditionError("retired")
    await until(lambda: rig.cache.versions() == ())


async def test_what_made_room_again_before_it_was_staged_is_not_told_to_the_engine(rig: Rig) -> None:
    rig.store.on_stored = lambda: rig.cache.reserve(OTHER, size_bytes=1000)
    rig.prefetcher.hint(VERSION)
    await until(lambda: rig.store.started == [VERSION] and rig.prefetcher.num_loads == 0)
    assert rig.engine.calls == []


async def test_an_image_that_made_room_before_it_was_opened_is_not_taken_for_corrupt(rig: Rig) -> None:
    for _ in range(3):
        claim = rig.prefetcher.ensure(VERSION)
        await claim.loaded
        claim.release()
        rig.prefetcher.evicted(rig.cache.reserve(OTHER, size_bytes=1000))
        rig.cache.cancel(OTHER)
        rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    assert rig.store.started == [VERSION] * 3
    assert ("fail", VERSION, "FAILED_PRECONDITION") not in rig.engine.calls


async def test_what_is_too_large_for_one_tenant_is_loaded_for_another_at_once(rig: Rig) -> None:
    rig.store.errors = [TenantHostLimitError("small may have 60", tenant="small") for _ in range(5)]
    with pytest.raises(TenantHostLimitError):
        await rig.prefetcher.ensure(VERSION, "small", max_bytes=60).loaded
    rig.store.errors.clear()
    await rig.prefetcher.ensure(VERSION, "owner").loaded


@pytest.mark.parametrize("kind", [TenantHostLimitError, TenantHostFullError])
async def test_a_tenant_reads_nothing_of_anothers_limit_that_ends_the_load_for_both(
    rig: Rig, kind: type[TenantHostLimitError | TenantHostFullError]
) -> None:
    rig.store.open.clear()
    rig.store.errors = [kind("small may have 60 and uses 40", tenant="small") for _ in range(100)]
    small = rig.prefetcher.ensure(VERSION, "small", max_bytes=60)
    owner = rig.prefetcher.ensure(VERSION, "owner")
    rig.store.open.set()
    with pytest.raises(kind):
        await small.loaded
    with pytest.raises(UnavailableError) as refused:
        await owner.loaded
    assert "small" not in refused.value.message
    assert refused.value.retry_after_s
    assert rig.engine.calls == [("fail", VERSION, "UNAVAILABLE")]


async def test_a_version_is_in_use_from_its_load_to_the_end_of_the_last_request_and_for_a_while_after(rig: Rig) -> None:
    assert not rig.prefetcher.is_in_use(VERSION)
    rig.store.open.clear()
    rig.prefetcher.hint(VERSION)
    assert rig.prefetcher.is_in_use(VERSION), "it is on its way"
    rig.store.open.set()
    await until(lambda: rig.prefetcher.num_loads == 0)
    assert not rig.prefetcher.is_in_use(VERSION)
    claims = [rig.prefetcher.ensure(VERSION) for _ in range(2)]
    rig.skipped_s = 1000.0
    for claim in claims:
        assert rig.prefetcher.is_in_use(VERSION), "a request waits for it or runs"
        claim.settle()
        claim.settle()
        assert rig.prefetcher.is_in_use(VERSION), "a request runs with it"
    assert rig.cache.reserve(OTHER, size_bytes=1000) == (VERSION,), "the engine has a copy"
    rig.cache.cancel(OTHER)
    for claim in claims:
        assert rig.prefetcher.is_in_use(VERSION)
        claim.release()
        claim.release()
        claim.settle()
    assert not rig.prefetcher.is_in_use(VERSION)
    rig.prefetcher.ensure(VERSION).release()
    assert rig.prefetcher.is_in_use(VERSION), "it was asked for just now"
    rig.skipped_s = 2000.0
    assert not rig.prefetcher.is_in_use(VERSION)


async def test_a_new_engine_is_told_of_what_was_asked_for_lately_as_far_as_its_device_has_room(rig: Rig) -> None:
    for version in (VERSION, OTHER, THIRD):
        claim = rig.prefetcher.ensure(version)
        await claim.loaded
        claim.release()
    rig.prefetcher.hint("e" * 64)
    await until(lambda: rig.prefetcher.num_loads == 0)
    rig.prefetcher.ensure(VERSION).release()
    rig.engine.calls.clear()
    rig.prefetcher.forget_engine()
    assert rig.engine.calls == []
    rig.prefetcher.meet_engine()
    assert rig.engine.calls == [rig.staged(VERSION), rig.staged(THIRD)], "the last ones, and two have room"
    rig.prefetcher.ensure(THIRD).release()
    rig.prefetcher.ensure(OTHER).release()
    assert rig.engine.calls[2:] == [rig.staged(OTHER)]


async def test_a_new_engine_is_not_told_of_what_is_gone_or_was_asked_for_long_ago(rig: Rig) -> None:
    for version in (VERSION, OTHER):
        claim = rig.prefetcher.ensure(version)
        await claim.loaded
        claim.release()
    rig.cache.remove(OTHER)
    rig.engine.calls.clear()
    rig.prefetcher.forget_engine()
    rig.skipped_s = 10_000.0
    rig.prefetcher.meet_engine()
    assert rig.engine.calls == []
    rig.skipped_s = 0.0
    rig.prefetcher.meet_engine()
    assert rig.engine.calls == [rig.staged(VERSION)]


def lay(cache: HostCache, version: str, *, size_bytes: int) -> None:
    cache.path(version).write_bytes(b"i" * size_bytes)
    cache.add(version, size_bytes=size_bytes)


async def test_what_comes_ahead_takes_free_room_alone_and_goes_before_what_was_asked_for(rig: Rig) -> None:
    lay(rig.cache, OTHER, size_bytes=700)
    rig.store.open.clear()
    rig.prefetcher.hint(VERSION)
    await until(lambda: rig.store.started)
    lay(rig.cache, THIRD, size_bytes=250)
    rig.store.open.set()
    await until(lambda: rig.prefetcher.num_loads == 0)
    assert set(rig.cache.versions()) == {OTHER, THIRD}
    assert (rig.ahead("no_room"), rig.ahead("failed"), rig.prefetcher.circuits()) == (1, 0, [])
    assert rig.engine.calls == [], "nobody waits, nobody is told"
    rig.cache.remove(THIRD)
    rig.prefetcher.hint(VERSION)
    await until(lambda: VERSION in rig.cache)
    for version in "12":
        lay(rig.cache, version, size_bytes=80)
    claim = rig.prefetcher.ensure(THIRD)
    await claim.loaded
    assert set(rig.cache.versions()) == {OTHER, "1", "2", THIRD}, "it came last, and is the first to go"
    assert rig.ahead("wasted") == 1


async def test_what_a_request_asks_for_while_it_comes_ahead_has_the_room_of_others(rig: Rig) -> None:
    lay(rig.cache, OTHER, size_bytes=850)
    rig.store.open.clear()
    rig.prefetcher.hint(VERSION)
    await until(lambda: rig.store.started)
    lay(rig.cache, THIRD, size_bytes=100)
    claim = rig.prefetcher.ensure(VERSION)
    rig.store.open.set()
    await claim.loaded
    assert OTHER not in rig.cache
