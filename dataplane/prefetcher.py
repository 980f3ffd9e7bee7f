"""Brings versions from the store to host memory before, or as soon as, a request needs them.

Driven by requests (`ensure`), by the engine (`want`: a queued request found no image), by recent traffic (`expect`) and by hints
(`hint`). One load for each version at a time, whoever asked; loads run beside the serving path and never hold anything else up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from dataplane.attempts import NotLoadedYetError
from dataplane.circuits import Circuit
from dataplane.claims import Claim, Level
from dataplane.engine.messages import Unloaded
from dataplane.load_line import Urgency
from dataplane.load_room import NoRoomError
from dataplane.loads import Fetcher, Load, LoadLimits, Loads
from dataplane.lora.host_cache import HostCache, HostCacheFullError, Payer, TenantHostFullError, TenantHostLimitError
from dataplane.metrics import Metrics
from dataplane.recent import Recent
from dataplane.transfer import DeletedVersionError, WithdrawnVersionError
from dataplane.unloads import Unloads
from veneer.errors import FailedPreconditionError, NotFoundError, PermissionDeniedError, UnavailableError, VeneerError

_log = logging.getLogger(__name__)
_RECHECK_AGAIN_S = 1.0
_AHEAD_LEVEL = 0.9  # loads ahead fill free room only: above this part of the host budget they are dropped


class ImageSink(Protocol):
    """What the prefetcher tells the engine."""

    def stage(self, version: str, path: str, /) -> None:
        """An image lies in host memory."""

    def unstage(self, version: str, /, *, drop_device: bool = False) -> None:
        """It does not any more."""

    def fail(self, version: str, status: str, message: str, /) -> None:
        """It cannot be had: requests that wait for it end."""


class Prefetcher:
    """Owned by the event loop. Knows what the engine was told; the cache knows which files there are.

    Args:
        store: Fetches versions into the cache.
        cache: Host images.
        engine: Is told what is staged.
        may_serve: Asks the control plane whether a version may still be served: raises NotFoundError or FailedPreconditionError
            if not, PermissionDeniedError if not by this node.
        metrics: Counts loads.
        unloads: Counts what comes free of versions that go.
        limits: Bounds of loads.
        clock: Monotonic seconds.
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
        limits: LoadLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._engine = engine
        self._may_serve = may_serve
        self._metrics = metrics
        self._unloads = unloads
        self._limits = limits
        self._loads = Loads(store, is_there=cache.__contains__, events=self, metrics=metrics, limits=limits, clock=clock)
        self._claims: dict[str, set[Claim]] = {}
        self._running: Counter[str] = Counter()
        self._recent = Recent(clock)
        self._brought_ahead: dict[str, str] = {}
        self._staged: set[str] = set()
        self._on_device: set[str] = set()
        self._distrusted: set[str] = set()
        self._leaving: set[str] = set()
        self._rechecks: dict[str, None] = {}
        self._recheck_asked = asyncio.Event()

    @property
    def num_loads(self) -> int:
        """Loads in line and under way."""
        return len(self._loads)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for what nobody asks for yet."""
        return self._cache.num_bytes > _AHEAD_LEVEL * self._cache.max_bytes

    def circuits(self) -> list[Circuit]:
        """Returns the versions whose last load failed."""
        return self._loads.circuits()

    def ensure(self, version: str, tenant: str = "", *, max_bytes: int = 0) -> Claim:
        """Has the version's image brought to host memory and told to the engine; returns at once.

        Args:
            version: Digest of the version.
            tenant: Whose request needs it, and pays for the image.
            max_bytes: What the images that the tenant pays for may take together; 0 for no limit.
        """
        self._cache.hold(version, Payer(tenant, max_bytes) if tenant else None)
        below: Level = "host" if version in self._staged else "disk"
        level: Level = "device" if version in self._on_device else below if version in self._cache else "store"
        claim = Claim(
            lambda given, is_expected: self._release(version, given, is_expected=is_expected),
            settle=lambda given: self._settle(version, given),
            tenant=tenant,
            level=level,
        )
        self._claims.setdefault(version, set()).add(claim)
        if level == "device":
            claim.placed.set_result(None)
        was_asked = self._recent.note(version)
        if level == "device" or self._stage_if_there(version):
            claim.loaded.set_result(None)
            if source := self._brought_ahead.pop(version, ""):
                self._metrics.prefetched(source, "used")
        elif (refusal := self._loads.refusal(version)) is not None:
            claim.fail(refusal)
        else:
            self._loads.ask(version, Urgency.WAITED, tenant=tenant).popular |= was_asked
        return claim

    def want(self, version: str) -> None:
        """The engine has a queued request and knows no image."""
        self._on_device.discard(version)
        self._staged.discard(version)
        if self._stage_if_there(version):
            return
        if (refusal := self._loads.refusal(version)) is not None:
            self._fail(version, refusal)
        else:
            self._loads.ask(version, Urgency.WAITED).wanted = True

    def expect(self, version: str, tenant: str = "") -> None:
        """Recent traffic of a tenant says that a request will ask for the version."""
        self._ask_ahead(version, Urgency.EXPECTED, tenant)

    def hint(self, version: str, tenant: str = "") -> None:
        """Advice that the version will be needed; of which tenant, if that is known."""
        self._ask_ahead(version, Urgency.HINTED, tenant)

    def recheck(self, version: str) -> None:
        """The catalogue changed something about the version: ask whether what is held of it may still be served."""
        self._loads.doubt(version)
        if self._is_held(version):
            self._rechecks[version] = None
            self._recheck_asked.set()

    def recheck_all(self, *, where: Callable[[str], bool] = bool) -> None:
        """As `recheck`, for everything held of which something is true."""
        failed = {circuit.version for circuit in self._loads.circuits()}
        for version in filter(where, failed.union(self._cache.versions(), self._staged, self._on_device, self._loads.versions)):
            self.recheck(version)

    def is_in_use(self, version: str) -> bool:
        """Whether requests wait for a version, run with it or asked for it just now, or it is pinned or on its way."""
        is_used = version in self._claims or version in self._running or self._recent.was_asked_just_now(version)
        return is_used or self._loads.get(version) is not None

    async def break_off(self, version: str) -> bool:
        """Ends the load of a version unless somebody waits for it; returns, when that is over, whether nothing brings it."""
        return await self._loads.break_off(version)

    def unload(self, version: str) -> None:
        """Lets all of a version go that the node holds; it is loaded again when a request needs it and it may be served."""
        self._drop(version)

    def moved(self, version: str, place: str, *, seconds: float, reason: str = "") -> None:
        """The engine moved a version: to the device, off it and why, or found its image corrupt."""
        match place:
            case "device":
                self._on_device.add(version)
                self._distrusted.discard(version)
                for claim in self._claims.get(version, ()):
                    if not claim.placed.done():
                        claim.placed.set_result(None)
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
            self._distrusted.discard(version)
            self._engine.unstage(version)
            self._metrics.evicted("disk", "room")
            self._count_waste(version)

    def unloaded(self, event: Unloaded) -> None:
        """Nothing is left in the engine of a version that was dropped."""
        if not event.came_back:  # it may have been moved after it was dropped here, and before the engine heard of that
            self._on_device.discard(event.version)
        self._unloads.finish(event)

    def forget_engine(self) -> None:
        """There is no engine, or a new one that knows no image yet."""
        self._staged.clear()
        self._on_device.clear()
        self._unloads.engine_lost()

    def meet_engine(self) -> None:
        """A new engine takes images: it is told of those asked for lately, the last first, as far as its device has room.

        So their next requests wait for a copy, not for an image to be read and checked.
        """
        room_bytes = self._limits.restage_bytes
        for version in self._recent.lately():
            size_bytes = self._cache.size_of(version)
            if size_bytes is None:
                continue
            room_bytes -= size_bytes
            if room_bytes < 0:
                return
            self._stage_if_there(version)

    async def confirm(self, load: Load) -> None:
        """See `LoadEvents`."""
        while load.doubted:
            load.doubted = False
            try:
                await self._may_serve(load.version)
            except NotFoundError as error:
                self._drop(load.version)
                raise DeletedVersionError("no such adapter, alias or version") from error
            except FailedPreconditionError as error:
                self._drop(load.version)
                raise WithdrawnVersionError("the version cannot be served any more") from error
            except PermissionDeniedError as error:
                self._drop(load.version)
                raise UnavailableError("this node may not load the version now", retry_after_s=1.0) from error
            except VeneerError:  # unreachable; those who wait were admitted before
                load.doubted = True
                return

    def loaded(self, load: Load) -> None:
        """See `LoadEvents`."""
        version = load.version
        is_there = self._stage_if_there(version)  # nobody's claim keeps what came ahead: it may have made room already
        if load.source and is_there:
            self._brought_ahead[version] = load.source
        for claim in self._claims.get(version, ()):
            if not claim.loaded.done():
                claim.loaded.set_result(None)
        if load.doubted:
            self.recheck(version)

    def failed(self, load: Load, error: VeneerError) -> None:
        """See `LoadEvents`."""
        self._cache.cancel(load.version)
        if load.source:
            is_full = isinstance(error, HostCacheFullError | NoRoomError)
            self._metrics.prefetched(load.source, "no_room" if is_full else "failed")
            if is_full:  # nobody asked, and nothing is wrong with it
                return
        self._fail(load.version, error)

    def broken_off(self, load: Load) -> None:
        """See `LoadEvents`."""
        if self._loads.get(load.version) is not None:
            return
        self._cache.cancel(load.version)
        if load.doubted:  # the next load would be doubted itself
            self.recheck(load.version)

    async def run(self) -> None:
        """Acts on changes of the catalogue, until cancelled."""
        while True:
            await self._recheck_asked.wait()
            self._recheck_asked.clear()
            while self._rechecks:
                version = next(iter(self._rechecks))
                del self._rechecks[version]
                try:
                    await self._may_serve(version)
                    self._leaving.discard(version)
                except NotFoundError:
                    self._let_finish(version)
                except FailedPreconditionError:
                    self._drop(version)
                except PermissionDeniedError:  # nothing asked for it in a month; a request that does brings it anew
                    self._drop(version)
                except VeneerError:  # unreachable; meanwhile resolving decides who is admitted
                    self._rechecks[version] = None
                    await asyncio.sleep(_RECHECK_AGAIN_S)

    async def close(self) -> None:
        """Ends all loads."""
        await self._loads.close()

    def _is_held(self, version: str) -> bool:
        return version in self._staged or version in self._on_device or version in self._cache

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
            self._fail(version, FailedPreconditionError("the version cannot be loaded by this node"))
            return
        self._distrusted.add(version)
        self._loads.ask(version, Urgency.WAITED).wanted = True

    def _let_finish(self, version: str) -> None:
        """Lets a version go that was deleted: once the last request has ended that was admitted before."""
        if version in self._claims or version in self._running:
            self._leaving.add(version)
        else:
            self._drop(version)

    def _drop_if_left(self, version: str) -> None:
        if version in self._leaving and version not in self._claims and version not in self._running:
            self._drop(version)

    def _drop(self, version: str) -> None:
        """Lets a version go; requests that run keep their lease on the device copy."""
        for held in (self._staged, self._on_device, self._distrusted, self._leaving):
            held.discard(version)
        self._unloads.begin(version, disk_bytes=self._cache.remove(version))
        self._engine.unstage(version, drop_device=True)
        self._count_waste(version)

    def _ask_ahead(self, version: str, urgency: Urgency, tenant: str) -> None:
        source = urgency.name.lower()
        if self._loads.get(version) is not None:
            self._loads.ask(version, urgency)
        elif self._is_held(version):
            self._metrics.prefetched(source, "held")
        elif self._loads.refusal(version) is not None:
            self._metrics.prefetched(source, "broken")
        elif self.is_full:
            self._metrics.prefetched(source, "no_room")
        elif not self._loads.has_room_ahead(tenant):
            self._metrics.prefetched(source, "dropped")
        else:
            self._metrics.prefetched(source, "started")
            self._loads.ask(version, urgency, tenant=tenant)

    def _settle(self, version: str, claim: Claim) -> None:
        """A request has what it waited for, and goes on using the version."""
        self._running[version] += 1
        self._take_back(version, claim, is_expected=False)

    def _release(self, version: str, claim: Claim, *, is_expected: bool) -> None:
        """A request ended, or does not wait for a version any more."""
        if not claim.is_settled:
            self._take_back(version, claim, is_expected=is_expected)
        else:
            self._running[version] -= 1
            if not self._running[version]:
                del self._running[version]
        self._drop_if_left(version)

    def _take_back(self, version: str, claim: Claim, *, is_expected: bool) -> None:
        claims = self._claims[version]
        claims.remove(claim)
        if not claims:
            del self._claims[version]
            self._loads.let_go(version, is_expected=is_expected)
        self._cache.let_go(version, is_coming=self._loads.get(version) is not None)

    def _fail(self, version: str, error: VeneerError) -> None:
        self._metrics.load_failed(error.status)
        _log.warning("a version cannot be had", extra={"version": version, "status": error.status})
        for claim in self._claims.get(version, ()):
            claim.fail(_as_told_to(claim.tenant, error))
        told = _as_told_to("", error)  # for those that were preempted and hold no claim any more, whoever they are
        self._engine.fail(version, told.status, told.message)

    def _count_waste(self, version: str) -> None:
        if source := self._brought_ahead.pop(version, ""):
            self._metrics.prefetched(source, "wasted")


def _as_told_to(tenant: str, error: VeneerError) -> VeneerError:
    """What a tenant hears of a load that failed: another one's limit is neither its fault nor its to know."""
    if isinstance(error, TenantHostFullError | TenantHostLimitError) and error.tenant != tenant:
        return NotLoadedYetError()
    return error
