"""Held connections for reads that are asked often: prepared statements, in one round trip, on few connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import psycopg

from controlplane.pipeline import Pipeline, Rows, Statement
from veneer.errors import UnavailableError

_BUSY: Final = 16
"""Transactions on their way on a connection at which a further one is made."""
_MAX_AGE_S: Final = 300.0
_LEAVE_S: Final = 0.05


class Lines:
    """Connections of one role with the same statements prepared. Owned by one event loop; closed at its end.

    For reads alone: what fails with its connection is asked once more on another one.
    """

    def __init__(self, make: Callable[[], Awaitable[Pipeline]], *, size: int, timeout_s: float) -> None:
        """Makes no connection yet.

        Args:
            make: Makes a connection.
            size: How many there may be.
            timeout_s: How long an answer may take.
        """
        self._make = make
        self._size = size
        self._timeout_s = timeout_s
        self._open: list[tuple[Pipeline, float]] = []  # with the time when it is too old
        self._opening = asyncio.Lock()
        self._renewals = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, *steps: tuple[Statement, Sequence[bytes | None]]) -> list[Rows]:
        """Reads in one transaction; see `Pipeline.ask`.

        Raises:
            UnavailableError: No connection could be made.
            psycopg.Error: What the database says.
            TimeoutError: It took too long.
        """
        async with asyncio.timeout(self._timeout_s):
            line = await self._line()
            try:
                return await line.ask(*steps)
            except psycopg.Error:
                if line.is_open:
                    raise
            return await (await self._line()).ask(*steps)  # the connection may have been older than the database's last start

    async def renew(self) -> None:
        """Has what is asked from now on use new connections; who waits for the old ones asks again."""
        self._renewals += 1
        old, self._open = self._open, []
        for line, _ in old:
            await line.close()

    async def close(self) -> None:
        """Closes all connections."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.renew()

    async def _line(self) -> Pipeline:
        """The connection with the least to do; a further one is made meanwhile when all have much."""
        self._leave_old()
        if not self._open:
            async with self._opening:
                if not self._open:
                    await self._add()
        line = min((line for line, _ in self._open), key=lambda one: one.num_asked)
        if line.num_asked >= _BUSY and len(self._open) < self._size and not self._opening.locked():
            self._start(self._add_another())
        return line

    async def _add(self) -> None:
        while True:
            renewals = self._renewals
            line = await self._make()
            if renewals == self._renewals:
                self._open.append((line, time.monotonic() + _MAX_AGE_S))
                return
            await line.close()  # it was begun before a renewal: it may lead to the server of before

    async def _add_another(self) -> None:
        async with self._opening:
            with contextlib.suppress(UnavailableError, TimeoutError):  # those that are open do the work
                async with asyncio.timeout(self._timeout_s):
                    await self._add()

    def _leave_old(self) -> None:
        now_s = time.monotonic()
        left = [one for one in self._open if one[1] <= now_s or not self._answers(one[0])]
        if left:
            self._open = [one for one in self._open if one not in left]
            for line, _ in left:
                self._start(self._end(line))

    def _answers(self, line: Pipeline) -> bool:
        """Whether a connection is open, to a server that does not hang: who asked may have gone away before that was known."""
        return line.is_open and line.waits_s <= self._timeout_s

    async def _end(self, line: Pipeline) -> None:
        """Closes a connection when it has answered."""
        try:
            while self._answers(line) and line.num_asked:  # noqa: ASYNC110  it is asked nothing more, and answers have a deadline
                await asyncio.sleep(_LEAVE_S)
        finally:
            await line.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
