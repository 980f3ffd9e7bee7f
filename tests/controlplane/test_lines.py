"""Held connections for reads that are asked often."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import psycopg
import pytest

from controlplane import lines as lines_module
from controlplane.db import Database
from controlplane.lines import Lines
from controlplane.pipeline import Pipeline, Statement
from controlplane.settings import APP_ROLE, Settings
from tests.fixtures.services import TestDatabase
from veneer.errors import UnavailableError

PID = Statement("pid", "SELECT pg_backend_pid()")
LOCK = Statement("lock", "SELECT pg_advisory_xact_lock(1), pg_backend_pid()")
WRONG = Statement("wrong", "SELECT 1 / length($1::text)")


@pytest.fixture
async def opened(settings: Settings) -> AsyncIterator[Database]:
    database = Database(settings)
    yield database
    await database.close()


@pytest.fixture
def lines(opened: Database) -> Lines:
    return opened.lines(APP_ROLE, PID, LOCK, WRONG)


async def _pid(lines: Lines) -> int:
    [[(pid,)]] = await lines.ask((PID, []))
    return int(pid)


async def test_all_who_ask_at_first_share_one_connection(lines: Lines) -> None:
    assert len({*await asyncio.gather(*(_pid(lines) for _ in range(10)))}) == 1


async def test_further_connections_are_made_when_there_is_much_to_do_and_no_more_than_so_many(
    lines: Lines, database: TestDatabase, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "_BUSY", 1)
    with database.connect() as connection:
        connection.execute("SELECT pg_advisory_lock(1)")
        waiting: list[asyncio.Task[object]] = []
        async with asyncio.timeout(60):
            while len(lines._open) < settings.pool_size:  # each that finds all busy has one more made
                waiting.append(asyncio.create_task(lines.ask((LOCK, []))))
                await asyncio.sleep(0.01)
        waiting += [asyncio.create_task(lines.ask((LOCK, []))) for _ in range(20)]
        await asyncio.sleep(0)
        connection.execute("SELECT pg_advisory_unlock(1)")
        await asyncio.gather(*waiting)
        assert len(lines._open) == settings.pool_size


async def test_a_connection_that_ended_is_replaced_and_its_question_asked_again(lines: Lines, database: TestDatabase) -> None:
    first = await _pid(lines)
    with database.connect() as connection:
        connection.execute("SELECT pg_terminate_backend(%s)", [first])
    assert await _pid(lines) != first
    assert len(lines._open) == 1


async def test_what_waits_on_a_connection_that_ends_is_asked_again(lines: Lines, database: TestDatabase) -> None:
    first = await _pid(lines)
    with database.connect() as connection:
        connection.execute("SELECT pg_advisory_lock(1)")
        waiting = asyncio.create_task(lines.ask((LOCK, [])))
        query = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
        while connection.execute(query, [first]).fetchone() != (1,):  # noqa: ASYNC110  only the server knows
            await asyncio.sleep(0.01)
        connection.execute("SELECT pg_terminate_backend(%s), pg_advisory_unlock(1)", [first])
        [[(_, second)]] = await waiting  # type: ignore[misc]
    assert second != first


async def test_old_connections_are_left_and_closed(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_MAX_AGE_S", 0.0)
    first, second = await _pid(lines), await _pid(lines)
    assert first != second
    async with asyncio.timeout(60):
        while lines._tasks:  # noqa: ASYNC110  it is closed behind the back of who asks
            await asyncio.sleep(0.01)


async def test_a_connection_that_was_being_made_at_a_renewal_is_asked_nothing(lines: Lines) -> None:
    make, pids = lines._make, list[int]()

    async def made() -> Pipeline:
        line = await make()
        pids.append(line.connection.info.backend_pid)
        if len(pids) == 1:
            await lines.renew()  # the database moves to another server meanwhile
        return line

    lines._make = made
    assert await _pid(lines) == pids[1]
    assert len(lines._open) == 1


async def test_what_the_database_says_of_a_question_is_told_and_the_connection_stays(lines: Lines) -> None:
    first = await _pid(lines)
    with pytest.raises(psycopg.errors.DivisionByZero):
        await lines.ask((WRONG, [b""]))
    assert await _pid(lines) == first


async def test_an_answer_that_does_not_come_is_not_waited_for(settings: Settings, database: TestDatabase) -> None:
    opened = Database(settings.model_copy(update={"pool_timeout_s": 0.1, "statement_timeout_s": 0.1}))
    lines = opened.lines(APP_ROLE, LOCK)
    with database.connect() as connection:
        connection.execute("SELECT pg_advisory_lock(1)")
        with pytest.raises((TimeoutError, psycopg.errors.QueryCanceled)):
            await lines.ask((LOCK, []))
    await opened.close()


async def test_a_connection_whose_answer_is_late_is_asked_nothing_more(settings: Settings) -> None:
    opened = Database(settings.model_copy(update={"pool_timeout_s": 1.0, "statement_timeout_s": 1.0}))
    lines = opened.lines(APP_ROLE, PID)
    hung = await _pid(lines)
    os.kill(hung, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            while True:
                try:  # who asks does not wait for as long as the connection has
                    assert await asyncio.wait_for(_pid(lines), 1.0) != hung
                    break
                except TimeoutError:
                    continue
    finally:
        os.kill(hung, signal.SIGCONT)
        await opened.close()


async def test_a_database_that_is_away_is_unavailable_until_it_is_back(settings: Settings) -> None:
    nowhere = Database(settings.model_copy(update={"database_url": "postgresql://nobody@127.0.0.1:1/none"}))
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await _pid(nowhere.lines(APP_ROLE, PID))
    await nowhere.close()
