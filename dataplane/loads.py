"""Loads from the store: one a version, in line for a place, tried again while somebody waits, cancelled when nobody does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dataplane.circuits import Circuit, Circuits
from dataplane.enrollment import NotEnrolledError
from dataplane.load_line import LoadLine, Ticket, Urgency
from dataplane.load_room import Amount, LoadRoom
from dataplane.lora.host_cache import TenantHostLimitError
from dataplane.metrics import Metrics
from dataplane.throttle import Throttle
from dataplane.transfer import Pace, Room
from veneer.errors import (
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    VeneerError,
)

_log = logging.getLogger(__name__)


class Fetcher(Protocol):
    """What loads need of the store."""

    async def fetch(self, version: str, *, pace: Pace, room: Room, is_ahead: Callable[[], bool]) -> Path:
        """Brings the version's image into the host cache; cancelled, it leaves nothing half made.

        What it takes on the way it says to `room` before, and has left when it ends.
        One that nobody waits for when it is kept (`is_ahead`, asked from any thread) takes free room alone.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """Bounds of loads.

    Attributes:
        max_fetches: Loads that requests wait for, at the same time.
        load_timeout_s: How long a load that is waited for is tried again.
        prefetch_bytes_per_s: Bytes a second of all loads together above which loads ahead wait; 0 for no limit.
        max_ahead: Loads ahead, in line and under way.
        max_failures: Loads of a version that fail in a row before requests are answered without one.
        stall_s: How long a load may bring nothing before it gives its place up.
        hang_s: How long before it gives up its room too, where others that are waited for have none; longer than a read may take.
        memory_bytes: What files of loads under way take in memory together, and as much again for images that are made of them.
        disk_bytes: What those take that are too large for that.
        restage_bytes: Images that a new engine is told of at once, of those asked for lately.
    """

    max_fetches: int = 8
    load_timeout_s: float = 30.0
    prefetch_bytes_per_s: float = 0.0
    max_ahead: int = 64
    max_failures: int = 3
    stall_s: float = 2.0
    hang_s: float = 15.0
    memory_bytes: int = 256 << 20
    disk_bytes: int = 8 << 30
    restage_bytes: int = 0


@dataclass(slots=True, eq=False)
class Load:
    """A load under way, or in line. Owned by `Loads`.

    Attributes:
        ticket: Its place in line.
        after: The end of the loads before it, which were cancelled.
        task: Runs it.
        begin: Set when an attempt may begin.
        urgent: Set while a request, or the engine, waits for it.
        wanted: The engine waits for it; nobody says when it does not any more.
        ahead: How urgent it was before any request asked for it.
        popular: Another request asked for the version lately.
        doubted: The catalogue changed something about the version meanwhile.
        watch: Fires when nothing came for a while.
    """

    ticket: Ticket
    after: asyncio.Future[Any] | None
    task: asyncio.Task[None] = field(init=False)
    begin: asyncio.Event = field(default_factory=asyncio.Event)
    urgent: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: bool = False
    ahead: Urgency | None = None
    popular: bool = False
    doubted: bool = False
    watch: asyncio.TimerHandle | None = None

    @property
    def version(self) -> str:
        """What is loaded."""
        return self.ticket.version

    @property
    def source(self) -> str:
        """Who asked for it ahead, for metrics; empty when a request did."""
        return "" if self.ahead is None else self.ahead.name.lower()


class LoadEvents(Protocol):
    """Who hears how loads end; the prefetcher."""

    async def confirm(self, load: Load) -> None:
        """The image is in the host cache; raises if the version may not be served any more."""

    def loaded(self, load: Load) -> None:
        """It is, and the version may be served."""

    def failed(self, load: Load, error: VeneerError) -> None:
        """It cannot be had."""

    def broken_off(self, load: Load) -> None:
        """The load was cancelled and has ended; what it could not break off may have brought the image."""


