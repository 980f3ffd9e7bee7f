"""The serving process's side of an engine: asyncio in front, the message interface behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import (
    Abort,
    Command,
    Delta,
    Event,
    Fail,
    Failed,
    Moved,
    NotFinite,
    Query,
    Ready,
    Stage,
    State,
    Stop,
    Submit,
    Tokens,
    Unstage,
    Wanted,
    decode,
    encode,
)
from veneer import errors
from veneer.errors import UnavailableError, VeneerError

_log = logging.getLogger(__name__)
_LINE_LIMIT = 64 << 20
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
_STATUSES: dict[str, type[VeneerError]] = {
    kind.status: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, VeneerError)
}


class EngineClient:
    """Streams of running requests, by id. Belongs to the event loop that `start` ran in; not for other threads.

    Attributes:
        ready: What the engine said when it came up.
        on_wanted: Called with a version whose image the engine lacks.
        on_moved: Called when a version changes place.
        on_not_finite: Called when a request's logits were not finite.
        on_death: Called once when the engine ends without having been stopped.
    """

    ready: Ready

    def __init__(self) -> None:
        self.on_wanted: Callable[[Wanted], None] | None = None
        self.on_moved: Callable[[Moved], None] | None = None
        self.on_not_finite: Callable[[NotFinite], None] | None = None
        self.on_death: Callable[[], None] | None = None
        self._streams: dict[str, asyncio.Queue[Delta | VeneerError]] = {}
        self._queries: dict[int, asyncio.Future[State]] = {}
        self._tokens = itertools.count()
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._dead = False
        self._outbox: list[Command] = []
        self._link: _Link

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
        link = _ThreadLink(client) if in_process else _ProcessLink(client)
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

        Leaving early, by `aclose` or cancellation, aborts the request.

        Raises:
            VeneerError: The request failed; the class follows the status.
        """
        if self._dead:
            raise UnavailableError("the engine is away")
        if submit.request_id in self._streams:
            raise errors.AbortedError(f"request_id {submit.request_id!r} is in use")
        stream: asyncio.Queue[Delta | VeneerError] = asyncio.Queue()
        self._streams[submit.request_id] = stream
        ended = False
        try:
            self._send(submit)
            while not ended:
                delta = await stream.get()
                later: VeneerError | None = None
                while not isinstance(delta, VeneerError) and not stream.empty():
                    following = stream.get_nowait()
                    if isinstance(following, VeneerError):
                        later = following
                        break
                    delta = Delta(delta.request_id, delta.index, delta.ids + following.ids, following.finish, delta.prompt_tokens)
                if isinstance(delta, VeneerError):
                    ended = True
                    raise delta
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
        if self._dead:
            raise UnavailableError("the engine is away")
        token = next(self._tokens)
        answer = self._queries[token] = asyncio.get_running_loop().create_future()
        try:
            self._send(Query(token))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise UnavailableError(f"the engine did not answer within {timeout_s:g} s") from error
        finally:
            del self._queries[token]

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

    def receive(self, events: Iterable[Event]) -> None:
        """Hands events to whom they concern; called by the link, in the event loop."""
        for event in events:
            match event:
                case Tokens(deltas):
                    for delta in deltas:
                        self._put(delta.request_id, delta)
                case Failed(request_id, status, message):
                    error = _STATUSES.get(status, errors.InternalError)(message)
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
                case Wanted():
                    _call(self.on_wanted, event)
                case Moved():
                    _call(self.on_moved, event)
                case NotFinite():
                    _call(self.on_not_finite, event)

    def died(self) -> None:
        """Ends every stream; called by the link when no event can come any more."""
        if self._dead:
            return
        self._dead = True
        error = UnavailableError("the engine ended")
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()
        for stream in self._streams.values():
            stream.put_nowait(UnavailableError("the engine ended"))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(UnavailableError("the engine ended"))
        if not self._stopping and self.on_death is not None:
            self.on_death()

    def _put(self, request_id: str, item: Delta | VeneerError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.put_nowait(item)


def _call(callback: Callable[[Any], None] | None, event: Event) -> None:
    if callback is not None:
        callback(event)


class _Link(Protocol):
    """How commands and events travel."""

    @property
    def pid(self) -> int | None: ...

    async def open(self, config: EngineConfig) -> None: ...

    def send(self, commands: list[Command]) -> None: ...

    async def close(self) -> None: ...


class _ProcessLink:
    """An engine in a process of its own, on one end of a socket pair."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id."""
        return None if self._process is None else self._process.pid

    async def open(self, config: EngineConfig) -> None:
        """Starts the process and sends the settings."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dataplane.engine", "--fd", str(theirs.fileno()),
                pass_fds=(theirs.fileno(),), env=_child_environment(),
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=_LINE_LIMIT)
        self._writer.write(config.to_json().encode() + b"\n")
        self._reading = asyncio.create_task(self._read(reader))

    def send(self, commands: list[Command]) -> None:
        """Writes lines."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"".join(map(encode, commands)))

    async def close(self) -> None:
        """Waits for the process to end, then makes it end."""
        if self._process is not None:
            try:
                async with asyncio.timeout(20):
                    if self._writer is not None and self._writer.can_write_eof() and not self._writer.is_closing():
                        self._writer.write_eof()
                    await self._process.wait()
            except (TimeoutError, OSError):
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if self._reading is not None:
            await self._reading
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._client.receive((decode(line),))  # type: ignore[arg-type]
        except (OSError, ValueError):
            pass  # a torn line: the process died while it wrote
        finally:
            self._client.died()


class _ThreadLink:
    """An engine in a thread of this process."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._engine: Any = None
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """None."""
        return None

    async def open(self, config: EngineConfig) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, args=(config,), name="engine", daemon=True)
        self._thread.start()

    def send(self, commands: list[Command]) -> None:
        """Hands commands over."""
        for command in commands:
            self._engine.send(command)

    async def close(self) -> None:
        """Waits for the thread."""
        if self._thread is not None:
            if self._engine is not None:
                self._engine.send(Stop())
            await asyncio.to_thread(self._thread.join)

    def _run(self, config: EngineConfig) -> None:
        from dataplane.engine.engine import Engine

        try:
            self._engine = Engine(config, lambda events: self._post(self._client.receive, tuple(events)))
            self._engine.run()
        except VeneerError as error:
            self._post(self._client.receive, (Failed("", error.status, error.message),))
        except Exception:
            _log.exception("the engine failed")
        finally:
            self._post(self._client.died)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone
            self._loop.call_soon_threadsafe(function, *arguments)


def _child_environment() -> dict[str, str]:
    """The environment of this process, with huge pages asked of malloc (a third of the step time on the CPU, 64 rows of SmolLM2)
    and with the folder that this package came from on the import path.
    """
    environment = dict(os.environ)
    tunables = environment.get("GLIBC_TUNABLES")
    if tunables is None or "glibc.malloc.hugetlb" not in tunables:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{_HUGE_PAGES}" if tunables else _HUGE_PAGES
    root = str(Path(__file__).resolve().parents[2])
    paths = environment.get("PYTHONPATH", "").split(os.pathsep) if environment.get("PYTHONPATH") else []
    environment["PYTHONPATH"] = os.pathsep.join([root, *(path for path in paths if path != root)])
    return environment
