"""How commands and events travel between a client and its engine: a process at the other end of a socket, or a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from dataplane.engine.codec import decode, encode
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Command, Event, Failed, Stop
from veneer.errors import VeneerError

_log = logging.getLogger(__name__)
_LINE_LIMIT = 64 << 20
_HUGE_PAGES = "glibc.malloc.hugetlb=1"

Receive = Callable[[Iterable[Event]], None]
"""Takes events, in the event loop."""


class Link(Protocol):
    """How commands and events travel."""

    @property
    def pid(self) -> int | None:
        """Process id of an engine in a process of its own."""

    async def open(self, config: EngineConfig) -> None:
        """Starts the engine."""

    def send(self, commands: list[Command]) -> None:
        """Sends commands, in order."""

    def kill(self) -> None:
        """Ends an engine that does not answer, at once."""

    async def close(self) -> None:
        """Waits for the engine to end; one that does not is killed."""


class ProcessLink:
    """An engine in a process of its own, on one end of a socket pair."""

    def __init__(self, receive: Receive, died: Callable[[], None]) -> None:
        self._receive = receive
        self._died = died
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
                sys.executable, "-m", "dataplane.engine", "--fd", str(theirs.fileno()), "--parent", str(os.getpid()),
                pass_fds=(theirs.fileno(),), env=child_environment(),
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=_LINE_LIMIT)
        except BaseException:
            ours.close()
            raise
        self._writer.write(config.to_json().encode() + b"\n")
        self._reading = asyncio.create_task(self._read(reader))

    def send(self, commands: list[Command]) -> None:
        """Writes lines."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"".join(map(encode, commands)))

    def kill(self) -> None:
        """Kills the process; the end of its stream tells of its death."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

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
                self._receive((decode(line),))  # type: ignore[arg-type]
        except (OSError, ValueError) as error:  # a torn line: the process died while it wrote
            _log.warning("the engine's stream broke off", extra={"cause": type(error).__name__})
        finally:
            if self._writer is not None:
                self._writer.close()  # an engine that still runs ends at the end of its stream
            self._died()


class ThreadLink:
    """An engine in a thread of this process."""

    def __init__(self, receive: Receive, died: Callable[[], None]) -> None:
        self._receive = receive
        self._died = died
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

    def kill(self) -> None:
        """Counts the engine as dead; a thread cannot be ended from outside."""
        self._post(self._died)

    async def close(self) -> None:
        """Waits for the thread."""
        if self._thread is not None:
            if self._engine is not None:
                self._engine.send(Stop())
            await asyncio.to_thread(self._thread.join)

    def _run(self, config: EngineConfig) -> None:
        from dataplane.engine.engine import Engine

        try:
            self._engine = Engine(config, lambda events: self._post(self._receive, tuple(events)))
            self._engine.run()
        except VeneerError as error:
            self._post(self._receive, (Failed("", error.status, error.message),))
        except Exception:  # noqa: BLE001 - whatever it was, the streams end and the log says why
            _log.exception("the engine failed")
        finally:
            self._post(self._died)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone
            self._loop.call_soon_threadsafe(function, *arguments)


def child_environment() -> dict[str, str]:
    """Returns the environment of this process with two changes for an engine.

    Huge pages are asked of malloc (they take a third off the step time on the CPU, 64 rows of SmolLM2), and the folder that this
    package came from is on the import path.
    """
    environment = dict(os.environ)  # noqa: TID251 - a child inherits it; no setting is read from it
    tunables = environment.get("GLIBC_TUNABLES")
    if tunables is None or "glibc.malloc.hugetlb" not in tunables:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{_HUGE_PAGES}" if tunables else _HUGE_PAGES
    root = str(Path(__file__).resolve().parents[2])
    paths = environment.get("PYTHONPATH", "").split(os.pathsep) if environment.get("PYTHONPATH") else []
    environment["PYTHONPATH"] = os.pathsep.join([root, *(path for path in paths if path != root)])
    return environment
