"""The engine's own process: commands and events as JSON lines over a socket that its parent made."""

from __future__ import annotations

import argparse
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from dataplane.engine.codec import decode, encode
from dataplane.engine.collector import share, tame
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Command, Event, Failed, Stop
from veneer.errors import InternalError, VeneerError

_PR_SET_PDEATHSIG = 1
_NICENESS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Serves one engine on a socket and returns the exit status.

    The first line that comes is the `EngineConfig`; then commands. The first event is `Ready`, or `Failed` without a request id
    when the engine cannot start. The process ends with its parent: by the kernel's signal where there is one, and at the end of
    the socket's stream.
    """
    parser = argparse.ArgumentParser(prog="dataplane.engine", description="One engine on an inherited socket.")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of a connected stream socket")
    parser.add_argument("--parent", type=int, required=True, help="process that starts this one, and ends it with itself")
    arguments = parser.parse_args(argv)
    if not _die_with(arguments.parent):
        return 1
    with socket.socket(fileno=arguments.fd) as channel:
        return serve(channel)


def serve(channel: socket.socket) -> int:
    """Runs an engine on a connected socket until `Stop`, the end of the stream, or a fault of its own (status 1)."""
    writer = _Writer(channel)
    reader = channel.makefile("rb")
    try:
        config = EngineConfig.from_json(reader.readline())
        if config.device == "cpu":
            _yield_to_planes()
        from dataplane.engine.engine import Engine

        engine = Engine(config, writer.emit)
        tame()
        share()
    except Exception as error:  # noqa: BLE001 - whatever stops the start is told to the parent
        fault = error if isinstance(error, VeneerError) else InternalError(f"{type(error).__name__}: {error}")
        writer.emit((Failed("", fault.status, fault.message),))
        writer.close()
        return 1

    def read() -> None:
        for line in reader:
            command: Command = decode(line)  # type: ignore[assignment]
            engine.send(command)
        engine.send(Stop())

    threading.Thread(target=read, name="engine-commands", daemon=True).start()
    try:
        engine.run()
    finally:
        writer.close()
    return 0


class _Writer:
    """Writes events from a thread of its own, so that the step loop does not wait for the parent to read."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._events: queue.SimpleQueue[Sequence[Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-events", daemon=True)
        self._thread.start()

    def emit(self, events: Sequence[Event]) -> None:
        """Queues the events of one turn."""
        self._events.put(events)

    def close(self) -> None:
        """Waits until all is written, for a while."""
        self._events.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (events := self._events.get()) is not None:
            try:
                self._channel.sendall(b"".join(map(encode, events)))
            except OSError:
                return


def _yield_to_planes() -> None:
    """Has steps that compute on all cores leave them for a moment to whoever has little to do: planes, database, clients.

    To bring an adapter from the store takes twenty short turns of such processes, each of which waited for a step's threads: a
    cold request's first token came 5.2 steps after a warm one's, and comes after 4.5; steps take as long as before.
    """
    os.nice(_NICENESS)


def _die_with(parent: int) -> bool:
    """Has the kernel end this process when its parent ends; False when it has ended already, so that no signal would come."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
