"""A prefetcher over a store whose versions do what the test says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from dataplane.load_room import Amount
from dataplane.loads import LoadLimits
from dataplane.lora.host_cache import HostCache
from dataplane.metrics import Metrics
from dataplane.prefetcher import Prefetcher
from dataplane.transfer import Pace, Room
from dataplane.unloads import Unloads
from tests.dataplane.doubles import ScriptedEngine, make_metrics
from tests.dataplane.test_throttle import Clock
from veneer.errors import UnavailableError, VeneerError


class Store:
    """A store whose versions come, hang, fail or drip as the test says.

    Attributes:
        behave: What each version does, called for each attempt; what is not here comes at once.
        needs: What each version says that it takes.
        held: What those under way take.
        running: Attempts under way, by version.
        num_begun: Attempts so far, by version.
    """

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache
        self.behave: dict[str, Callable[[Pace], Any]] = {}
        self.needs: dict[str, Amount] = {}
        self.held: dict[str, Amount] = {}
        self.running: Counter[str] = Counter()
        self.num_begun: Counter[str] = Counter()
        self.max_running = 0
        self.evicted: list[str] = []

    async def fetch(self, version: str, *, pace: Pace, room: Room, is_ahead: Callable[[], bool]) -> Path:
        self.num_begun[version] += 1
        self.running[version] += 1
        self.max_running = max(self.max_running, self.running.total())
        assert self.running[version] == 1, "one load for each version at a time"
        try:
            if version in self.needs:
                await room(self.needs[version])
                self.held[version] = self.needs[version]
            if version in self.behave:
                await self.behave[version](pace)
            self.evicted += self._cache.reserve(version, size_bytes=100, ahead=is_ahead())
            path = self._cache.path(version)
            path.write_bytes(b"i" * 100)
            self._cache.add(version, size_bytes=100)
            return path
        finally:
            try:
                await asyncio.sleep(0)
            finally:  # it may be cancelled just here
                self.running[version] -= 1
                self.held.pop(version, None)


async def hang(pace: Pace) -> None:
    await asyncio.Event().wait()


async def fail(pace: Pace) -> None:
    raise UnavailableError("the store cannot be read")


class Rig:
    """A prefetcher over that store."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.cache = HostCache(folder, max_bytes=1 << 20, dtype="float32")
        self.store = Store(self.cache)
        self.engine = ScriptedEngine()
        self.registry = CollectorRegistry()
        self.clock = Clock()
        self.refused: dict[str, VeneerError] = {}
        self.prefetcher = Prefetcher(
            store=self.store,
            cache=self.cache,
            engine=self.engine,
            may_serve=self._may_serve,
            metrics=Metrics(self.registry, base_name="tiny"),
            unloads=Unloads(make_metrics()),
            limits=LoadLimits(**{"max_fetches": 2, "load_timeout_s": 30.0, "stall_s": 60.0, **limits}),
            clock=self.clock,
        )

    async def _may_serve(self, version: str) -> object:
        if version in self.refused:
            raise self.refused[version]
        return None


@asynccontextmanager
async def rigged(folder: Path, **limits: Any) -> AsyncIterator[Rig]:
    rig = Rig(folder, **limits)
    try:
        yield rig
    finally:
        await rig.prefetcher.close()
        assert rig.store.running.total() == 0
        assert rig.prefetcher.num_loads == 0


def version(number: int) -> str:
    return f"{number:064x}"


async def to_the_end(work: Awaitable[object]) -> None:
    """Waits for what cannot be broken off, as a thread cannot, also when cancelled."""
    call = asyncio.ensure_future(work)
    try:
        await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait({call})
        raise
