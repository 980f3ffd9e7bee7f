"""The change feed: nothing that commits late is skipped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import psycopg
import pytest

from controlplane import changes, models
from controlplane.changes import Change, ChangeFeed, ChangeKind
from controlplane.db import Database, Scope
from controlplane.outbox import Relay
from controlplane.schema import migrate
from tests.fixtures.controlplane import World, refused, settings_for
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import nodes_pb2
from veneer.local.postgres import Postgres


async def write(world: World, *names: str, tenant: str = "acme") -> None:
    async with world.plane.database.transaction(Scope.of_tenant(tenant)) as connection:
        await changes.record(connection, *(Change(kind=ChangeKind.VERSION, tenant=tenant, adapter=name) for name in names))


@pytest.fixture
def feed(world: World) -> ChangeFeed:
    return ChangeFeed(world.plane.database)


async def names_after(feed: ChangeFeed, cursor: str, *, max_changes: int = 100) -> tuple[list[str], str]:
    page = await feed.read(cursor, max_changes=max_changes)
    assert not page.reset
    return [change.adapter for change in page.changes], page.next_cursor


async def test_an_empty_cursor_begins_now(world: World, feed: ChangeFeed) -> None:
    await write(world, "before")
    names, cursor = await names_after(feed, "")
    await write(world, "after")

    assert names == []
    assert (await names_after(feed, cursor))[0] == ["after"]


async def test_changes_are_read_once_and_in_pages(world: World, feed: ChangeFeed) -> None:
    _, cursor = await names_after(feed, "")
    for first in range(0, 6, 2):
        await write(world, str(first), str(first + 1))
    seen = []
    for _ in range(5):
        names, cursor = await names_after(feed, cursor, max_changes=2)
        seen.append(names)
    assert seen == [["0", "1"], ["2", "3"], ["4", "5"], [], []]


async def test_a_transaction_that_commits_late_is_not_skipped(world: World, feed: ChangeFeed) -> None:
    _, cursor = await names_after(feed, "")
    async with world.plane.database.transaction(Scope.of_tenant("acme")) as connection:
        await changes.record(connection, Change(kind=ChangeKind.ALIAS, tenant="acme", adapter="early start, late commit"))
        await write(world, "late start, early commit")
        held_back, cursor = await names_after(feed, cursor)
    names, _ = await names_after(feed, cursor)

    assert held_back == []
    assert names == ["early start, late commit", "late start, early commit"]


async def test_kinds_of_a_newer_process_are_passed_over(world: World, feed: ChangeFeed, database: TestDatabase) -> None:
    _, cursor = await names_after(feed, "")
    with database.connect() as connection:
        connection.execute("INSERT INTO changes (kind, tenant, adapter, version, generation) VALUES (99, 'acme', 'newer', '', 0)")
    await write(world, "known")
    assert (await names_after(feed, cursor))[0] == ["known"]


async def test_a_transaction_that_rolls_back_holds_nothing_back_for_good(world: World, feed: ChangeFeed) -> None:
    _, cursor = await names_after(feed, "")
    with pytest.raises(ZeroDivisionError):
        async with world.plane.database.transaction(Scope.of_tenant("acme")) as connection:
            await changes.record(connection, Change(kind=ChangeKind.VERSION, tenant="acme", adapter="never"))
            await write(world, "done")
            raise ZeroDivisionError
    assert (await names_after(feed, cursor))[0] == ["done"]


async def test_a_crash_of_the_server_that_gives_numbers_again_skips_nothing(pepper_file: Path, tmp_path: Path) -> None:
    # What is not flushed by a commit stays in memory until the crash.
    lazy = {"wal_writer_delay": "10s", "wal_level": "minimal", "max_wal_senders": "0"}
    with Postgres(tmp_path / "postgres", durable=False, settings=lazy) as server:
        settings = settings_for(TestDatabase(server.url(user="nobody"), server.url()), pepper_file, tmp_path)
        await asyncio.to_thread(migrate, settings)
        database = Database(settings)
        feed = ChangeFeed(database)
        with psycopg.connect(server.url(scheme="postgresql")) as connection:
            for _ in range(5):
                connection.execute("SELECT pg_current_xact_id()")
                connection.rollback()
        _, cursor = await names_after(feed, "")
        _, cursor = await names_after(feed, cursor)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        written = [f"adapter-{number}" for number in range(8)]
        for name in written:
            async with database.transaction(Scope.of_tenant("acme")) as transaction:
                await changes.record(transaction, Change(kind=ChangeKind.VERSION, tenant="acme", adapter=name))
        names, _ = await names_after(feed, cursor)
        await database.close()
    assert names == written


@pytest.mark.parametrize("cursor", ["x", "1", "1-", "-1", "1-x", "1-2-3", "٣-1", "9" * 30 + "-1"])
async def test_a_cursor_of_nobody_is_refused(world: World, cursor: str) -> None:
    node = await world.bare_node()
    code, text = await refused(node.nodes.ListChanges(nodes_pb2.ListChangesRequest(cursor=cursor)))
    assert (code, "cursor" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_cursor_from_before_the_last_trim_resets(world: World, feed: ChangeFeed, database: TestDatabase) -> None:
    _, old = await names_after(feed, "")
    await write(world, "a", "b")
    relay: Relay = world.plane.relay
    with database.connect() as connection:
        connection.execute("UPDATE changes SET create_time = now() - interval '3 days'")
    await relay.trim()
    await write(world, "c")

    page = await feed.read(old, max_changes=10)
    assert (page.reset, page.changes) == (True, ())
    assert (await feed.read(page.next_cursor, max_changes=10)).reset is False


async def test_a_trim_keeps_what_is_young(world: World, feed: ChangeFeed) -> None:
    _, cursor = await names_after(feed, "")
    await write(world, "young")
    await world.plane.relay.trim()
    assert (await names_after(feed, cursor))[0] == ["young"]


async def test_a_cursor_from_a_database_that_was_restored_resets(feed: ChangeFeed) -> None:
    assert (await feed.read(f"{10**17}-0", max_changes=10)).reset


async def test_kinds_are_those_of_the_api() -> None:
    assert {kind.name: kind.value for kind in ChangeKind} == {
        name.removeprefix("CHANGE_KIND_"): number for name, number in nodes_pb2.ChangeKind.items() if number
    }
    assert models.changes.c.xid.type.get_col_spec() == "xid8"
