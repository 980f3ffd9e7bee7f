"""The serving process's side of an engine: asyncio in front, the message interface behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from dataplane.engine.config import EngineConfig
from dataplane.engine.link import Link, ProcessLink, ThreadLink
from dataplane.engine.messages import (
    Abort,
    Command,
    Delta,
    Event,
    Fail,
    Failed,
    Moved,
    NotFinite,
    Pause,
    Pin,
    Query,
    Ready,
    Resume,
    Stage,
    State,
    Stop,
    Submit,
    Tokens,
    Unloaded,
    Unpin,
    Unstage,
    Wanted,
)
from dataplane.engine.samples import Samples, TakeSamples
from dataplane.lora.holdings import TenantLimitError
from veneer import errors
from veneer.errors import UnavailableError, VeneerError

_STATUSES: dict[str, type[VeneerError]] = {
    kind.status: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, VeneerError)
}


_PAUSE_AT = 64
"""Deltas that wait for a stream's reader when its request is paused; while the reader keeps up there is one at most."""


class _Stream:
    """What waits for the reader of one request."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Delta | VeneerError] = asyncio.Queue()
        self.paused = False


class EngineClient:
    """Streams of running requests, by id. Belongs to the event loop that `start` ran in; not for other threads.

    Attributes:
        ready: What the engine said when it came up.
        on_wanted: Called with a version whose image the engine lacks.
        on_moved: Called when a version changes place.
        on_unloaded: Called when nothing is left of a version that was taken away.
        on_state: Called with every state that somebody asked for, in its order among the other events.
        on_not_finite: Called when a request's logits were not finite.
        on_death: Called once when the engine ends without having been stopped.
    """

    ready: Ready

    def __init__(self) -> None:
        self.on_wanted: Callable[[Wanted], None] | None = None
        self.on_moved: Callable[[Moved], None] | None = None
        self.on_unloaded: Callable[[Unloaded], None] | None = None
        self.on_state: Callable[[State], None] | None = None
        self.on_not_finite: Callable[[NotFinite], None] | None = None
        self.on_death: Callable[[], None] | None = None
        self._streams: dict[str, _Stream] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._tokens = itertools.count()
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._dead = False
        self._outbox: list[Command] = []
        self._link: Link

    @classmethod
    async def start(cls, config: EngineConfig, *, in_process: bool = False, timeout_s: float = 300.0) -> EngineClient:
        """Starts an engine and waits until it is ready.

        Args:
            config: Settings.
            in_process: Run it in a thread of this process (tests).
            timeout_s: How long loading may take.

        Raises:
            VeneerError: The engine refused its settings or its model.
            UnavailableError: It ended before it was ready, or was not ready in time.
        """
        client = cls()
        link_type = ThreadLink if in_process else ProcessLink
        link: Link = link_type(client._receive, client._died)
        client._link = link
        try:
            async with asyncio.timeout(timeout_s):
                await link.open(config)
                client.ready = await client._started
        except TimeoutError as error:
            await link.close()
            raise UnavailableError(f"the engine was not ready within {timeout_s:g} s") from error
        except BaseException:
            await link.close()
            raise
        return client

    @property
    def is_alive(self) -> bool:
        """Whether the engine can take requests."""
        return not self._dead

    @property
    def pid(self) -> int | None:
        """Process id of an engine in a process of its own."""
        return self._link.pid

    async def submit(self, submit: Submit) -> AsyncIterator[Delta]:
        """Runs a request and yields its tokens as they come; deltas that wait for the reader come merged.

        A request whose reader is slow is paused in the engine, so that little waits; it goes on when all was read.
        Leaving early, by `aclose` or cancellation, aborts the request.

        Raises:
            VeneerError: The request failed; the class follows the status.
        """
        if self._dead:
            raise UnavailableError("the engine is away")
        if submit.request_id in self._streams:
            raise errors.AbortedError(f"request_id {submit.request_id!r} is in use")
        stream = self._streams[submit.request_id] = _Stream()
        items = stream.items
        ended = False
        try:
            self._send(submit)
            while not ended:
                delta = await items.get()
                later: VeneerError | None = None
                while not isinstance(delta, VeneerError) and not items.empty():
                    following = items.get_nowait()
                    if isinstance(following, VeneerError):
                        later = following
                        break
                    delta = delta.followed_by(following)
                if isinstance(delta, VeneerError):
                    ended = True
                    raise delta
                if stream.paused:
                    stream.paused = False
                    self._send(Resume(submit.request_id))
                ended = delta.finish is not None
                yield delta
                if later is not None:
                    ended = True
                    raise later
        finally:
            del self._streams[submit.request_id]
            if not ended and not self._dead:
                self._send(Abort(submit.request_id))

    def stage(self, version: str, path: Path) -> None:
        """Tells the engine where a version's image lies."""
        self._send(Stage(version, str(path)))

    def unstage(self, version: str, *, drop_device: bool = False) -> None:
        """Takes a version's image away."""
        self._send(Unstage(version, drop_device))

    def pin(self, version: str, owner: str) -> None:
        """Has a version brought to the device and kept there, on its owner's account."""
        self._send(Pin(version, owner))

    def unpin(self, version: str) -> None:
        """Lets a pinned version make room again."""
        self._send(Unpin(version))

    def fail(self, version: str, *, status: str, message: str) -> None:
        """Ends every request that waits for a version."""
        self._send(Fail(version, status, message))

    def abort(self, request_id: str) -> None:
        """Ends a request; its stream, if somebody still reads it, gets nothing more."""
        self._send(Abort(request_id))

    async def state(self, *, timeout_s: float = 30.0) -> State:
        """Asks for the engine's counters.

        Raises:
            UnavailableError: The engine is away or does not answer in time.
        """
        state: State = await self._ask(Query, timeout_s=timeout_s)
        return state

    async def take_samples(
        self, version: str, places: tuple[tuple[int, int], ...], *, timeout_s: float = 30.0
    ) -> tuple[tuple[float, ...], ...]:
        """Has the engine's form compute some pairs of a version on `sample_input`, beside a request for it that runs or comes.

        Returns:
            What each gives; nothing where this form takes no samples.

        Raises:
            UnavailableError: The engine is away, served no such request in time, or has too many that ask already.
        """
        samples: Samples = await self._ask(lambda token: TakeSamples(token, version, places), timeout_s=timeout_s)
        if samples.refused:
            raise UnavailableError("too many wait for samples", retry_after_s=1.0)
        return samples.values

    async def _ask(self, command: Callable[[int], Command], *, timeout_s: float) -> Any:
        if self._dead:
            raise UnavailableError("the engine is away")
        token = next(self._tokens)
        answer = self._queries[token] = asyncio.get_running_loop().create_future()
        try:
            self._send(command(token))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise UnavailableError(f"the engine did not answer within {timeout_s:g} s") from error
        finally:
            del self._queries[token]

    def kill(self) -> None:
        """Ends an engine that does not answer, at once; it counts as dead, and `on_death` hears of it."""
        self._link.kill()

    async def stop(self) -> None:
        """Ends the engine; running requests end UNAVAILABLE."""
        self._stopping = True
        if not self._dead:
            self._outbox.append(Stop())
            self._flush()
        await self._link.close()

    def _send(self, command: Command) -> None:
        """Queues a command; all of one turn of the event loop leave together."""
        if self._dead:
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if commands and not self._dead:
            self._link.send(commands)

    def _receive(self, events: Iterable[Event]) -> None:
        """Hands events to whom they concern; called by the link, in the event loop."""
        for event in events:
            match event:
                case Tokens():
                    for delta in event.deltas():
                        self._put(delta.request_id, delta)
                case Failed(request_id, status, message, retry_after_s, is_tenants_limit):
                    kind = TenantLimitError if is_tenants_limit else _STATUSES.get(status, errors.InternalError)
                    error = kind(message, retry_after_s=retry_after_s)
                    if request_id:
                        self._put(request_id, error)
                    elif not self._started.done():
                        self._started.set_exception(error)
                case Ready():
                    if not self._started.done():
                        self._started.set_result(event)
                case State(token=token):
                    if (answer := self._queries.get(token)) is not None and not answer.done():
                        answer.set_result(event)
                    self._notify(event)
                case Samples(token=token):
                    if (answer := self._queries.get(token)) is not None and not answer.done():
                        answer.set_result(event)
                case _:
                    self._notify(event)

    def _notify(self, event: Event) -> None:
        callback: Callable[[Any], None] | None = None
        match event:
            case Wanted():
                callback = self.on_wanted
            case Moved():
                callback = self.on_moved
            case Unloaded():
                callback = self.on_unloaded
            case State():
                callback = self.on_state
            case NotFinite():
                callback = self.on_not_finite
        if callback is not None:
            callback(event)

    def _died(self) -> None:
        """Ends every stream; called by the link when no event can come any more."""
        if self._dead:
            return
        self._dead = True
        error = UnavailableError("the engine ended")
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()
        for stream in self._streams.values():
            stream.items.put_nowait(UnavailableError("the engine ended"))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(UnavailableError("the engine ended"))
        if not self._stopping and self.on_death is not None:
            self.on_death()

    def _put(self, request_id: str, item: Delta | VeneerError) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.items.put_nowait(item)
        if not stream.paused and stream.items.qsize() >= _PAUSE_AT and isinstance(item, Delta) and item.finish is None:
            stream.paused = True
            self._send(Pause(request_id))
