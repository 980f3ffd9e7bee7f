"""Follows the catalogue's change feed: every change is seen within one poll, however many hints were lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from dataplane.catalog_client import Change, Changes
from veneer.errors import VeneerError

_log = logging.getLogger(__name__)


class ChangeFeed:
    """Polls the control plane and hands on what changed. Owned by the event loop; `run` is its one task.

    Args:
        read: Reads a page from a cursor.
        on_changes: Called with the changes of a page, in commit order.
        on_reset: Called when the cursor was too old: everything cached must be asked again.
        interval_s: Time between polls.
        min_interval_s: Shortest time between polls, however often `poke` is called.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        read: Callable[[str], Awaitable[Changes]],
        *,
        on_changes: Callable[[tuple[Change, ...]], None],
        on_reset: Callable[[], None],
        interval_s: float = 2.0,
        min_interval_s: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._on_changes = on_changes
        self._on_reset = on_reset
        self._interval_s = interval_s
        self._min_interval_s = min_interval_s
        self._clock = clock
        self._cursor = ""
        self._poked = asyncio.Event()
        self._current_s = clock()

    @property
    def age_s(self) -> float:
        """Seconds since this node last knew everything that was committed; it rises while the control plane is unreachable."""
        return self._clock() - self._current_s

    def poke(self) -> None:
        """Has the feed read soon instead of at the next poll."""
        self._poked.set()

    async def run(self) -> None:
        """Polls until cancelled; a failed poll is tried again at the next interval."""
        while True:
            try:
                while await self.poll():
                    pass
            except VeneerError as error:
                _log.warning("the change feed cannot be read", extra={"status": error.status})
            await asyncio.sleep(self._min_interval_s)
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._poked.wait()
            except TimeoutError:
                pass
            self._poked.clear()

    async def poll(self) -> bool:
        """Reads one page; returns whether there may be more at once."""
        started_s = self._clock()
        page = await self._read(self._cursor)
        # The first read only says where the feed stands; what was cached before it may be old already.
        begins = page.reset or not self._cursor
        if begins:
            self._on_reset()
        if page.changes:
            self._on_changes(page.changes)
        # A page may be empty though more follows: the feed holds changes, too, that no data plane is told of.
        is_end = begins or page.next_cursor == self._cursor
        self._cursor = page.next_cursor
        if is_end:
            self._current_s = started_s
        return not is_end
