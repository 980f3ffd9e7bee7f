"""Bytes of loads: those ahead keep to their rate, and all to the room that there is for what is under way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dataplane.load_room import Amount, NoRoomError
from dataplane.transfer import Pace
from tests.dataplane.doubles import OTHER, VERSION, until
from tests.dataplane.scripted_store import Rig, hang, rigged, version


async def drip(pace: Pace, *, pieces: int, size: int) -> None:
    for _ in range(pieces):
        await pace(size)


async def test_loads_ahead_take_no_more_bytes_than_they_may_and_requests_all_they_need(tmp_path: Path) -> None:
    """Forged hints for a hundred versions of 10 KB each; while the clock stands still the burst comes, and a piece in flight."""
    rate = 20_000
    async with rigged(tmp_path, prefetch_bytes_per_s=rate, max_ahead=100) as rig:
        taken = 0

        async def counted(pace: Pace) -> None:
            nonlocal taken
            for _ in range(10):
                taken += 1000
                await pace(1000)

        for number in range(100):
            rig.store.behave[version(number)] = counted
            rig.prefetcher.hint(version(number))
        await until(lambda: rig.store.running.total() and taken > rate)
        for _ in range(200):
            await asyncio.sleep(0)
        assert taken <= rate + 2 * 1000
        rig.store.behave[OTHER] = lambda pace: drip(pace, pieces=50, size=10_000)
        await asyncio.wait_for(rig.prefetcher.ensure(OTHER).loaded, 60)
        assert rig.registry.get_sample_value("veneer_adapter_prefetch_bytes_total") == taken


async def test_a_throttled_load_hurries_when_a_request_comes(tmp_path: Path) -> None:
    async with rigged(tmp_path, prefetch_bytes_per_s=1) as rig:
        rig.store.behave[VERSION] = lambda pace: drip(pace, pieces=20, size=10_000)
        rig.prefetcher.hint(VERSION)
        await until(lambda: rig.registry.get_sample_value("veneer_adapter_prefetch_bytes_total"))
        await asyncio.wait_for(rig.prefetcher.ensure(VERSION).loaded, 60)


MIB = 1 << 20
ROOM = {"memory_bytes": 10 * MIB, "disk_bytes": 100 * MIB, "max_fetches": 4}


def held(rig: Rig) -> Amount:
    """What the store itself knows to be under way."""
    total = Amount()
    for amount in rig.store.held.values():
        total = total.plus(amount)
    return total


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_loads_of_a_store_that_hangs_hold_no_more_than_the_room_and_all_come_when_it_goes_on(tmp_path: Path) -> None:
    """Places alone let twenty of these begin, since what stalls gives its place up."""
    async with rigged(tmp_path, stall_s=0.001, **ROOM) as rig:
        go = asyncio.Event()
        most = Amount()

        async def slow(pace: Pace) -> None:
            nonlocal most
            most = Amount(*map(max, most, held(rig)))
            await go.wait()
            await pace(1)

        names = [version(number) for number in range(40)]
        for name in names:
            rig.store.needs[name] = Amount(memory=3 * MIB, disk=MIB)
            rig.store.behave[name] = slow
        claims = [rig.prefetcher.ensure(name, f"tenant-{number % 5}") for number, name in enumerate(names)]
        await until(lambda: rig.store.running.total() > 4 and len(rig.store.held) == 3)
        await turns()
        go.set()
        await asyncio.wait_for(asyncio.gather(*(claim.loaded for claim in claims)), 60)
        assert most == Amount(memory=9 * MIB, disk=3 * MIB)
        assert rig.prefetcher._loads._room.held == Amount()


async def test_loads_ahead_give_their_room_to_a_request_at_once_and_it_is_nobodys_failure(tmp_path: Path) -> None:
    async with rigged(tmp_path, **ROOM) as rig:
        rig.store.needs = {VERSION: Amount(memory=10 * MIB), OTHER: Amount(memory=2 * MIB)}
        rig.store.behave[VERSION] = hang
        rig.prefetcher.hint(VERSION)
        await until(lambda: VERSION in rig.store.held)
        claim = rig.prefetcher.ensure(OTHER)
        await asyncio.wait_for(claim.loaded, 60)
        await until(lambda: rig.prefetcher.num_loads == 0)
        labels = {"source": "hinted", "outcome": "no_room"}
        assert rig.registry.get_sample_value("veneer_adapter_prefetch_total", labels) == 1
        assert rig.prefetcher.circuits() == []


async def test_a_load_ahead_that_waits_for_room_goes_before_others_once_a_request_wants_it(tmp_path: Path) -> None:
    async with rigged(tmp_path, **ROOM) as rig:
        names = [version(number) for number in range(3)]
        rig.store.needs = {**{name: Amount(memory=10 * MIB) for name in names}, OTHER: Amount(memory=10 * MIB)}
        go = asyncio.Event()
        rig.store.behave = {name: lambda pace: go.wait() for name in names}
        first = rig.prefetcher.ensure(names[0])
        await until(lambda: names[0] in rig.store.held)
        rig.prefetcher.hint(OTHER)
        await until(lambda: rig.store.running[OTHER])
        claims = [rig.prefetcher.ensure(OTHER), rig.prefetcher.ensure(names[1])]
        await until(lambda: rig.store.running[names[1]])
        rig.store.behave[OTHER] = hang
        go.set()
        await asyncio.wait_for(first.loaded, 60)
        await until(lambda: OTHER in rig.store.held)
        assert not claims[1].loaded.done()
        claims[0].release()
        await asyncio.wait_for(claims[1].loaded, 60)


async def test_who_brings_nothing_gives_its_room_up_when_a_read_has_had_its_time_and_is_tried_again(tmp_path: Path) -> None:
    async with rigged(tmp_path, hang_s=10.0, load_timeout_s=1e9, **ROOM) as rig:
        rig.store.needs = {VERSION: Amount(disk=100 * MIB), OTHER: Amount(disk=100 * MIB)}
        rig.store.behave[VERSION] = hang
        hanging = rig.prefetcher.ensure(VERSION, "unlucky")
        await until(lambda: VERSION in rig.store.held)
        claim = rig.prefetcher.ensure(OTHER, "other")
        await until(lambda: rig.store.running[OTHER])
        await turns()
        assert OTHER not in rig.store.held, "a slow read is no reason yet"
        rig.clock.now_s += 10.0
        rig.prefetcher._loads._room.settle()
        await asyncio.wait_for(claim.loaded, 60)
        del rig.store.behave[VERSION]
        await asyncio.wait_for(hanging.loaded, 60)
        assert rig.store.num_begun[VERSION] == 2


async def test_a_version_that_is_larger_than_all_room_has_it_alone(tmp_path: Path) -> None:
    async with rigged(tmp_path, **ROOM) as rig:
        rig.store.needs = {VERSION: Amount(memory=MIB, disk=1 << 40), OTHER: Amount(memory=MIB, disk=1)}
        go = asyncio.Event()
        rig.store.behave[VERSION] = lambda pace: go.wait()
        large = rig.prefetcher.ensure(VERSION)
        await until(lambda: VERSION in rig.store.held)
        small = rig.prefetcher.ensure(OTHER)
        await until(lambda: rig.store.running[OTHER])
        await turns()
        assert OTHER not in rig.store.held
        go.set()
        await asyncio.wait_for(asyncio.gather(large.loaded, small.loaded), 60)


async def test_who_finds_no_room_in_time_hears_so_and_the_version_is_not_blamed(tmp_path: Path) -> None:
    async with rigged(tmp_path, load_timeout_s=0.05, **ROOM) as rig:
        rig.store.needs = {VERSION: Amount(memory=10 * MIB), OTHER: Amount(memory=10 * MIB)}
        rig.store.behave[VERSION] = hang
        rig.prefetcher.ensure(VERSION)
        await until(lambda: VERSION in rig.store.held)
        claim = rig.prefetcher.ensure(OTHER)
        await until(lambda: rig.store.running[OTHER])
        rig.clock.now_s += 1.0
        with pytest.raises(NoRoomError):
            await asyncio.wait_for(claim.loaded, 60)
        assert rig.prefetcher.circuits() == []
