"""Loads that were cancelled and still bring their file: it is not left where it may not be served, nor after an unload."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.dataplane.doubles import VERSION, until
from tests.dataplane.scripted_store import Rig, rigged
from veneer.errors import FailedPreconditionError


def stubborn(rig: Rig, ends: asyncio.Event) -> Any:
    """As a thread does that cannot be cancelled."""

    async def bring(_: object) -> None:
        try:
            await ends.wait()
        except asyncio.CancelledError:
            await ends.wait()
            rig.cache.path(VERSION).write_bytes(b"i" * 100)
            rig.cache.add(VERSION, size_bytes=100)
            raise

    return bring


async def test_what_was_retired_while_its_cancelled_load_finished_is_taken_away(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        ends = asyncio.Event()
        rig.store.behave[VERSION] = stubborn(rig, ends)
        acting = asyncio.create_task(rig.prefetcher.run())
        claim = rig.prefetcher.ensure(VERSION)
        await until(lambda: rig.store.running[VERSION])
        rig.prefetcher.recheck(VERSION)
        rig.refused[VERSION] = FailedPreconditionError("retired")
        claim.release()
        ends.set()
        await until(lambda: ("unstage", VERSION, "drop") in rig.engine.calls)
        assert VERSION not in rig.cache
        acting.cancel()


async def test_a_load_that_nobody_waits_for_is_over_when_it_is_broken_off(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        ends = asyncio.Event()
        rig.store.behave[VERSION] = stubborn(rig, ends)
        rig.prefetcher.hint(VERSION)
        await until(lambda: rig.store.running[VERSION])
        breaking = asyncio.create_task(rig.prefetcher.break_off(VERSION))
        await asyncio.sleep(0.01)
        assert not breaking.done()
        ends.set()
        assert await breaking
        assert not rig.store.running[VERSION]


async def test_a_load_that_a_request_waits_for_is_not_broken_off(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        ends = asyncio.Event()
        rig.store.behave[VERSION] = stubborn(rig, ends)
        claim = rig.prefetcher.ensure(VERSION)
        await until(lambda: rig.store.running[VERSION])
        assert not await rig.prefetcher.break_off(VERSION)
        ends.set()
        await claim.loaded
