"""Faults that strike while clients work, and the proof from the records that they did."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import psycopg

from benchmarks.histories.history import Fault, History
from benchmarks.histories.recorder import Recorder
from benchmarks.histories.records import Operation, is_read
from benchmarks.histories.system import System

KINDS = ("kill", "restart", "pause", "read-only")
_MAX_TRIES = 4
_LONGEST_PAUSE_S = 1.0
_LONGEST_READ_ONLY_S = 2.0
_PATIENCE_S = 20.0
_BOUNDED: dict[str, Any] = {"connect_timeout": 10, "options": "-c statement_timeout=10000"}


class Injector:
    """Strikes a system with one fault of each kind. Owned by one task.

    Attributes:
        faults: What it did so far.
        is_over: It has done all, and everything serves again.
    """

    def __init__(self, system: System, recorder: Recorder, *, seed: int, kinds: Sequence[str] = KINDS) -> None:
        self._kinds = kinds
        self._system = system
        self._recorder = recorder
        self._chance = random.Random(seed)
        self.faults: list[Fault] = []
        self.is_over = False
        self._doing = "waiting for the clients"

    def __str__(self) -> str:
        """What it did, and does."""
        done = ", ".join(one.kind for one in self.faults) or "none"
        return f"faults so far: {done}; now: {self._doing}"

    async def run(self, *, ready: Callable[[], bool]) -> None:
        """Strikes in random order, each kind when there are writes under way on what it strikes."""
        strikes: dict[str, Callable[[int], Awaitable[None]]] = {
            "kill": self._kill,
            "restart": self._restart,
            "pause": self._pause,
            "read-only": self._read_only,
        }
        while not ready():  # noqa: ASYNC110  the clients are other tasks
            await asyncio.sleep(0.01)
        for kind in self._chance.sample(self._kinds, len(self._kinds)):
            for _ in range(_MAX_TRIES):
                plane = self._chance.randrange(len(self._system.planes))
                struck = None if kind in ("restart", "read-only") else plane
                await self._wait_for_writes(struck)
                start = time.monotonic_ns()
                self._doing = kind
                await strikes[kind](plane)
                fault = Fault(kind, struck, start, time.monotonic_ns())
                self.faults.append(fault)
                self._doing = "waiting for what it met"
                await asyncio.sleep(self._chance.uniform(0.1, 0.3))
                if has_hit(fault, self._recorder.operations):
                    break
        self._doing = "nothing"
        self.is_over = True

    async def _wait_for_writes(self, plane: int | None) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self._recorder.num_in_flight(plane) == 0 and time.monotonic() < deadline:  # noqa: ASYNC110  others write
            await asyncio.sleep(0.001)

    async def _kill(self, plane: int) -> None:
        process = self._system.planes[plane]
        process.process.send(signal.SIGKILL)
        await asyncio.to_thread(process.kill)
        await asyncio.to_thread(process.start)

    async def _restart(self, plane: int) -> None:
        del plane
        self._system.postgres.process.send(signal.SIGKILL)
        await asyncio.to_thread(self._system.postgres.kill)
        await asyncio.to_thread(self._system.postgres.start)

    async def _pause(self, plane: int) -> None:
        process = self._system.planes[plane].process
        process.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(self._chance.uniform(0.2, _LONGEST_PAUSE_S))
        finally:
            process.send(signal.SIGCONT)

    async def _read_only(self, plane: int) -> None:
        del plane
        refused = self._recorder.num_refused_writes
        await asyncio.to_thread(self._set_read_only, on=True)
        try:
            deadline = time.monotonic() + _LONGEST_READ_ONLY_S
            while self._recorder.num_refused_writes < refused + 3 and time.monotonic() < deadline:  # noqa: ASYNC110  others write
                await asyncio.sleep(0.01)
        finally:
            await asyncio.to_thread(self._set_read_only, on=False)

    def _set_read_only(self, *, on: bool) -> None:
        with psycopg.connect(self._system.postgres.url(scheme="postgresql"), autocommit=True, **_BOUNDED) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
            connection.execute("SELECT pg_reload_conf()")


def has_hit(fault: Fault, operations: list[Operation]) -> bool:
    """Whether the records show that a fault met operations under way.

    A kill and a restart must have cost one that was in flight its answer; a pause must have kept one waiting to its end (or its
    client gave up); a read-only primary must have refused a write that was sent while it was one.
    """
    if fault.kind == "read-only":
        return any(
            not is_read(one.what) and one.error == "UNAVAILABLE" and fault.start < one.call < fault.end for one in operations
        )
    struck = [one for one in operations if fault.plane in (None, one.plane) and one.call < fault.start < one.end]
    if fault.kind == "pause":
        return any(one.end >= fault.end or one.error == "DEADLINE_EXCEEDED" for one in struck)
    return any(one.outcome is None for one in struck)


def hits(history: History) -> Counter[str]:
    """How often each kind of fault hit, by the records alone."""
    operations = list(history.operations)
    return Counter(fault.kind for fault in history.faults if has_hit(fault, operations))
