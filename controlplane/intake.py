"""Checks adapter files of strangers in jailed child processes (`controlplane.jail`, `controlplane.jailed_check`)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

import veneer
from controlplane.fork_server import WEIGHTS_FD
from veneer.artifact import ArtifactError, BaseDescription, Limits, Report
from veneer.errors import UnavailableError, Violation

DEFAULT_MEMORY_BYTES = 512 << 20
"""Memory that a check may take on top of an idle interpreter's."""

_MAX_MESSAGE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_EXIT_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 30.0  # 0.1 s when the machine is idle; a slow start is no fault of the files
_MAX_FORKS = 1000
"""Children of one server. All have its addresses in memory, which must not be of use for long to whoever should learn them."""
_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
# The server has no site directories and no environment: only the standard library and these two places.
_BOOT = (
    "import sys; sys.path += sys.argv[1:3]; from controlplane.fork_server import serve; "
    "from controlplane.jailed_check import main; serve(main)"
)
_PLACES = (str(Path(veneer.__file__).parents[1]), str(Path(np.__file__).parents[1]))
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class JailedChecks:
    """Checks adapters, each in a child process of its own that can do nothing but read its two files and answer.

    The children are copies of a server that runs between `start` and `close` (`controlplane.fork_server`). It is replaced after
    so many of them, and after one that did not end by itself, since that one may have learned what another can use. Owned by one
    event loop.
    """

    def __init__(self, *, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        """Starts nothing.

        Args:
            memory_bytes: Memory for a check.
        """
        self._memory_bytes = memory_bytes
        self._server: _Server | None = None
        self._leaving = set[asyncio.Task[None]]()
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the server, so that the first check need not wait for it. One that cannot start is tried again by each check."""
        with suppress(UnavailableError):
            await self._ready()

    async def close(self) -> None:
        """Lets the server go. No check may run any more."""
        server = self._server
        self._retire(server)
        if server is not None:
            with suppress(ProcessLookupError):
                server.process.kill()
        while self._leaving:
            await asyncio.wait(self._leaving)

    async def __call__(
        self, config_path: Path, weights_path: Path, base: BaseDescription, limits: Limits, *, timeout_s: float
    ) -> Report:
        """Checks an adapter. The caller bounds how many checks run at once.

        Args:
            config_path: The configuration; a regular file.
            weights_path: The weights; a regular file.
            base: The base that the adapter must fit.
            limits: What is allowed.
            timeout_s: Time for the check once the child is ready; also its processor time.

        Returns:
            What the check found.

        Raises:
            ArtifactError: The adapter is refused, or made the check run out of memory or time.
            UnavailableError: The jail could not be set up; the message names the cause. Nothing was read.
        """
        order = {
            "base": base.to_json(),
            "limits": asdict(limits),
            "weights_fd": WEIGHTS_FD,
            "memory_bytes": self._memory_bytes,
            "cpu_s": math.ceil(timeout_s),
        }
        with ExitStack() as stack:
            paths = {_CONFIG: config_path, _WEIGHTS: weights_path}
            files = [stack.enter_context(_opened_regular(path, name)) for name, path in paths.items()]
            async with self._forked(json.dumps(order), files) as child:
                ready = await _read_message(child, timeout_s=_START_TIMEOUT_S)
                result = await _read_message(child, timeout_s=timeout_s) if ready == {"jail": None} else {}
                if "exceeded" not in ready and result.get("exceeded") not in ("time", "answer"):
                    await child.wait(_EXIT_TIMEOUT_S)
        if child.status != 0:
            self._retire(child.server)
        if ready != {"jail": None}:
            slow = f"it was not ready within {_START_TIMEOUT_S:g} s"
            cause = slow if "exceeded" in ready else ready.get("jail", f"its process ended with status {child.status}")
            raise UnavailableError(f"the jail of the publish check could not be set up: {cause}")
        if "report" in result:
            return Report.from_fields(result["report"])
        raise ArtifactError.of(_violations(result, child.status, timeout_s=timeout_s, memory_bytes=self._memory_bytes))

    @asynccontextmanager
    async def _forked(self, order: str, files: list[int]) -> AsyncIterator[_Child]:
        """A child with an order and two open files; it is gone at the end of the block, whatever it does.

        Each descriptor has one owner, its socket object. The event loop borrows it for one wait at a time: a transport of uvloop
        over a pipe closes the number that its file object closes again, by then another thread's.

        Raises:
            UnavailableError: There is no server.
        """
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            report, report_end = _socket_pair(stack)
            link, link_end = _socket_pair(stack)
            report.shutdown(socket.SHUT_WR)  # a child reads nothing there
            server = await self._send([*files, report_end.fileno(), link_end.fileno()])
            report_end.close()
            link_end.close()
            child = _Child(server, report, link)
            stack.pop_all()
        try:
            with suppress(OSError, TimeoutError):  # a child that is gone already tells by its silence
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await loop.sock_sendall(link, order.encode() + b"\n")
            yield child
        finally:
            await asyncio.shield(self._leave(child.end(), name="publish checks: child"))

    async def _send(self, fds: list[int]) -> _Server:
        """Orders a child; a server that turns out to be gone is replaced once."""
        for attempt in range(2):
            server = await self._ready()
            try:
                socket.send_fds(server.control, [b"!"], fds)  # at once: a server may be retired while a task waits
            except OSError as error:
                self._retire(server)
                if attempt:
                    raise UnavailableError(f"the jail of the publish check could not be set up: {error.strerror}") from error
            else:
                server.num_forks += 1
                return server
        raise AssertionError

    async def _ready(self) -> _Server:
        """The server, a new one where there is none that can be used; it may still be importing.

        Raises:
            UnavailableError: It cannot be started.
        """
        async with self._starting:
            server = self._server
            if server is not None and (server.num_forks >= _MAX_FORKS or server.process.returncode is not None):
                self._retire(server)
            if self._server is None:
                self._server = await _start_server()
            return self._server

    def _retire(self, server: _Server | None) -> None:
        """Gives the server no more orders; it goes after its last child."""
        if server is None or server is not self._server:
            return
        self._server = None
        server.control.close()
        self._leave(_gone(server.process), name="publish checks: server")

    def _leave(self, end: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        """Starts what ends a process, for `close` to wait for."""
        leaving = asyncio.create_task(end, name=name)
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return leaving


@dataclass(slots=True)
class _Server:
    process: asyncio.subprocess.Process
    control: socket.socket
    num_forks: int = 0


async def _start_server() -> _Server:
    control, other = socket.socketpair()
    control.settimeout(0)
    with other:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-c", _BOOT, *_PLACES),
                stdin=other.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
            )
        except OSError as error:
            control.close()
            raise UnavailableError(f"the jail of the publish check could not be started: {error}") from error
        except BaseException:
            control.close()
            raise
    return _Server(process, control)


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Waits for a server that was given up, and ends it when it stays: its children are ended by their links."""
    try:
        async with asyncio.timeout(2 * _EXIT_TIMEOUT_S + _START_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _Child:
    """A forked child as seen from here: what it writes, and how it ended. Owns its two sockets.

    Attributes:
        server: What it is a copy of.
        status: As `os.waitstatus_to_exitcode` gives it; None while it lives, and when its server went first.
    """

    def __init__(self, server: _Server, report: socket.socket, link: socket.socket) -> None:
        self.server = server
        self.status: int | None = None
        self._report = report
        self._link = link
        self._unread = bytearray()

    async def read_line(self) -> bytes:
        """Reads its next line; what it has written of one, possibly nothing, if it has ended.

        Raises:
            ValueError: The line is longer than the limit.
        """
        loop = asyncio.get_running_loop()
        while (end := self._unread.find(b"\n")) < 0:
            if len(self._unread) > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a line is longer than {_MAX_MESSAGE_BYTES} bytes")
            data = await loop.sock_recv(self._report, _READ_BYTES)
            if not data:
                end = len(self._unread)
                break
            self._unread += data
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    async def wait(self, timeout_s: float) -> None:
        """Waits until it has ended, or the time is up."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                data = await asyncio.get_running_loop().sock_recv(self._link, 16)
                self.status = int(data) if data else None
                self._link.close()

    async def end(self) -> None:
        """Has it killed unless it has ended, and waits until it is gone."""
        self._report.close()
        if self._link.fileno() >= 0:
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_WR)
            await self.wait(_EXIT_TIMEOUT_S)
            self._link.close()


def _socket_pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Makes connected sockets, of which the first does not block; the stack closes both."""
    ours, theirs = socket.socketpair()
    stack.enter_context(ours)
    stack.enter_context(theirs)
    ours.settimeout(0)
    return ours, theirs


@contextmanager
def _opened_regular(path: Path, name: str) -> Iterator[int]:
    """Opens a regular file for reading; neither a link nor a pipe, which would block."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ArtifactError.of([Violation(field=name, description=f"cannot be opened: {error.strerror}")]) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ArtifactError.of([Violation(field=name, description="must be a regular file")])
        yield fd
    finally:
        os.close(fd)


async def _read_message(child: _Child, *, timeout_s: float) -> dict[str, Any]:
    """Reads the child's next line; empty when it has none, takes too long, or writes more than is allowed."""
    try:
        async with asyncio.timeout(timeout_s):
            line = await child.read_line()
        message = json.loads(line)
    except TimeoutError:
        return {"exceeded": "time"}
    except (OSError, json.JSONDecodeError):
        return {}
    except ValueError:  # the line is longer than the limit
        return {"exceeded": "answer"}
    return message if isinstance(message, dict) else {}


def _violations(result: dict[str, Any], status: int | None, *, timeout_s: float, memory_bytes: int) -> list[Violation]:
    if "violations" in result:
        return [Violation(field=field, description=description) for field, description in result["violations"]]
    if result.get("exceeded") == "memory":
        description = f"the files made the check exceed its memory of {memory_bytes} bytes"
    elif result.get("exceeded") == "time" or status == -signal.SIGXCPU:
        description = f"the files made the check exceed its time of {timeout_s:g} s"
    elif "failed" in result:
        description = f"the files made the check fail: {result['failed']}"
    else:
        description = (
            f"the files made the check exceed its limits ({memory_bytes} bytes, {timeout_s:g} s); it ended with status {status}"
        )
    return [Violation(field="adapter", description=description)]
