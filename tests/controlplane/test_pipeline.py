"""Statements on a held connection, many on their way at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest
from sqlalchemy.engine import make_url

from controlplane.db import Database
from controlplane.pipeline import Pipeline, Statement
from controlplane.settings import APP_ROLE, Settings
from veneer.errors import UnavailableError

ECHO = Statement("echo", "SELECT $1::text, length($1::text)")
DIVIDE = Statement("divide", "SELECT 1 / length($1::text)")
SCOPE = Statement("scope", "SELECT set_config('app.tenant', $1::text, true)")
NOW_SCOPE = Statement("now_scope", "SELECT coalesce(current_setting('app.tenant', true), '')")
SLEEP = Statement("sleep", "SELECT pg_sleep(60)")
END = Statement("end", "SELECT pg_terminate_backend(pg_backend_pid())")


@pytest.fixture
async def pipeline(settings: Settings) -> AsyncIterator[Pipeline]:
    database = Database(settings)
    pipeline = await database.open(APP_ROLE, ECHO, DIVIDE, SCOPE, NOW_SCOPE, SLEEP, END)
    yield pipeline
    await pipeline.close()
    await database.close()


async def test_everyone_gets_the_rows_of_its_own_statements(pipeline: Pipeline) -> None:
    texts = [str(number) * (number + 1) for number in range(100)]
    asked = [pipeline.ask((ECHO, [one.encode()]), (ECHO, [b"second"])) for one in texts]
    assert await asyncio.gather(*asked) == [[[(one, len(one))], [("second", 6)]] for one in texts]


async def test_an_error_is_of_its_own_transaction_alone(pipeline: Pipeline) -> None:
    asked = [pipeline.ask((DIVIDE, [b"x" if number % 2 else b""]), (ECHO, [b"after"])) for number in range(6)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in results[::2]] == [psycopg.errors.DivisionByZero] * 3
    assert results[1::2] == [[[(1,)], [("after", 5)]]] * 3


async def test_what_is_set_for_a_transaction_ends_with_it(pipeline: Pipeline) -> None:
    asked = [pipeline.ask((SCOPE, [b"acme"]), (NOW_SCOPE, [])), pipeline.ask((NOW_SCOPE, []))]
    assert await asyncio.gather(*asked) == [[[("acme",)], [("acme",)]], [[("",)]]]
    with pytest.raises(psycopg.errors.DivisionByZero):
        await pipeline.ask((SCOPE, [b"acme"]), (DIVIDE, [b""]))
    assert await pipeline.ask((NOW_SCOPE, [])) == [[("",)]]


async def test_more_than_the_socket_takes_is_sent_as_it_takes_it(pipeline: Pipeline) -> None:
    long = "x" * (8 << 20)
    assert [rows[0][0][1] for rows in await asyncio.gather(*(pipeline.ask((ECHO, [long.encode()])) for _ in range(3)))] == [
        len(long)
    ] * 3


async def test_one_that_goes_away_leaves_the_others_theirs(pipeline: Pipeline) -> None:
    tasks = [asyncio.create_task(pipeline.ask((ECHO, [str(number).encode()]))) for number in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [results[0], results[2]] == [[[("0", 1)]], [[("2", 1)]]]
    assert await pipeline.ask((ECHO, [b"again"])) == [[("again", 5)]]


async def test_all_are_told_when_the_connection_fails_and_nothing_more_is_asked_on_it(pipeline: Pipeline) -> None:
    asked = [pipeline.ask((END, [])), pipeline.ask((ECHO, [b"x"]))]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, psycopg.OperationalError) for one in results)
    assert not pipeline.is_open
    with pytest.raises(psycopg.OperationalError):
        await pipeline.ask((ECHO, [b"x"]))


async def test_who_waits_is_told_when_it_is_closed(pipeline: Pipeline) -> None:
    waiting = asyncio.create_task(pipeline.ask((SLEEP, [])))
    await asyncio.sleep(0)
    await pipeline.close()
    with pytest.raises(psycopg.OperationalError):
        await waiting


async def test_a_nul_in_a_text_is_refused_and_cuts_nothing_off(pipeline: Pipeline) -> None:
    with pytest.raises(psycopg.DataError):
        await pipeline.ask((ECHO, [b"a\0b"]))


async def test_a_database_that_is_away_is_unavailable(settings: Settings) -> None:
    nowhere = settings.model_copy(update={"database_url": "postgresql://nobody@127.0.0.1:1/none"})
    database = Database(nowhere)
    with pytest.raises(UnavailableError):
        await database.open(APP_ROLE, ECHO)
    await database.close()


async def test_a_connection_that_libpq_gives_up_fails_at_once_and_leaves_nothing_watched(settings: Settings) -> None:
    inject = asyncio.Event()
    async with _relay(settings, inject) as port:
        there = settings.model_copy(update={"database_url": _through(settings, port)})
        database = Database(there)
        pipeline = await database.open(APP_ROLE, ECHO, SLEEP)
        watched = pipeline._socket
        waiting = asyncio.create_task(pipeline.ask((SLEEP, [])))
        inject.set()
        async with asyncio.timeout(20):
            with pytest.raises(psycopg.OperationalError):
                await waiting
        assert not pipeline.is_open
        assert watched.fileno() == -1
        await pipeline.close()
        await database.close()


def _through(settings: Settings, port: int) -> str:
    """The database's address with another port on this machine."""
    url = make_url(settings.database_url).set(host="127.0.0.1", port=port)
    return url.difference_update_query(["host", "port"]).render_as_string(hide_password=False)


@asynccontextmanager
async def _relay(settings: Settings, inject: asyncio.Event) -> AsyncIterator[int]:
    """Passes bytes on between clients and the database, until it sends a client what is no message of a database's."""
    url = make_url(settings.database_url)
    host, port = str(url.query.get("host") or url.host), int(str(url.query.get("port") or url.port or 5432))
    tasks, writers = set[asyncio.Task[None]](), list[asyncio.StreamWriter]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def garble(writer: asyncio.StreamWriter) -> None:
        await inject.wait()
        writer.write(bytes(64))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if host.startswith("/"):
            theirs, ours = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        else:
            theirs, ours = await asyncio.open_connection(host, port)
        writers.extend((writer, ours))
        tasks.update(map(asyncio.create_task, (pump(reader, ours), pump(theirs, writer), garble(writer))))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
