"""One lookup for all who ask for the same thing at the same time, as fresh for each as one of its own."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Coalesced(Generic[_K, _V]):
    """Shares lookups by key: whoever comes while one runs waits for the next, which all who came meanwhile share.

    So an answer is never older than the question, and there is one lookup of a key at a time. Owned by one event loop.
    """

    def __init__(self, look_up: Callable[[_K], Awaitable[_V]], *, pause_s: float = 0.0) -> None:
        """Shares lookups.

        Args:
            look_up: The lookup; what it raises, all raise who share it.
            pause_s: Time from the begin of one lookup to that of the next, for those of all keys together. Whoever comes
                meanwhile shares the next. The first one after a pause begins at once.
        """
        self._look_up = look_up
        self._pause_s = pause_s
        self._begun_s = -math.inf
        self._waiting: dict[_K, list[asyncio.Future[_V]]] = {}
        self._running: dict[_K, asyncio.Task[None]] = {}

    async def get(self, key: _K) -> _V:
        """The value, by a lookup that begins after this call."""
        mine: asyncio.Future[_V] = asyncio.get_running_loop().create_future()  # one that goes away takes nobody along
        waiting = self._waiting.setdefault(key, [])
        waiting.append(mine)
        if len(waiting) == 1 and key not in self._running:
            self._running[key] = asyncio.create_task(self._run(key), name="coalesced lookup")
        return await mine

    async def _run(self, key: _K) -> None:
        try:
            while key in self._waiting:
                if self._pause_s:
                    await self._pause()
                waiting = self._waiting.pop(key)
                try:
                    value = await self._look_up(key)
                except Exception as error:  # noqa: BLE001  it is theirs who wait
                    for one in _left(waiting):
                        one.set_exception(error)
                        one.exception()  # it may go away before it sees it
                except BaseException:
                    for one in waiting:
                        one.cancel()
                    raise
                else:
                    for one in _left(waiting):
                        one.set_result(value)
        finally:
            del self._running[key]
            for one in self._waiting.pop(key, ()):
                one.cancel()

    async def _pause(self) -> None:
        now_s = time.monotonic()
        if (left_s := self._begun_s + self._pause_s - now_s) > 0:
            await asyncio.sleep(left_s)
            now_s = time.monotonic()
        self._begun_s = now_s


def _left(waiting: Iterable[asyncio.Future[_V]]) -> Iterable[asyncio.Future[_V]]:
    return (one for one in waiting if not one.done())
