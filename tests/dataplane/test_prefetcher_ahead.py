"""What nobody asks for yet: brought into free room, passed over where it is in use, and told to a new engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.dataplane import scripted_store
from tests.dataplane.doubles import OTHER, VERSION, until
from tests.dataplane.prefetching import THIRD, Rig, lay, rigged
from veneer.errors import FailedPreconditionError


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rigged(tmp_path) as made:
        yield made


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


async def test_a_hint_for_what_does_not_exist_costs_one_question(rig: Rig) -> None:
    rig.store.errors = [FailedPreconditionError("the version cannot be served any more")]
    rig.prefetcher.hint(VERSION)
    rig.prefetcher.hint(OTHER)
    await until(lambda: OTHER in rig.cache)
    assert sorted(rig.store.started) == [VERSION, OTHER]


async def test_what_made_room_again_before_it_was_staged_is_not_told_to_the_engine(rig: Rig) -> None:
    rig.store.on_stored = lambda: rig.cache.reserve(OTHER, size_bytes=1000)
    rig.prefetcher.hint(VERSION)
    await until(lambda: rig.store.started == [VERSION] and rig.prefetcher.num_loads == 0)
    assert rig.engine.calls == []


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


async def test_the_many_hints_of_one_tenant_leave_a_place_to_each_other(rig: Rig) -> None:
    rig.store.open.clear()
    flood = [f"{number:064x}" for number in range(5)]
    for version in flood[:2]:
        rig.prefetcher.hint(version, "flood")
    await until(lambda: len(rig.store.started) == 2)
    rig.prefetcher.hint(VERSION, "small")
    assert (rig.ahead("started"), rig.ahead("dropped")) == (2, 1), "both of the flood have begun: what has is not broken off"
    rig.store.open.set()
    await until(lambda: rig.prefetcher.num_loads == 0)


async def test_what_waits_in_line_of_the_tenant_with_most_goes_for_one_with_fewer(tmp_path: Path) -> None:
    async with scripted_store.rigged(tmp_path, max_fetches=1, max_ahead=3) as rig:
        numbers = [scripted_store.version(number) for number in range(4)]
        rig.store.behave = dict.fromkeys(numbers, scripted_store.hang)
        for version in numbers[:3]:
            rig.prefetcher.expect(version, "flood")
        await until(lambda: rig.store.running[numbers[0]])
        rig.prefetcher.hint(VERSION, "small")
        rig.prefetcher.hint(numbers[3], "flood")
        rig.prefetcher.hint(OTHER, "other")
        rig.prefetcher.hint("e" * 64, "another")
        assert set(rig.prefetcher._loads.versions) == {numbers[0], VERSION, OTHER}
        claim = rig.prefetcher.ensure(numbers[0], "flood")
        await until(lambda: VERSION in rig.cache and OTHER in rig.cache)
        claim.release()


async def test_the_flood_of_one_tenants_hints_comes_after_the_others_however_early_it_came(tmp_path: Path) -> None:
    async with scripted_store.rigged(tmp_path, max_fetches=1, max_ahead=64) as rig:
        order: list[str] = []
        for number in range(60):
            name = scripted_store.version(number)

            async def note(pace: object, name: str = name) -> None:
                order.append(name)

            rig.store.behave[name] = note
            rig.prefetcher.hint(name, "flood" if number < 50 else f"tenant-{number % 5}")
        await until(lambda: rig.prefetcher.num_loads == 0)
        last = max(order.index(scripted_store.version(number)) for number in range(50, 60))
        assert last <= 12, "ten of five others, and a turn of the flood for every round"
        assert len(order) == 60