class Loads:
    """All loads. Owned by the event loop.

    Args:
        store: Fetches versions into the host cache.
        is_there: Whether a version's image lies there.
        events: Hears how loads end.
        metrics: Counts them.
        limits: Their bounds.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: Fetcher,
        *,
        is_there: Callable[[str], bool],
        events: LoadEvents,
        metrics: Metrics,
        limits: LoadLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._is_there = is_there
        self._events = events
        self._metrics = metrics
        self._limits = limits
        self._clock = clock
        self._line = LoadLine(limits.max_fetches)
        self._room = LoadRoom(
            Amount(memory=limits.memory_bytes, disk=limits.disk_bytes, image=limits.memory_bytes),
            patience_s=limits.hang_s,
            max_wait_s=limits.load_timeout_s,
            clock=clock,
        )
        self._throttle = Throttle(limits.prefetch_bytes_per_s, clock=clock)
        self._circuits = Circuits(max_failures=limits.max_failures, clock=clock)
        self._loads: dict[str, Load] = {}
        self._ending: dict[str, asyncio.Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def get(self, version: str) -> Load | None:
        """Returns the load of a version, if there is one."""
        return self._loads.get(version)

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions that are loaded."""
        return tuple(self._loads)

    def has_room_ahead(self, tenant: str) -> bool:
        """Whether a tenant may have one load ahead more.

        Where there are as many as there may be, the last one that has not begun goes of the tenant that has most, if that has no
        fewer then.
        """
        ahead = [load for load in self._loads.values() if not load.urgent.is_set()]
        if len(ahead) < self._limits.max_ahead:
            return True
        counts = Counter(load.ticket.tenant for load in ahead)
        most = max(counts, key=counts.__getitem__)
        in_line = [load for load in reversed(ahead) if load.ticket.tenant == most and not load.ticket.running]
        if counts[most] < counts[tenant] + 2 or not in_line:
            return False
        last = max(in_line, key=lambda load: load.ticket.urgency)
        if last.source:
            self._metrics.prefetched(last.source, "dropped")
        else:
            self._metrics.load_cancelled()
        self._cancel(last)
        return True

    def circuits(self) -> list[Circuit]:
        """Returns the versions whose last load failed."""
        return self._circuits.all()

    def refusal(self, version: str) -> VeneerError | None:
        """Returns the error that answers for a version in place of a load; None when it may be loaded, or is."""
        return None if version in self._loads else self._circuits.refusal(version)

    def doubt(self, version: str) -> None:
        """Hears that the catalogue changed something about a version: what failed before may go well now."""
        self._circuits.forget(version)
        if load := self._loads.get(version):
            load.doubted = True

    def ask(self, version: str, urgency: Urgency, *, tenant: str = "") -> Load:
        """Begins the load of a version, or makes the one that there is as urgent."""
        load = self._loads.get(version)
        if load is None:
            load = self._loads[version] = Load(Ticket(version, tenant, urgency), self._ending.get(version))
            load.ahead = urgency if urgency is not Urgency.WAITED else None
            load.task = asyncio.create_task(self._bring(load), name="load")
        elif urgency is Urgency.WAITED and load.ahead is not None:
            self._metrics.prefetched(load.source, "late")
            load.ahead, load.ticket.tenant = None, tenant
        if urgency < load.ticket.urgency:
            load.ticket.urgency = urgency
            if self._room.is_waiting(load.ticket):
                self._wait_for_room(load)
            self._room.settle()
            self._begin_next()
        if urgency is Urgency.WAITED:
            load.urgent.set()
        return load

    def let_go(self, version: str, *, is_expected: bool) -> None:
        """Hears that no request waits for a version any more.

        The load is cancelled, unless the engine waits for it, or recent traffic says that the version will be asked for again and
        there are fewer loads ahead than there may be.

        Args:
            version: The version.
            is_expected: Whether who waited last will ask again.
        """
        load = self._loads.get(version)
        if load is None or load.wanted or not load.urgent.is_set():
            return
        if (is_expected or load.popular) and self.has_room_ahead(load.ticket.tenant):
            load.urgent.clear()
            load.ticket.urgency = Urgency.EXPECTED
            self._room.settle()
            self._begin_next()
        else:
            self._metrics.load_cancelled()
            self._cancel(load)

    async def break_off(self, version: str) -> bool:
        """Ends the load of a version unless somebody waits for it, and waits for what cannot be broken off.

        Returns:
            Whether nothing brings the version any more.
        """
        load = self._loads.get(version)
        if load is not None and not load.wanted and not load.urgent.is_set():
            self._cancel(load)
        while version not in self._loads and (ending := self._ending.get(version)) is not None:
            await asyncio.wait({ending})
        return version not in self._loads

    async def close(self) -> None:
        """Ends all loads; those who wait hear of it."""
        for load in list(self._loads.values()):
            self._cancel(load)
            self._events.failed(load, UnavailableError("the node is stopping"))
        await asyncio.gather(*self._ending.values(), return_exceptions=True)

    def _cancel(self, load: Load) -> None:
        self._end(load)
        self._room.ends(load.ticket)
        before = () if load.after is None else (load.after,)  # this one may end while it still waits for that
        ending = asyncio.gather(*before, load.task, return_exceptions=True)
        self._ending[load.version] = ending
        ending.add_done_callback(lambda ended: self._ended(load, ended))
        load.task.cancel()

    def _ended(self, load: Load, ended: asyncio.Future[Any]) -> None:
        if self._ending.get(load.version) is ended:
            del self._ending[load.version]
        self._events.broken_off(load)

    def _end(self, load: Load) -> None:
        """Takes a load out of the books; others begin."""
        if self._loads.get(load.version) is load:
            del self._loads[load.version]
        self._leave(load)

    def _leave(self, load: Load) -> None:
        self._stop_watch(load)
        self._line.leave(load.ticket)
        self._begin_next()

    def _begin_next(self) -> None:
        for ticket in self._line.take():
            self._loads[ticket.version].begin.set()

    async def _bring(self, load: Load) -> None:
        started_s = self._clock()
        try:
            await self._try_on(load, started_s)
            await self._events.confirm(load)
        except Exception as error:  # noqa: BLE001  a disk fault or a mistake of ours ends the waiting requests, not the node
            if self._loads.get(load.version) is not load:  # cancelled, and cleaning up failed
                return
            self._end(load)
            self._events.failed(load, self._judge(load, error))
            return
        seconds = self._clock() - started_s
        self._metrics.loaded("store", "host", seconds)
        facts = {"version": load.version, "seconds": round(seconds, 3), "ahead": load.source}
        _log.info("a version was loaded from the store", extra=facts)
        self._circuits.forget(load.version)
        self._end(load)
        self._events.loaded(load)

    def _judge(self, load: Load, error: Exception) -> VeneerError:
        if not isinstance(error, VeneerError):
            _log.error("a load failed unexpectedly", extra={"version": load.version, "cause": type(error).__name__})
            error = InternalError("the version could not be loaded")
        # Where the node, or the tenant that asked, lacks room, or the node is not enrolled any more, nothing is wrong with the
        # version, and others may have it; of one that was deleted nothing is left that could fail.
        if not isinstance(error, ResourceExhaustedError | TenantHostLimitError | NotEnrolledError | NotFoundError):
            self._circuits.failed(load.version, error, for_good=isinstance(error, FailedPreconditionError))
        return error

    async def _try_on(self, load: Load, started_s: float) -> None:
        """Tries until it goes well, while a request waits and time is left; each attempt stands in line for a place."""
        if load.after is not None:  # it finishes what it cannot break off
            await asyncio.wait({load.after})
            if self._is_there(load.version):
                return
        pause_s = 0.1
        while True:
            self._line.join(load.ticket)
            self._begin_next()
            await load.begin.wait()
            load.begin.clear()
            self._watch(load)
            try:
                async with self._room.attempt(load.ticket):
                    await self._store.fetch(
                        load.version,
                        pace=lambda num_bytes: self._pace(load, num_bytes),
                        room=lambda amount: self._enter(load, amount),
                        is_ahead=lambda: not load.urgent.is_set(),
                    )
                return
            except (UnavailableError, ResourceExhaustedError) as error:
                is_last = self._clock() + pause_s - started_s > self._limits.load_timeout_s
                is_hopeless = isinstance(error, NotEnrolledError)
                is_wanted = load.urgent.is_set() and self._loads.get(load.version) is load
                if is_last or is_hopeless or not is_wanted or self._circuits.is_probe(load.version):
                    raise
                _log.warning("a load failed and is tried again", extra={"version": load.version, "status": error.status})
            self._leave(load)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(pause_s * 2, 2.0)

    async def _enter(self, load: Load, amount: Amount) -> None:
        await self._room.enter(load.ticket, amount, on_wait=lambda: self._wait_for_room(load))
        self._line.progress(load.ticket)
        self._watch(load)

    def _wait_for_room(self, load: Load) -> None:
        """Who waits for room needs no place meanwhile; loads ahead keep theirs, so that no more of them begin."""
        self._stop_watch(load)
        if load.ticket.urgency is Urgency.WAITED:
            self._stall(load)

    async def _pace(self, load: Load, num_bytes: int) -> None:
        self._line.progress(load.ticket)
        is_ahead = not load.urgent.is_set()
        self._throttle.take(num_bytes, ahead=is_ahead)
        if is_ahead:
            self._metrics.prefetched_bytes(num_bytes)
            self._stop_watch(load)
            while not load.urgent.is_set() and (wait_s := self._throttle.wait_s()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await load.urgent.wait()
        self._room.came(load.ticket)
        self._watch(load)

    def _watch(self, load: Load) -> None:
        self._stop_watch(load)
        load.watch = asyncio.get_running_loop().call_later(self._limits.stall_s, self._stall, load)

    def _stop_watch(self, load: Load) -> None:
        if load.watch is not None:
            load.watch.cancel()
            load.watch = None

    def _stall(self, load: Load) -> None:
        if self._line.stall(load.ticket):
            self._begin_next()
