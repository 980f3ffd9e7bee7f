"""Every committed change is heard of, in order, however the polls go."""

from __future__ import annotations

import asyncio

import pytest

from dataplane.catalog_client import Change, Changes
from dataplane.change_feed import ChangeFeed
from veneer.errors import UnavailableError


def change(number: int) -> Change:
    return Change(1, "acme", "bot", f"{number:064x}", number)


NOBODYS = Change(1000, "", "node", "", 0)
"""Of a kind that the control plane keeps to itself."""


class Log:
    """A change feed of the control plane: pages of two."""

    def __init__(self, *, interval_s: float = 60.0) -> None:
        self.now_s = 0.0
        self.committed: list[Change] = []
        self.heard: list[Change] = []
        self.num_resets = 0
        self.num_reads = 0
        self.errors: list[Exception] = []
        self.reset_next = False
        self.was_read = asyncio.Event()
        self.feed = ChangeFeed(
            self.read,
            on_changes=self.heard.extend,
            on_reset=self.on_reset,
            interval_s=interval_s,
            min_interval_s=0,
            clock=lambda: self.now_s,
        )

    def on_reset(self) -> None:
        self.num_resets += 1

    async def read(self, cursor: str) -> Changes:
        self.num_reads += 1
        self.was_read.set()
        if self.errors:
            raise self.errors.pop(0)
        if not cursor or self.reset_next:
            reset, self.reset_next = self.reset_next, False
            return Changes((), str(len(self.committed)), reset)
        place = int(cursor)
        page = tuple(self.committed[place : place + 2])
        return Changes(tuple(one for one in page if one.tenant), str(place + len(page)), False)

    async def until_read(self, count: int) -> None:
        while self.num_reads < count:
            await self.was_read.wait()
            self.was_read.clear()


@pytest.fixture
def log() -> Log:
    return Log()


async def test_the_first_read_says_where_the_feed_stands_and_forgets_what_was_cached(log: Log) -> None:
    log.committed = [change(1)]
    assert not await log.feed.poll()
    assert (log.heard, log.num_resets) == ([], 1)


async def test_all_pages_are_read_in_order(log: Log) -> None:
    await log.feed.poll()
    log.committed = [change(number) for number in range(5)]
    while await log.feed.poll():
        pass
    assert log.heard == log.committed


async def test_a_page_of_changes_that_concern_no_data_plane_is_not_the_end(log: Log) -> None:
    await log.feed.poll()
    log.now_s = 7.0
    log.committed = [NOBODYS, NOBODYS, NOBODYS, change(1)]
    assert await log.feed.poll()
    assert log.feed.age_s == 7.0  # not all that was committed is known
    while await log.feed.poll():
        pass
    assert log.heard == [change(1)]
    assert log.feed.age_s == 0.0


async def test_a_cursor_that_is_too_old_forgets_everything(log: Log) -> None:
    await log.feed.poll()
    log.reset_next = True
    await log.feed.poll()
    assert log.num_resets == 2


async def test_a_failed_poll_loses_no_change(log: Log) -> None:
    log.feed._interval_s = 0
    task = asyncio.create_task(log.feed.run())
    await log.until_read(1)
    log.errors = [UnavailableError("away")] * 3
    log.committed = [change(1), change(2), change(3)]
    while len(log.heard) < 3:
        await log.was_read.wait()
        log.was_read.clear()
        await asyncio.sleep(0)
    assert log.heard == log.committed
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_poke_reads_at_once(log: Log) -> None:
    task = asyncio.create_task(log.feed.run())
    await log.until_read(1)
    log.feed.poke()
    async with asyncio.timeout(60):
        await log.until_read(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_age_rises_while_nothing_can_be_read(log: Log) -> None:
    await log.feed.poll()
    log.now_s = 7
    log.errors = [UnavailableError("away")]
    with pytest.raises(UnavailableError):
        await log.feed.poll()
    assert log.feed.age_s == 7
    await log.feed.poll()
    assert log.feed.age_s == 0
