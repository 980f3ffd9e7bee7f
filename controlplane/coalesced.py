"""One lookup for all who ask for the same thing at the same time, as fresh for each as one of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Coalesced(Generic[_K, _V]):
    """Shares lookups by key: whoever comes while one runs waits for the next, which all who came meanwhile share.

    So an answer is never older than the question, and there is one lookup of a key at a time. Owned by one event loop.
    """

    def __init__(self, look_up: Callable[[_K], Awaitable[_V]]) -> None:
        """Takes the lookup; what it raises, all raise who share it."""
        self._look_up = look_up
        self._waiting: dict[_K, asyncio.Future[_V]] = {}
        self._running: dict[_K, asyncio.Task[None]] = {}

    async def get(self, key: _K) -> _V:
        """The value, by a lookup that begins after this call."""
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = asyncio.get_running_loop().create_future()
            if key not in self._running:
                self._running[key] = asyncio.create_task(self._run(key), name="coalesced lookup")
        return await asyncio.shield(waiting)  # one that goes away takes nobody along

    async def _run(self, key: _K) -> None:
        try:
            while (waiting := self._waiting.pop(key, None)) is not None:
                try:
                    waiting.set_result(await self._look_up(key))
                except Exception as error:  # noqa: BLE001  it is theirs who wait
                    waiting.set_exception(error)
                    waiting.exception()  # nobody may be left to see it
                except BaseException:
                    waiting.cancel()
                    raise
        finally:
            del self._running[key]
            if (left := self._waiting.pop(key, None)) is not None:
                left.cancel()
