"""Brings versions from the store to host memory before, or as soon as, a request needs them.

Driven by requests (`ensure`), by the engine (`want`: a queued request found no image) and by hints (`hint`). One load for each
version at a time, whoever asked; loads run beside the serving path and never hold anything else up.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dataplane.engine.messages import Unloaded
from dataplane.lora.host_cache import HostCache
from dataplane.metrics import Metrics
from dataplane.unloads import Unloads
from veneer.errors import (
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    VeneerError,
)

_log = logging.getLogger(__name__)
_RECHECK_AGAIN_S = 1.0
_HINT_LEVEL = 0.9  # hints fill free room only: above this part of the host budget they are dropped


class ImageSink(Protocol):
    """What the prefetcher tells the engine."""

    def stage(self, version: str, path: str, /) -> None:
        """An image lies in host memory."""

    def unstage(self, version: str, /, *, drop_device: bool = False) -> None:
        """It does not any more."""

    def fail(self, version: str, status: str, message: str, /) -> None:
        """It cannot be had: requests that wait for it end."""


class Fetcher(Protocol):
    """What the prefetcher needs of the store."""

    async def fetch(self, version: str) -> Path:
        """Brings the version's image into the host cache."""


class Claim:
    """One request's interest in a version: its host image stays while the claim is held. Owned by the request.

    Attributes:
        loaded: Done when the image (or a device copy) is there; its exception says why it cannot be had.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.loaded.add_done_callback(lambda future: future.cancelled() or future.exception())  # seen, though nobody may ask
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Gives the claim back. Idempotent."""
        if self._release is not None:
            self._release()
            self._release = None


@dataclass(slots=True)
class _Load:
    task: asyncio.Task[None]
    claims: list[Claim] = field(default_factory=list)
    doubted: bool = False
    """The catalogue changed something about the version while it was on its way."""


