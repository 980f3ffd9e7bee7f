"""Keeps an engine running: its death ends the streams that it ran, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Protocol

from dataplane.engine.client import EngineClient
from dataplane.engine.messages import Delta, Holding, Moved, NotFinite, Ready, State, Submit, Unloaded, Wanted
from dataplane.metrics import Metrics
from veneer.errors import UnavailableError, VeneerError

_log = logging.getLogger(__name__)
_MAX_PAUSE_S = 30.0


class EngineEvents(Protocol):
    """Who hears what the engine does with adapters; the prefetcher."""

    def want(self, version: str) -> None:
        """A queued request needs the version."""

    def moved(self, version: str, place: str, *, seconds: float, reason: str) -> None:
        """The version changed place."""

    def unloaded(self, event: Unloaded) -> None:
        """Nothing is left of a version that was taken away."""

    def forget_engine(self) -> None:
        """The engine is a new one."""

    def meet_engine(self) -> None:
        """It takes images now."""


class EngineWatcher(Protocol):
    """Who hears what the engine holds, after those who act on it; the residency feed."""

    def show(self, holdings: Iterable[Holding], /) -> None:
        """All that it holds, whenever somebody asked for its state."""

    def moved(self, event: Moved, /) -> None:
        """A version changed place."""

    def unloaded(self, version: str, /) -> None:
        """Nothing is left of a version."""

    def engine_lost(self) -> None:
        """The engine ended."""


class EngineSupervisor:
    """The engine as the rest of the data plane sees it: the one that runs now. Owned by the event loop.

    Args:
        start: Starts an engine and waits until it is ready.
        metrics: Counts starts.
        report_not_finite: Told which version gave logits that are not finite.
        check_s: Time between looks at whether the engine still answers.
        hang_s: How long it may take to answer; one that takes longer is killed and replaced. Far longer than any step.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[EngineClient]],
        *,
        metrics: Metrics,
        report_not_finite: Callable[[str], Awaitable[None]],
        check_s: float = 15.0,
        hang_s: float = 120.0,
    ) -> None:
        self._start = start
        self._metrics = metrics
        self._report_not_finite = report_not_finite
        self._check_s, self._hang_s = check_s, hang_s
        self._client: EngineClient | None = None
        self._events: EngineEvents | None = None
        self._watcher: EngineWatcher | None = None
        self._died = asyncio.Event()
        self._reports: set[asyncio.Task[None]] = set()
        self._pins: dict[str, str] = {}
        self._has_warned = False
        self.on_dropped: Callable[[str], object] = _ignore  # told of versions that were taken away whole

    @property
    def is_running(self) -> bool:
        """Whether there is an engine that can take requests."""
        return self._client is not None

    def attach(self, events: EngineEvents, watcher: EngineWatcher | None = None) -> None:
        """Says who hears of adapters; before `start`."""
        self._events = events
        self._watcher = watcher

    async def start(self) -> Ready:
        """Starts the first engine; what stops it stops the node."""
        client = await self._start_one()
        return client.ready

    async def run(self) -> None:
        """Starts a new engine whenever one died or stopped answering, until cancelled."""
        while True:
            await self._watch()
            pause_s = 0.1
            while self._client is None:
                try:
                    await self._start_one()
                except (VeneerError, OSError) as error:  # OSError: no process can be made now
                    cause = error.message if isinstance(error, VeneerError) else type(error).__name__
                    _log.error("the engine does not start", extra={"cause": cause})
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, _MAX_PAUSE_S)

    async def _watch(self) -> None:
        """Returns when the engine is dead; one that does not answer is killed first."""
        while not self._died.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._check_s):
                    await self._died.wait()
            client = self._client
            if client is None:
                continue
            try:
                await client.state(timeout_s=self._hang_s)
            except UnavailableError:
                if client is self._client:  # it did not die while it was asked
                    _log.error("the engine does not answer; it is killed", extra={"hang_s": self._hang_s})
                    client.kill()
                    await self._died.wait()

    async def stop(self) -> None:
        """Stops the engine."""
        client, self._client = self._client, None
        for task in self._reports:
            task.cancel()
        if client is not None:
            await client.stop()

    def submit(self, submit: Submit, /) -> AsyncIterator[Delta]:
        """Runs a request on the engine that runs now.

        Raises:
            UnavailableError: There is none.
        """
        return self._running().submit(submit)

    def stage(self, version: str, path: str, /) -> None:
        """See `EngineClient.stage`; without an engine nothing happens."""
        if self._client is not None:
            self._client.stage(version, Path(path))

    def unstage(self, version: str, /, *, drop_device: bool = False) -> None:
        """See `EngineClient.unstage`; without an engine nothing of the version is left already."""
        if drop_device:
            self.on_dropped(version)
        if self._client is not None:
            self._client.unstage(version, drop_device=drop_device)
        elif drop_device:
            self._on_unloaded(Unloaded(version))

    def pin(self, version: str, owner: str, /) -> None:
        """See `EngineClient.pin`; a new engine is told too."""
        self._pins[version] = owner
        if self._client is not None:
            self._client.pin(version, owner)

    def unpin(self, version: str, /) -> None:
        """See `EngineClient.unpin`."""
        self._pins.pop(version, None)
        if self._client is not None:
            self._client.unpin(version)

    def fail(self, version: str, status: str, message: str, /) -> None:
        """See `EngineClient.fail`; without an engine nothing happens."""
        if self._client is not None:
            self._client.fail(version, status=status, message=message)

    async def state(self) -> State:
        """Returns the engine's counters.

        Raises:
            UnavailableError: There is no engine now.
        """
        return await self._running().state()

    async def take_samples(self, version: str, places: tuple[tuple[int, int], ...]) -> tuple[tuple[float, ...], ...]:
        """See `EngineClient.take_samples`.

        Raises:
            UnavailableError: There is no engine now, it served no request for the version in time, or too many ask already.
        """
        return await self._running().take_samples(version, places)

    def _running(self) -> EngineClient:
        if self._client is None:
            raise UnavailableError("the engine restarts", retry_after_s=1.0)
        return self._client

    async def _start_one(self) -> EngineClient:
        client = await self._start()
        if self._events is not None:
            self._events.forget_engine()
        client.on_wanted = self._on_wanted
        client.on_moved = self._on_moved
        client.on_unloaded = self._on_unloaded
        client.on_state = self._on_state
        client.on_not_finite = self._on_not_finite
        client.on_death = self._on_death
        self._died.clear()
        self._client = client
        if not client.is_alive:  # it died between its start and here
            self._on_death()
            raise UnavailableError("the engine ended at once")
        self._metrics.engine_started()
        if client.ready.slower and not self._has_warned:  # the next engines run on the same machine
            self._has_warned = True
            _log.warning(
                "the engine computes in a slower form than this processor could run", extra={"cause": client.ready.slower}
            )
        for version, owner in self._pins.items():
            client.pin(version, owner)
        if self._events is not None:
            self._events.meet_engine()
        return client

    def _on_death(self) -> None:
        _log.error("the engine ended; a new one is started")
        self._client = None
        if self._watcher is not None:
            self._watcher.engine_lost()
        self._died.set()

    def _on_wanted(self, event: Wanted) -> None:
        if self._events is not None:
            self._events.want(event.version)

    def _on_moved(self, event: Moved) -> None:
        if event.place == "opened":
            self._metrics.loaded("disk", "host", event.seconds)
        elif self._events is not None:
            self._events.moved(event.version, event.place, seconds=event.seconds, reason=event.reason)
        if self._watcher is not None:
            self._watcher.moved(event)

    def _on_unloaded(self, event: Unloaded) -> None:
        if self._events is not None:
            self._events.unloaded(event)
        if self._watcher is not None and not event.came_back:
            self._watcher.unloaded(event.version)

    def _on_state(self, event: State) -> None:
        if self._watcher is not None:
            self._watcher.show(event.holdings)

    def _on_not_finite(self, event: NotFinite) -> None:
        self._metrics.not_finite()
        _log.error("logits are not finite", extra={"version": event.version})
        if event.version is not None:
            task = asyncio.create_task(self._report(event.version))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    async def _report(self, version: str) -> None:
        try:
            await self._report_not_finite(version)
        except VeneerError as error:
            _log.warning("a version could not be reported", extra={"version": version, "status": error.status})


def _ignore(version: str) -> None:
    """Nobody wants to know."""
    del version
