"""Versions that are taken away: nothing new of them starts, what has begun ends, and what comes free is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dataplane.engine.adapters import DeviceAdapters
from dataplane.engine.messages import Unloaded
from dataplane.engine.scheduler import Scheduler


@dataclass(slots=True)
class _Unload:
    device_bytes: int = 0
    host_bytes: int = 0
    num_pages: int = 0
    num_asked: int = 0


class Unloads:
    """Takes versions away and tells when nothing is left of them. Owned by the step loop.

    A request that has begun keeps its lease; one that had to give it up for others and waits to go on holds the unload up until
    it has it again, since the image could not be loaded any more.

    Args:
        adapters: What the device and host memory hold.
        scheduler: Who uses it, and the pages that it computed.
        page_bytes: Bytes of a KV page.
    """

    def __init__(self, adapters: DeviceAdapters, scheduler: Scheduler, *, page_bytes: int) -> None:
        self._adapters = adapters
        self._scheduler = scheduler
        self._page_bytes = page_bytes
        self._asked: Counter[str] = Counter()
        self._begun: dict[str, _Unload] = {}

    def ask(self, version: str) -> None:
        """Takes a version away, now or as soon as what has begun allows it."""
        self._asked[version] += 1
        self._begin()

    def settle(self) -> list[Unloaded]:
        """Returns the versions of which nothing is left since the last call."""
        self._begin()
        done = []
        for version, unload in list(self._begun.items()):
            if not self._adapters.residency.arena_bytes(version):
                del self._begun[version]
                done.append(self._report(version, unload))
        return done

    def cancel(self, version: str) -> Unloaded | None:
        """Hears that a version is staged again; returns what of it came free, if it was being taken away."""
        unload = self._begun.pop(version, _Unload())
        unload.num_asked += self._asked.pop(version, 0)
        if not unload.num_asked:
            return None
        unload.device_bytes = 0
        return self._report(version, unload, came_back=True)

    def _begin(self) -> None:
        for version in [version for version in self._asked if not self._scheduler.has_to_return(version)]:
            unload = self._begun.setdefault(version, _Unload())
            unload.num_asked += self._asked.pop(version)
            unload.device_bytes = self._adapters.residency.arena_bytes(version)
            unload.host_bytes += self._adapters.unstage(version, drop_device=True)
            unload.num_pages += self._scheduler.prefix.bar(version)

    def _report(self, version: str, unload: _Unload, *, came_back: bool = False) -> Unloaded:
        kv_bytes = unload.num_pages * self._page_bytes
        return Unloaded(version, unload.device_bytes, unload.host_bytes, kv_bytes, came_back, unload.num_asked)
