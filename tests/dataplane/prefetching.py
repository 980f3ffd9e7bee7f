"""A prefetcher with a store, an engine and a control plane that do what the test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from dataplane.load_room import Amount
from dataplane.loads import LoadLimits
from dataplane.lora.host_cache import HostCache
from dataplane.metrics import Metrics
from dataplane.prefetcher import Prefetcher
from dataplane.transfer import Pace, Room
from dataplane.unloads import Unloads
from tests.dataplane.doubles import ScriptedEngine, make_metrics
from veneer.errors import VeneerError

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

    async def fetch(self, version: str, *, pace: Pace, room: Room, is_ahead: Callable[[], bool]) -> Path:
        self.started.append(version)
        await self.open.wait()
        await room(Amount(memory=100))
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


@asynccontextmanager
async def rigged(folder: Path) -> AsyncIterator[Rig]:
    """A rig whose loads have all ended at its end."""
    made = Rig(folder)
    background = asyncio.create_task(made.prefetcher.run())
    try:
        yield made
    finally:
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
        await made.prefetcher.close()
        assert made.prefetcher.num_loads == 0


def lay(cache: HostCache, version: str, *, size_bytes: int) -> None:
    cache.path(version).write_bytes(b"i" * size_bytes)
    cache.add(version, size_bytes=size_bytes)
