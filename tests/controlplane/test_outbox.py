"""The relay to Redis: at least once, in commit order, through the absence of either server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from controlplane import changes, outbox
from controlplane.changes import Change, ChangeKind
from controlplane.db import Database, Scope
from controlplane.pipeline import Rows, Statement
from controlplane.settings import Settings
from tests.controlplane.test_fleet_reports import write as write_report
from tests.fixtures.controlplane import BASE_DIGEST, Client, World, serve, settings_for
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import catalog_pb2, hints_pb2, nodes_pb2
from veneer.local.postgres import Postgres
from veneer.local.valkey import Valkey

READ_ONLY = Statement("read_only", "SELECT set_config('default_transaction_read_only', 'on', false)")


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A server that the test may kill."""
    with Valkey(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
def relaying(database: TestDatabase, pepper_file: Path, tmp_path: Path, own_valkey: Valkey) -> Settings:
    return settings_for(database, pepper_file, tmp_path, redis_url=own_valkey.url(), relay_interval_s=0.05)


@pytest.fixture
async def world(relaying: Settings) -> AsyncIterator[World]:
    async for one in serve(relaying):
        yield one


@pytest.fixture
async def hints(own_valkey: Valkey) -> AsyncIterator[PubSub]:
    async for one in subscribe(own_valkey):
        yield one


async def subscribe(server: Valkey) -> AsyncIterator[PubSub]:
    async with Redis.from_url(server.url()) as client, client.pubsub() as subscriber:
        await subscriber.subscribe(outbox.CHANNEL)
        await subscriber.get_message(timeout=60)
        yield subscriber


async def write(database: Database, *names: str) -> None:
    async with database.transaction(Scope.of_tenant("acme")) as connection:
        await changes.record(
            connection, *(Change(kind=ChangeKind.ALIAS, tenant="acme", adapter=name, version="v", generation=3) for name in names)
        )


async def received(hints: PubSub, count: int) -> list[hints_pb2.Hint]:
    found: list[hints_pb2.Hint] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            message = await hints.get_message(ignore_subscribe_messages=True, timeout=60)
            if message is not None:
                found.append(hints_pb2.Hint.FromString(message["data"]))
    return found


async def relay_alone(world: World) -> None:
    """One round of the relay, once the running one holds no lock."""
    while await world.plane.relay.relay_batch() == 0:
        pass


def waiting(database: TestDatabase) -> int:
    with database.connect() as connection:
        row = connection.execute("SELECT count(*) FROM outbox").fetchone()
    assert row is not None
    return int(row[0])


async def emptied(world: World, database: TestDatabase) -> None:
    async with asyncio.timeout(60):
        while waiting(database):
            await world.plane.relay.relay_batch()


async def test_committed_events_arrive_whole_and_in_commit_order(world: World, hints: PubSub, database: TestDatabase) -> None:
    for first in range(0, 40, 2):
        await write(world.plane.database, f"{first}", f"{first + 1}")
    found = await received(hints, 40)

    assert [hint.adapter for hint in found] == [str(number) for number in range(40)]
    assert (found[0].kind, found[0].tenant, found[0].version, found[0].generation) == (2, "acme", "", 3), "v is no version"
    await emptied(world, database)


async def test_what_is_not_committed_is_not_announced(world: World, hints: PubSub) -> None:
    async with world.plane.database.transaction(Scope.of_tenant("acme")) as connection:
        await changes.record(connection, Change(kind=ChangeKind.KEY, tenant="acme", adapter="open"))
        await world.plane.relay.relay_batch()
        assert await hints.get_message(ignore_subscribe_messages=True, timeout=0.1) is None
    assert [hint.adapter for hint in await received(hints, 1)] == ["open"]


async def test_an_event_that_commits_late_is_not_overtaken(world: World, hints: PubSub) -> None:
    async with world.plane.database.transaction(Scope.of_tenant("acme")) as connection:
        await changes.record(connection, Change(kind=ChangeKind.ALIAS, tenant="acme", adapter="early start"))
        await write(world.plane.database, "late start")
        await world.plane.relay.relay_batch()
    assert [hint.adapter for hint in await received(hints, 2)] == ["early start", "late start"]


async def test_events_wait_while_redis_is_away_and_catalogue_writes_go_on(
    world: World, own_valkey: Valkey, database: TestDatabase, hints: PubSub
) -> None:
    await write(world.plane.database, "before")
    await received(hints, 1)
    own_valkey.kill()
    await world.tenant("written-without-redis")
    await write(world.plane.database, "during")
    assert waiting(database) == 2  # the tenant's key, and this
    own_valkey.start()
    async for again in subscribe(own_valkey):
        await write(world.plane.database, "after")
        names: list[str] = []
        while "after" not in names:
            names += [hint.adapter for hint in await received(again, 1) if hint.adapter]
        assert names in (["during", "after"], ["after"])  # the first may have gone out before we listened again
        await emptied(world, database)


async def test_an_event_that_redis_did_not_take_stays(world: World, own_valkey: Valkey, database: TestDatabase) -> None:
    own_valkey.kill()
    await write(world.plane.database, "kept")
    with pytest.raises((OSError, RedisError)):
        await relay_alone(world)
    assert waiting(database) == 1


async def test_what_waits_is_shown_while_redis_is_away_and_dropped_in_the_end(
    world: World, own_valkey: Valkey, database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, seen = world.plane.relay, asyncio.Event()
    measure = relay.measure

    async def watched() -> int:
        count = await measure()
        if (world.plane.server.registry.get_sample_value("veneer_controlplane_outbox_oldest_seconds") or 0) > 86400:
            seen.set()
        return count

    monkeypatch.setattr(relay, "measure", watched)
    own_valkey.kill()
    await write(world.plane.database, "kept", "dropped")
    make_older(database, "dropped", hours=30)
    async with asyncio.timeout(60):
        await seen.wait()

    make_older(database, "dropped", hours=30)  # now older than what is kept
    await relay.trim()

    with database.connect() as connection:
        assert connection.execute("SELECT adapter FROM outbox").fetchall() == [("kept",)]


def make_older(database: TestDatabase, adapter: str, *, hours: int) -> None:
    with database.connect() as connection:
        query = "UPDATE outbox SET create_time = create_time - make_interval(hours => %s) WHERE adapter = %s"
        connection.execute(query, (hours, adapter))


async def test_an_error_that_nobody_foresaw_does_not_end_the_relay(
    world: World, hints: PubSub, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, failed = world.plane.relay, asyncio.Event()
    whole = relay.relay_batch

    async def fail_once() -> int:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        return await whole()

    monkeypatch.setattr(relay, "relay_batch", fail_once)
    await write(world.plane.database, "before")
    async with asyncio.timeout(60):
        await failed.wait()
    await write(world.plane.database, "after")
    assert [hint.adapter for hint in await received(hints, 2)] == ["before", "after"]


async def test_the_relay_outlives_the_database(world: World, hints: PubSub, postgres: Postgres) -> None:
    postgres.stop()
    postgres.start()
    await write(world.plane.database, "after")
    assert (await received(hints, 1))[-1].adapter == "after"


async def test_of_two_relays_one_works_at_a_time(world: World, relaying: Settings, hints: PubSub, database: TestDatabase) -> None:
    async for second in another(relaying):
        for number in range(30):
            await write((world if number % 2 else second).plane.database, str(number))
        assert [hint.adapter for hint in await received(hints, 30)] == [str(number) for number in range(30)]


async def another(settings: Settings) -> AsyncIterator[World]:
    from controlplane.service import ControlPlane
    from controlplane.vault import open_vault

    async with ControlPlane(settings, open_vault(settings)) as plane:
        await plane.server.start()
        world = World(plane, settings, "")
        yield world
        await world.close()
        await plane.server.stop(grace_s=0)


async def test_without_redis_events_are_dropped(database: TestDatabase, pepper_file: Path, tmp_path: Path) -> None:
    async for world in serve(settings_for(database, pepper_file, tmp_path, relay_interval_s=0.05)):
        await write(world.plane.database, "nobody listens")
        await emptied(world, database)


async def test_an_idle_relay_asks_one_statement_on_a_connection_that_it_keeps(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, looks, enough = world.plane.relay, list[Sequence[object]](), asyncio.Event()
    monkeypatch.setattr(relay, "relay_batch", _never)
    ask = relay._lines.ask

    async def counted(*steps: Any) -> list[Rows]:
        looks.append(steps)
        if len(looks) == 5:
            enough.set()
        return await ask(*steps)

    monkeypatch.setattr(relay._lines, "ask", counted)
    async with asyncio.timeout(60):
        await enough.wait()
    assert [len(steps) for steps in looks[:5]] == [1] * 5
    assert len(relay._lines._open) == 1
    assert not _failures(world)


async def test_a_relay_on_a_server_that_takes_no_writes_any_more_asks_another_connection(world: World, hints: PubSub) -> None:
    relay = world.plane.relay
    await relay.measure()
    [(old, _)] = relay._lines._open
    await old.prepare(READ_ONLY)
    await old.ask((READ_ONLY, []))
    async with asyncio.timeout(60):
        while old.is_open:  # noqa: ASYNC110  the relay looks at it in a moment
            await asyncio.sleep(0.01)
    await write(world.plane.database, "after")
    assert [hint.adapter for hint in await received(hints, 1)] == ["after"]


async def nodes_by_name(world: World, *names: str) -> dict[str, tuple[Client, str]]:
    """Enrols nodes; returns each with its identifier."""
    clients = {name: await world.node(name) for name in names}
    listed = (await world.operator.nodes.ListNodes(nodes_pb2.ListNodesRequest())).nodes
    return {node.name: (clients[node.name], node.id) for node in listed}


async def staged(hints: PubSub, version: str) -> list[str]:
    """Nodes that the next hint about a version tells to stage it."""
    while True:
        [hint] = await received(hints, 1)
        if hint.version == version:
            return list(hint.nodes)


async def grants(nodes: dict[str, tuple[Client, str]], version: str) -> set[str]:
    """Nodes that are granted a version."""
    found = set()
    for client, node in nodes.values():
        try:
            await client.nodes.GrantBlobs(nodes_pb2.GrantBlobsRequest(version=version))
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.PERMISSION_DENIED
        else:
            found.add(node)
    return found


async def test_two_nodes_are_told_of_a_new_adapter_and_they_alone_may_read_it(
    world: World, hints: PubSub, own_valkey: Valkey
) -> None:
    await world.base()
    acme = await world.tenant("acme")
    nodes = await nodes_by_name(world, *"abcde")
    first = (await world.publish(acme, "first")).version.digest
    told = await staged(hints, first)
    assert len(told) == 2
    assert await grants(nodes, first) == set(told)
    async with Redis.from_url(own_valkey.url()) as client:
        serving = nodes["c"][1]
        await write_report(client, serving, sequence=1, serving=True, base_digest=BASE_DIGEST)
    second = (await world.publish(acme, "second", seed=2)).version.digest
    assert await staged(hints, second) == [serving], "the others do not serve"


async def test_nodes_that_serve_an_adapter_are_told_of_its_new_version(
    world: World, hints: PubSub, database: TestDatabase
) -> None:
    await world.base()
    acme = await world.tenant("acme")
    await world.publish(acme)
    await emptied(world, database)  # there is no node yet that could be told
    nodes = await nodes_by_name(world, *"abcd")
    for name in "abc":
        await world.ask(nodes[name][0], acme)
    await world.operator.nodes.RevokeNode(nodes_pb2.RevokeNodeRequest(id=nodes.pop("c")[1]))
    second = (await world.publish(acme, seed=2)).version.digest
    serving = {nodes[name][1] for name in "ab"}
    assert set(await staged(hints, second)) == serving
    assert await grants(nodes, second) == serving


async def test_a_hint_stays_within_what_data_planes_read_however_many_nodes_serve_the_adapter(
    world: World, hints: PubSub, database: TestDatabase
) -> None:
    await world.base()
    owner, adapter = "a" * 63, "b" * 100
    acme = await world.tenant(owner)
    await world.publish(acme, adapter)
    with database.connect() as connection:
        connection.execute(
            """
            INSERT INTO nodes (id, name, base_digest, hash)
            SELECT gen_random_uuid(), 'n' || n, %s, sha256(int8send(n)) FROM generate_series(1, 100) n
            """,
            [BASE_DIGEST],
        )
        connection.execute(
            "INSERT INTO node_versions (tenant, adapter, node, version) SELECT %s, %s, id, '' FROM nodes", [owner, adapter]
        )
    version = (await world.publish(acme, adapter, seed=2)).version.digest
    while True:
        [hint] = await received(hints, 1)
        if hint.version == version:
            break
    assert (len(hint.nodes), hint.ByteSize() < 1024) == (16, True)


async def test_no_node_is_told_of_a_version_that_is_retired(world: World, hints: PubSub) -> None:
    await world.base()
    acme = await world.tenant("acme")
    await world.node()
    await world.publish(acme)
    spare = (await world.publish(acme, seed=2)).version.digest
    await staged(hints, spare)
    await acme.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=spare))
    await write(world.plane.database, "last")
    found = []
    while not found or found[-1].adapter != "last":
        found += await received(hints, 1)
    assert [(hint.version, list(hint.nodes)) for hint in found if hint.kind == ChangeKind.VERSION] == [("", [])]


def _failures(world: World) -> float:
    return world.plane.server.registry.get_sample_value("veneer_controlplane_relay_failures_total") or 0.0


async def _never() -> int:
    raise AssertionError("there is nothing to relay")


def test_hints_carry_identifiers_and_generations_and_nothing_that_could_be_served_by() -> None:
    fields = {name: sorted(message.fields_by_name) for name, message in hints_pb2.DESCRIPTOR.message_types_by_name.items()}
    assert fields == {
        "Hint": ["adapter", "generation", "kind", "nodes", "tenant", "version"],
        "AdapterHomes": ["nodes"],
        "StagingHint": ["release", "stage"],
    }
    assert [one.name for one in dataclasses.fields(Change)] == ["kind", "tenant", "adapter", "version", "generation"]
