"""One process at a time does a job, and one that lost its turn writes nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from controlplane.db import Database
from controlplane.leader import Leadership
from controlplane.settings import Settings
from tests.fixtures.services import TestDatabase
from veneer.errors import AbortedError


@pytest.fixture
async def two(settings: Settings) -> AsyncIterator[tuple[Database, Database]]:
    """Two processes' connections."""
    one, other = Database(settings), Database(settings)
    yield one, other
    await one.close()
    await other.close()


async def test_a_job_is_one_processs_at_a_time_and_every_term_has_a_higher_epoch(two: tuple[Database, Database]) -> None:
    mine, theirs = (Leadership(database, "job") for database in two)
    async with mine.term() as first, theirs.term() as second, Leadership(two[1], "other job").term() as other:
        assert first is not None
        assert second is None
        assert other is not None
    async with theirs.term() as third:
        assert third is not None
        assert third.epoch > first.epoch


async def test_two_at_once_never_both_have_it(two: tuple[Database, Database]) -> None:
    holders = 0
    turns = 0

    async def work(database: Database) -> None:
        nonlocal holders, turns
        for _ in range(10):
            async with Leadership(database, "job").term() as term:
                if term is not None:
                    holders += 1
                    assert holders == 1
                    await asyncio.sleep(0)
                    holders -= 1
                    turns += 1

    await asyncio.gather(*(work(database) for database in two))
    assert turns >= 10


async def test_who_lost_its_session_is_kept_out_by_the_next_term(two: tuple[Database, Database], database: TestDatabase) -> None:
    mine, theirs = (Leadership(one, "job") for one in two)
    end = """SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"""
    with pytest.raises(Exception, match=r"terminating|closed|away"):
        async with mine.term() as old:
            assert old is not None
            with database.connect() as connection:
                connection.execute(end)
            async with theirs.term() as new:
                assert new is not None
                async with two[1].relay.begin() as connection_of_theirs:
                    await new.fence(connection_of_theirs)
            async with two[0].relay.begin() as connection_of_mine:
                with pytest.raises(AbortedError, match="another process"):
                    await old.fence(connection_of_mine)
    async with mine.term() as again:  # the session that was lost did not go back to the pool
        assert again is not None
