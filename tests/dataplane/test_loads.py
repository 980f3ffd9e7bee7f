"""Loads end when nobody waits, yield to those that are waited for, and harm no other version whatever happens to one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.transfer import Pace
from tests.dataplane.doubles import OTHER, VERSION, until
from tests.dataplane.scripted_store import fail, hang, rigged, to_the_end, version
from veneer.errors import FailedPreconditionError, UnavailableError, VeneerError


async def test_a_load_that_nobody_waits_for_any_more_is_cancelled(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        rig.store.behave[VERSION] = hang
        claims = [rig.prefetcher.ensure(VERSION)]
        await until(lambda: rig.store.running[VERSION])
        claims[0].release()
        assert rig.prefetcher.num_loads == 0
        await until(lambda: not rig.store.running[VERSION])
        assert rig.registry.get_sample_value("veneer_adapter_load_cancellations_total") == 1


async def test_one_that_waits_in_line_is_cancelled_before_it_begins(tmp_path: Path) -> None:
    async with rigged(tmp_path, max_fetches=1) as rig:
        rig.store.behave[VERSION] = hang
        first, second = rig.prefetcher.ensure(VERSION), rig.prefetcher.ensure(OTHER)
        await until(lambda: rig.store.running[VERSION])
        second.release()
        first.release()
        await until(lambda: not rig.store.running.total())
        assert rig.store.num_begun == {VERSION: 1}


async def test_it_goes_on_while_anybody_waits(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        come = asyncio.Event()
        rig.store.behave[VERSION] = lambda pace: come.wait()
        leaves, stays = rig.prefetcher.ensure(VERSION), rig.prefetcher.ensure(VERSION)
        await until(lambda: rig.store.running[VERSION])
        leaves.release()
        come.set()
        await stays.loaded


@pytest.mark.parametrize("why", ["asked for lately", "will ask again", "the engine waits"])
async def test_it_goes_on_for_those_who_will_ask_and_for_the_engine(tmp_path: Path, why: str) -> None:
    async with rigged(tmp_path) as rig:
        come = asyncio.Event()
        rig.store.behave[VERSION] = lambda pace: come.wait()
        if why == "asked for lately":
            rig.prefetcher.ensure(VERSION).release()
        claim = rig.prefetcher.ensure(VERSION)
        if why == "the engine waits":
            rig.prefetcher.want(VERSION)
        await until(lambda: rig.store.running[VERSION])
        claim.release(is_expected=why == "will ask again")
        assert rig.prefetcher.num_loads == 1
        come.set()
        await until(lambda: VERSION in rig.cache)
        await until(lambda: rig.prefetcher.num_loads == 0)


async def test_loads_that_requests_left_are_no_more_than_there_may_be_ahead(tmp_path: Path) -> None:
    async with rigged(tmp_path, max_ahead=4) as rig:
        for number in range(20):
            rig.store.behave[version(number)] = hang
            rig.prefetcher.ensure(version(number), "flood").release(is_expected=True)
        assert rig.prefetcher.num_loads == 4


async def test_a_tenants_limit_holds_for_loads_that_its_requests_left(tmp_path: Path) -> None:
    """As a request does that falls back at once, and comes again when its version is there."""
    async with rigged(tmp_path) as rig:
        for number in range(5):
            rig.prefetcher.ensure(version(number), "small", max_bytes=250).release(is_expected=True)
            await until(lambda: rig.prefetcher.num_loads == 0)
            claim = rig.prefetcher.ensure(version(number), "small", max_bytes=250)
            await claim.loaded
            claim.release()
        assert rig.cache.num_bytes == 200
        rig.store.behave[OTHER] = fail
        rig.prefetcher.ensure(OTHER, "small", max_bytes=250).release(is_expected=True)
        await until(lambda: rig.prefetcher.num_loads == 0)
        assert not rig.cache._coming
        assert OTHER not in rig.cache._payers


async def test_what_was_asked_for_long_ago_is_not_expected(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        rig.prefetcher.ensure(VERSION).release()
        rig.clock.now_s += 601
        rig.store.behave[VERSION] = hang
        rig.prefetcher.ensure(VERSION).release()
        assert rig.prefetcher.num_loads == 0


async def test_a_load_begun_anew_waits_for_the_end_of_the_cancelled_one(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        rig.store.behave[VERSION] = hang
        claim = rig.prefetcher.ensure(VERSION)
        await until(lambda: rig.store.running[VERSION])
        claim.release()
        del rig.store.behave[VERSION]
        await rig.prefetcher.ensure(VERSION).loaded
        assert rig.store.num_begun[VERSION] == 2


@pytest.mark.parametrize("num_between", [1, 3])
async def test_it_waits_for_that_end_however_many_were_cancelled_between(tmp_path: Path, num_between: int) -> None:
    async with rigged(tmp_path) as rig:
        go = asyncio.Event()
        rig.store.behave[VERSION] = lambda pace: to_the_end(go.wait())
        for number in range(1 + num_between):
            claim = rig.prefetcher.ensure(VERSION)
            await until(lambda: rig.store.running[VERSION])
            for _ in range(5):
                await asyncio.sleep(0)
            claim.release()
            rig.clock.now_s += 601  # nobody asked lately, so the next one is cancelled too
            assert rig.store.num_begun[VERSION] == 1, number
        last = rig.prefetcher.ensure(VERSION)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (rig.store.num_begun[VERSION], rig.store.running[VERSION]) == (1, 1)
        go.set()
        await last.loaded
        assert rig.store.num_begun[VERSION] == 2


async def test_closing_waits_for_what_cannot_be_broken_off(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        go = asyncio.Event()
        rig.store.behave[VERSION] = lambda pace: to_the_end(go.wait())
        for _ in range(2):
            claim = rig.prefetcher.ensure(VERSION)
            await until(lambda: rig.store.running[VERSION])
            claim.release()
            rig.clock.now_s += 601
        closing = asyncio.create_task(rig.prefetcher.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        go.set()
        await closing


async def test_eight_broken_versions_cost_only_their_own_callers(tmp_path: Path) -> None:
    """Two hang for ever, the others fail at once, again and again; a good one comes as if they were not there."""
    async with rigged(tmp_path, max_fetches=2, stall_s=0.02, load_timeout_s=1e9) as rig:
        for number in range(8):
            rig.store.behave[version(number)] = hang if number < 2 else fail
        broken = [rig.prefetcher.ensure(version(number), "broken") for number in range(8)]
        await until(lambda: rig.store.running.total() >= 2)
        for number in range(100, 110):
            await asyncio.wait_for(rig.prefetcher.ensure(version(number), "good").loaded, 60)
        assert not any(claim.loaded.done() for claim in broken)


async def test_a_load_ahead_is_tried_once_and_a_waited_one_until_its_time_is_up(tmp_path: Path) -> None:
    async with rigged(tmp_path, load_timeout_s=0.5) as rig:
        rig.store.behave = {VERSION: fail, OTHER: fail}
        rig.prefetcher.hint(VERSION)
        await until(lambda: rig.prefetcher.num_loads == 0)
        assert rig.store.num_begun[VERSION] == 1
        claim = rig.prefetcher.ensure(OTHER)
        await until(lambda: rig.store.num_begun[OTHER] >= 2)
        rig.clock.now_s += 1
        with pytest.raises(UnavailableError):
            await claim.loaded


async def test_a_probe_is_one_attempt_and_its_success_closes_the_circuit(tmp_path: Path) -> None:
    async with rigged(tmp_path, max_failures=1) as rig:
        rig.store.behave[VERSION] = fail
        claim = rig.prefetcher.ensure(VERSION)
        await until(lambda: rig.store.num_begun[VERSION])
        rig.clock.now_s += 31
        with pytest.raises(UnavailableError):
            await claim.loaded
        num_tried = rig.store.num_begun[VERSION]
        refused = rig.prefetcher.ensure(VERSION).loaded.exception()
        assert isinstance(refused, UnavailableError)
        assert refused.retry_after_s == 1

        rig.clock.now_s += 1
        probes = [rig.prefetcher.ensure(VERSION) for _ in range(5)]
        for probe in probes:
            with pytest.raises(UnavailableError):
                await asyncio.wait_for(probe.loaded, 60)
        assert rig.store.num_begun[VERSION] == num_tried + 1
        assert [circuit.failures for circuit in rig.prefetcher.circuits()] == [2]

        rig.clock.now_s += 2
        del rig.store.behave[VERSION]
        await rig.prefetcher.ensure(VERSION).loaded
        assert rig.prefetcher.circuits() == []


async def test_a_request_behind_a_flood_of_another_tenant_goes_next(tmp_path: Path) -> None:
    async with rigged(tmp_path, max_fetches=2) as rig:
        rig.store.behave = {version(number): hang for number in range(20)}
        flood = [rig.prefetcher.ensure(version(number), "flood") for number in range(20)]
        await until(lambda: rig.store.running.total() == 2)
        small = rig.prefetcher.ensure(OTHER, "small")
        await asyncio.sleep(0)
        flood[0].release()
        await asyncio.wait_for(small.loaded, 60)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "leave", "leave and expect", "hint", "expect", "want", "come", "break", "mend", "turn"]),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=80, deadline=None)
def test_whatever_order_things_happen_in_everybody_hears_and_nothing_is_left(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    asyncio.run(races(tmp_path_factory.mktemp("races"), steps))


async def races(folder: Path, steps: list[tuple[str, int]]) -> None:
    async with rigged(folder, load_timeout_s=0.0, max_ahead=3) as rig:
        gates = {version(number): asyncio.Event() for number in range(4)}
        broken: set[str] = set()
        lasting = {version(0), version(1)}  # what they do cannot be broken off

        def gated(name: str) -> Callable[[Pace], Any]:
            async def act(pace: Pace) -> None:
                await (to_the_end(gates[name].wait()) if name in lasting else gates[name].wait())
                await pace(100)
                if name in broken:
                    raise FailedPreconditionError("broken")

            return act

        rig.store.behave = {name: gated(name) for name in gates}
        held: list[tuple[str, Any]] = []
        for what, number in steps:
            name = version(number)
            match what:
                case "ask":
                    held.append((name, rig.prefetcher.ensure(name, f"tenant-{number % 2}")))
                case "leave" | "leave and expect":
                    mine = next((one for one in held if one[0] == name), None)
                    if mine is not None:
                        held.remove(mine)
                        mine[1].release(is_expected=what == "leave and expect")
                case "hint":
                    rig.prefetcher.hint(name)
                case "expect":
                    rig.prefetcher.expect(name)
                case "want":
                    rig.prefetcher.want(name)
                case "come":
                    gates[name].set()
                case "break":
                    broken.add(name)
                case "mend":
                    broken.discard(name)
                    rig.prefetcher.recheck(name)
                case "turn":
                    await asyncio.sleep(0)
            assert rig.store.running.total() <= 2 + 1 + 4
        for gate in gates.values():
            gate.set()
        for name, claim in held:
            await asyncio.wait({claim.loaded}, timeout=60)
            assert claim.loaded.done(), name
            error = claim.loaded.exception()
            assert error is None or isinstance(error, VeneerError)
            assert (error is None) or name in broken or rig.prefetcher.circuits()
            claim.release()
        await until(lambda: rig.prefetcher.num_loads == 0)
        assert not rig.prefetcher._claims
        assert not rig.cache._coming
        assert rig.cache._in_use == {}
