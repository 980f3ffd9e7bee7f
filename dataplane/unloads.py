"""Versions that this node lets go: what came free of each, in every tier, when nothing is left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from dataplane.engine.messages import Unloaded
from dataplane.metrics import Metrics

_log = logging.getLogger(__name__)
_MAX_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Unload:
    """What came free of a version.

    Attributes:
        version: The version.
        device_bytes: Bytes of the arena.
        host_bytes: Bytes of its image that were mapped.
        disk_bytes: Bytes of its image file.
        kv_bytes: Bytes of KV pages that it computed and that were kept for reuse.
        seconds: From the decision until nothing was left.
        came_back: It was loaded again before its last lease was given back.
    """

    version: str
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    kv_bytes: int
    seconds: float
    came_back: bool = False


@dataclass(slots=True)
class _Pending:
    """What came free so far, and how often the engine was asked and has not answered yet."""

    started_s: float
    num_open: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    kv_bytes: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Unloads:
    """Owned by the event loop. Between `begin` and what the engine says, requests that have begun still use the version.

    A version may be staged and taken away again before the engine answered the first time. What it said then proves nothing of
    the second time, so one unload ends with the engine's last answer, and counts them all.

    Args:
        metrics: Sums what came free.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._pending: dict[str, _Pending] = {}
        self._last: OrderedDict[str, Unload] = OrderedDict()

    @property
    def num_pending(self) -> int:
        """Versions that requests still use."""
        return len(self._pending)

    def begin(self, version: str, *, disk_bytes: int) -> None:
        """Notes that a version goes, and that its file has gone; before the engine is told, once each time."""
        pending = self._pending.get(version)
        if pending is None:
            pending = self._pending[version] = _Pending(time.monotonic())
        pending.num_open += 1
        pending.disk_bytes += disk_bytes

    def finish(self, event: Unloaded) -> None:
        """Hears from the engine that nothing is left of a version, or that it came back."""
        pending = self._pending.get(event.version)
        if pending is None:
            return
        pending.num_open -= event.num_asked
        pending.device_bytes += event.device_bytes
        pending.host_bytes += event.host_bytes
        pending.kv_bytes += event.kv_bytes
        if pending.num_open > 0:
            return
        del self._pending[event.version]
        unload = Unload(
            event.version,
            device_bytes=pending.device_bytes,
            host_bytes=pending.host_bytes,
            disk_bytes=pending.disk_bytes,
            kv_bytes=pending.kv_bytes,
            seconds=time.monotonic() - pending.started_s,
            came_back=event.came_back,
        )
        self._last[event.version] = unload
        self._last.move_to_end(event.version)
        if len(self._last) > _MAX_KEPT:
            self._last.popitem(last=False)
        self._metrics.unloaded(
            {"device": unload.device_bytes, "host": unload.host_bytes, "disk": unload.disk_bytes, "kv": unload.kv_bytes}
        )
        _log.info(
            "a version was unloaded",
            extra={
                "version": unload.version,
                "device_bytes": unload.device_bytes,
                "host_bytes": unload.host_bytes,
                "disk_bytes": unload.disk_bytes,
                "kv_bytes": unload.kv_bytes,
                "seconds": round(unload.seconds, 3),
            },
        )
        pending.done.set()

    def engine_lost(self) -> None:
        """Hears that the engine ended: what it held went with it, uncounted."""
        for version, pending in list(self._pending.items()):
            self.finish(Unloaded(version, num_asked=pending.num_open))

    def last(self, version: str) -> Unload | None:
        """Returns what came free of a version the last time, if it is one of the last thousand."""
        return self._last.get(version)

    async def wait(self, version: str, *, timeout_s: float) -> bool:
        """Waits until nothing is left of a version that goes; returns False when the time is up."""
        pending = self._pending.get(version)
        if pending is None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await pending.done.wait()
        except TimeoutError:
            return False
        return True