class Prefetcher:
    """Owned by the event loop. Knows what the engine was told; the cache knows which files there are.

    Args:
        store: Fetches versions into the cache.
        cache: Host images.
        engine: Is told what is staged.
        may_serve: Asks the control plane whether a version may still be served: raises NotFoundError or FailedPreconditionError
            if not.
        metrics: Counts loads.
        unloads: Counts what comes free of versions that go.
        load_timeout_s: How long a load is retried.
        max_hints: Hints that may wait.
    """

    def __init__(
        self,
        *,
        store: Fetcher,
        cache: HostCache,
        engine: ImageSink,
        may_serve: Callable[[str], Awaitable[object]],
        metrics: Metrics,
        unloads: Unloads,
        load_timeout_s: float = 30.0,
        max_hints: int = 64,
    ) -> None:
        self._store = store
        self._cache = cache
        self._engine = engine
        self._may_serve = may_serve
        self._metrics = metrics
        self._unloads = unloads
        self._load_timeout_s = load_timeout_s
        self._loads: dict[str, _Load] = {}
        self._staged: set[str] = set()
        self._on_device: set[str] = set()
        self._distrusted: set[str] = set()
        self._hints: asyncio.Queue[str] = asyncio.Queue(max_hints)
        self._rechecks: dict[str, None] = {}
        self._recheck_asked = asyncio.Event()

    @property
    def num_loads(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def ensure(self, version: str) -> Claim:
        """Has the version's image brought to host memory and told to the engine; returns at once."""
        self._cache.hold(version)
        claim = Claim(lambda: self._cache.let_go(version))
        if version in self._on_device or self._stage_if_there(version):
            claim.loaded.set_result(None)
        else:
            self._load(version).claims.append(claim)
        return claim

    def want(self, version: str) -> None:
        """The engine has a queued request and knows no image."""
        self._on_device.discard(version)
        self._staged.discard(version)
        if not self._stage_if_there(version):
            self._load(version)

    def hint(self, version: str) -> None:
        """Advice that the version will be needed; dropped when there are too many."""
        try:
            self._hints.put_nowait(version)
        except asyncio.QueueFull:
            self._metrics.prefetched("dropped")

    def recheck(self, version: str) -> None:
        """The catalogue changed something about the version: ask whether what is held of it may still be served."""
        if version in self._loads:
            self._loads[version].doubted = True
        if self._is_held(version):
            self._rechecks[version] = None
            self._recheck_asked.set()

    def recheck_all(self) -> None:
        """As `recheck`, for everything held."""
        for version in {*self._cache.versions(), *self._staged, *self._on_device, *self._loads}:
            self.recheck(version)

    def unload(self, version: str) -> None:
        """Lets all of a version go that the node holds; it is loaded again when a request needs it and it may be served."""
        self._drop(version)

    def moved(self, version: str, place: str, *, seconds: float, reason: str = "") -> None:
        """The engine moved a version: to the device, off it and why, or found its image corrupt."""
        match place:
            case "device":
                self._on_device.add(version)
                self._distrusted.discard(version)
                self._metrics.loaded("host", "device", seconds)
            case "host":
                self._on_device.discard(version)
                self._metrics.evicted("device", reason)
            case _:
                self._replace(version)

    def evicted(self, versions: tuple[str, ...]) -> None:
        """Host images made room for others."""
        for version in versions:
            self._staged.discard(version)
            self._engine.unstage(version)
            self._metrics.evicted("disk", "room")

    def unloaded(self, event: Unloaded) -> None:
        """Nothing is left in the engine of a version that was dropped."""
        self._unloads.finish(event)

    def forget_engine(self) -> None:
        """There is no engine, or a new one that knows no image yet."""
        self._staged.clear()
        self._on_device.clear()
        self._unloads.engine_lost()

    async def run(self) -> None:
        """Acts on hints and on changes of the catalogue, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_hints(), name="hints")
            group.create_task(self._follow_changes(), name="rechecks")

    async def close(self) -> None:
        """Ends all loads."""
        tasks = [load.task for load in self._loads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for version in list(self._loads):  # cancelled before they ran at all
            self._fail(version, UnavailableError("the node is stopping"), claims=self._loads.pop(version).claims)

    def _is_held(self, version: str) -> bool:
        return version in self._staged or version in self._on_device or self._cache.path(version).exists()

    def _stage_if_there(self, version: str) -> bool:
        path = self._cache.find(version)
        if path is None:
            return False
        if version not in self._staged:
            self._staged.add(version)
            self._engine.stage(version, str(path))
        return True

    def _replace(self, version: str) -> None:
        """The image was corrupt: fetch it again, once; a second time it cannot be had."""
        is_gone = not self._cache.path(version).exists()
        self._on_device.discard(version)
        self._staged.discard(version)
        self._cache.remove(version)
        if is_gone:  # it made room before the engine opened it; if a request waits for it, the engine says so next
            return
        self._metrics.corrupt("host")
        _log.error("a host image is corrupt", extra={"version": version})
        if version in self._distrusted:
            self._distrusted.discard(version)
            self._fail(version, FailedPreconditionError("the version cannot be loaded by this node"), claims=[])
            return
        self._distrusted.add(version)
        self._load(version)

    def _drop(self, version: str) -> None:
        """Lets a version go; requests that run keep their lease on the device copy."""
        self._staged.discard(version)
        self._on_device.discard(version)
        self._unloads.begin(version, disk_bytes=self._cache.remove(version))
        self._engine.unstage(version, drop_device=True)

    def _load(self, version: str) -> _Load:
        load = self._loads.get(version)
        if load is None:
            load = self._loads[version] = _Load(asyncio.create_task(self._bring(version), name="load"))
        return load

    async def _bring(self, version: str) -> None:
        started_s = time.monotonic()
        try:
            await self._fetch(version, started_s)
            await self._dispel_doubt(version)
        except asyncio.CancelledError:
            self._fail(version, UnavailableError("the node is stopping"), claims=self._loads.pop(version).claims)
            raise
        except VeneerError as error:
            self._fail(version, error, claims=self._loads.pop(version).claims)
            return
        except Exception as error:  # noqa: BLE001  a disk fault or a mistake of ours ends the waiting requests, not the node
            _log.error("a load failed unexpectedly", extra={"version": version, "cause": type(error).__name__})
            self._fail(version, InternalError("the version could not be loaded"), claims=self._loads.pop(version).claims)
            return
        self._metrics.loaded("store", "host", time.monotonic() - started_s)
        load = self._loads.pop(version)
        self._stage_if_there(version)  # nobody's claim keeps what a hint brought: it may have made room already
        for claim in load.claims:
            claim.loaded.set_result(None)
        if load.doubted:
            self.recheck(version)

    async def _dispel_doubt(self, version: str) -> None:
        """Asks again whether a version that was fetched may be served, if the catalogue changed something about it meanwhile."""
        load = self._loads[version]
        while load.doubted:
            load.doubted = False
            try:
                await self._may_serve(version)
            except (NotFoundError, FailedPreconditionError) as error:
                self._drop(version)
                raise FailedPreconditionError("the version cannot be served any more") from error
            except VeneerError:  # unreachable; those who wait were admitted before
                load.doubted = True
                return

    async def _fetch(self, version: str, started_s: float) -> None:
        pause_s = 0.1
        while True:
            try:
                await self._store.fetch(version)
                return
            except (UnavailableError, ResourceExhaustedError) as error:
                if time.monotonic() + pause_s - started_s > self._load_timeout_s:
                    raise
                _log.warning("a load failed and is tried again", extra={"version": version, "status": error.status})
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(pause_s * 2, 2.0)

    def _fail(self, version: str, error: VeneerError, *, claims: list[Claim]) -> None:
        self._metrics.load_failed(error.status)
        _log.warning("a version cannot be had", extra={"version": version, "status": error.status})
        for claim in claims:
            claim.loaded.set_exception(error)
        self._engine.fail(version, error.status, error.message)  # for those that were preempted and hold no claim any more

    async def _follow_hints(self) -> None:
        while True:
            version = await self._hints.get()
            if self._is_held(version) or version in self._loads:
                self._metrics.prefetched("held")
            elif self._cache.num_bytes > _HINT_LEVEL * self._cache.max_bytes:
                self._metrics.prefetched("no_room")
            else:
                self._metrics.prefetched("started")
                await asyncio.wait({self._load(version).task})

    async def _follow_changes(self) -> None:
        while True:
            await self._recheck_asked.wait()
            self._recheck_asked.clear()
            while self._rechecks:
                version = next(iter(self._rechecks))
                del self._rechecks[version]
                try:
                    await self._may_serve(version)
                except (NotFoundError, FailedPreconditionError):
                    self._drop(version)
                except VeneerError:  # unreachable; meanwhile resolving decides who is admitted
                    self._rechecks[version] = None
                    await asyncio.sleep(_RECHECK_AGAIN_S)
