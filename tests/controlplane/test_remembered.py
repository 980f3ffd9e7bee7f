"""What is remembered of the catalogue, and when it is forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from controlplane import remembered
from controlplane.coalesced import Coalesced
from controlplane.db import Database
from controlplane.identities import Holder, Identities
from controlplane.pipeline import Statement
from controlplane.remembered import Freshness, Memory
from controlplane.settings import APP_ROLE, Settings
from controlplane.vault import open_vault
from tests.fixtures.controlplane import BASE_DIGEST, Client, World
from veneer.controlplane.v1 import catalog_pb2, nodes_pb2, tenants_pb2
from veneer.errors import UnavailableError
from veneer.local.postgres import Postgres


async def test_who_comes_before_a_lookup_shares_it_and_who_comes_during_it_has_the_next() -> None:
    begun: list[int] = []
    go = asyncio.Event()

    async def look_up(key: str) -> int:
        begun.append(len(begun))
        number = begun[-1]
        await go.wait()
        return number

    lookups = Coalesced[str, int](look_up)
    first = [asyncio.create_task(lookups.get("a")) for _ in range(3)]
    while not begun:  # noqa: ASYNC110  the lookup says nothing when it begins
        await asyncio.sleep(0)
    later = [asyncio.create_task(lookups.get("a")) for _ in range(3)]
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*first) == [0, 0, 0]
    assert await asyncio.gather(*later) == [1, 1, 1]
    assert await lookups.get("a") == 2


async def test_one_that_goes_away_takes_nobody_along_and_an_error_is_everybodys() -> None:
    go = asyncio.Event()

    async def look_up(key: str) -> int:
        await go.wait()
        raise UnavailableError("away")

    lookups = Coalesced[str, int](look_up)
    tasks = [asyncio.create_task(lookups.get("a")) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert [type(result) for result in results[1:]] == [UnavailableError] * 2
    with pytest.raises(UnavailableError):
        await lookups.get("a")


async def test_with_a_pause_whoever_comes_in_it_shares_the_next_lookup() -> None:
    begun: list[int] = []

    async def look_up(key: str) -> int:
        begun.append(len(begun))
        return begun[-1]

    lookups = Coalesced[str, int](look_up, pause_s=0.5)
    assert await lookups.get("a") == 0
    later = []
    for _ in range(10):
        later.append(asyncio.create_task(lookups.get("a")))
        await asyncio.sleep(0)
    assert await asyncio.gather(*later) == [1] * 10


def test_a_memory_forgets_by_subject_and_drops_what_is_used_least_lately() -> None:
    memory = Memory[str, int](max_entries=2)
    memory.put("a", 1, about=[("t", "x")], epoch=memory.epoch)
    memory.put("b", 2, about=[("t", "y")], epoch=memory.epoch)
    assert memory.get("a") == 1
    memory.put("c", 3, about=[("t", "x")], epoch=memory.epoch)
    assert [memory.get(key) for key in "abc"] == [1, None, 3]
    memory.forget(("t", "x"))
    assert len(memory) == 0


def test_a_tenant_alone_fills_a_memory_and_takes_no_more_than_a_share_of_what_others_have() -> None:
    memory = Memory[tuple[str, int], int](max_entries=160)

    def put(tenant: str, *numbers: int) -> None:
        for number in numbers:
            memory.put((tenant, number), number, about=[(tenant, str(number))], epoch=memory.epoch, tenant=tenant)

    def kept(tenant: str) -> int:
        return sum(memory.get((tenant, number)) is not None for number in range(1000))

    put("flood", *range(1000))
    assert kept("flood") == 160
    for number in range(10):
        put("small", number)
        put("other", number)
    put("flood", *range(1000))
    assert (kept("small"), kept("other"), kept("flood")) == (10, 10, 140)
    for number in range(14):
        put(f"full {number}", *range(10))
    put("late", *range(1000))
    assert kept("late") == 10
    assert len(memory) == 160
    for tenant in ("small", "other", "flood", "late", *(f"full {number}" for number in range(14))):
        for number in range(1000):
            memory.forget((tenant, str(number)))
    assert (len(memory), memory._of, memory._about) == (0, {}, {})


def test_what_was_read_before_something_was_forgotten_is_not_kept() -> None:
    memory = Memory[str, int]()
    epoch = memory.epoch
    memory.forget(("t", "other"))
    memory.put("a", 1, about=[("t", "x")], epoch=epoch)
    assert memory.get("a") is None


async def _resolve(node: Client, key: Client, adapter: str = "style", **more: str) -> nodes_pb2.ResolveResponse:
    target = nodes_pb2.AdapterTarget(adapter=adapter, **more)
    return await node.nodes.Resolve(nodes_pb2.ResolveRequest(key_digest=key.digest, target=target, base_digest=BASE_DIGEST))


async def test_every_change_is_seen_by_the_very_next_resolve(world: World) -> None:
    await world.base()
    owner, friend = await world.tenant("acme"), await world.tenant("friend")
    node = await world.node()
    digests = [(await world.publish(owner, "style", seed=seed)).version.digest for seed in (1, 2)]
    for turn in range(6):
        arms = [catalog_pb2.Arm(version=digests[turn % 2], weight=1)]
        moved = await owner.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms))
        for _ in range(2):
            answer = await _resolve(node, owner)
            assert [arm.digest for arm in answer.resolution.arms] == [digests[turn % 2]]
            assert answer.resolution.generation == moved.alias.generation
    for _ in range(3):
        assert (await _resolve(node, friend, owner="acme")).refusal == nodes_pb2.REFUSAL_REASON_NOT_FOUND
        await owner.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter="style", grantee="friend"))
        assert (await _resolve(node, friend, owner="acme")).resolution.arms[0].digest == digests[1]
        await owner.tenants.RevokeGrant(tenants_pb2.RevokeGrantRequest(adapter="style", grantee="friend"))
    assert (await _resolve(node, owner, version=digests[0])).resolution.arms
    await owner.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=digests[0]))
    assert (await _resolve(node, owner, version=digests[0])).refusal == nodes_pb2.REFUSAL_REASON_RETIRED


async def test_revoked_keys_and_changed_tenants_are_seen_by_the_very_next_resolve(world: World) -> None:
    await world.base()
    owner, node = await world.tenant("acme"), await world.node()
    await world.publish(owner, "style", seed=1)
    for _ in range(3):
        key = await world.key("acme", tenants_pb2.ROLE_CALLER)
        assert (await _resolve(node, key)).resolution.arms
        assert (await _resolve(node, key)).resolution.arms
        keys = (await owner.tenants.ListKeys(tenants_pb2.ListKeysRequest(tenant="acme"))).keys
        mine = max(keys, key=lambda one: one.create_time.ToNanoseconds())
        await owner.tenants.RevokeKey(tenants_pb2.RevokeKeyRequest(tenant="acme", id=mine.id))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _resolve(node, key)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def _look(world: World) -> int:
    """Looks, and returns who answered: the number of the server's process."""
    freshness = world.plane._freshness
    await freshness.check()
    assert freshness._connection is not None
    return freshness._connection.connection.info.backend_pid


async def test_the_connection_for_looks_is_another_once_it_is_old(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await _look(world)
    assert await _look(world) == first
    monkeypatch.setattr(remembered, "_MAX_CONNECTION_S", 0.0)
    assert len({first, await _look(world), await _look(world)}) == 3


async def test_a_server_that_takes_no_writes_any_more_is_left_and_what_it_told_is_forgotten(world: World) -> None:
    first = await _look(world)
    freshness = world.plane._freshness
    freshness.tenants.put("a", 1, about=[("t", "")], epoch=freshness.tenants.epoch)
    assert freshness._connection is not None
    demote = Statement("demote", "SET default_transaction_read_only = on")  # as a primary that is one no more
    await freshness._connection.prepare(demote)
    await freshness._connection.ask((demote, []))
    assert await _look(world) != first
    assert freshness.tenants.get("a") is None


async def test_where_another_server_answers_nothing_is_read_from_the_one_of_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _look(world)
    database, freshness = world.plane.database, world.plane._freshness
    asked = Statement("pid", "SELECT pg_backend_pid()")
    lines = database.lines(APP_ROLE, asked)
    before = database.app.sync_engine.pool, await lines.ask((asked, []))
    monkeypatch.setattr(remembered, "_MAX_CONNECTION_S", 0.0)
    await _look(world)
    assert (database.app.sync_engine.pool, await lines.ask((asked, []))) == before
    freshness._server = "started earlier"
    await _look(world)
    assert database.app.sync_engine.pool is not before[0]
    assert await lines.ask((asked, [])) != before[1]


async def test_a_server_that_hangs_is_left_once_its_answer_is_late(settings: Settings) -> None:
    database = Database(settings.model_copy(update={"pool_timeout_s": 1.0, "statement_timeout_s": 1.0}))
    freshness = Freshness(database)
    await freshness.check()
    assert freshness._connection is not None
    hung = freshness._connection.connection.info.backend_pid
    os.kill(hung, signal.SIGSTOP)  # its kernel goes on to confirm what is sent
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    await freshness.check()
                    break
                except UnavailableError:
                    continue
        assert freshness._connection.connection.info.backend_pid != hung
    finally:
        os.kill(hung, signal.SIGCONT)
        await freshness.close()
        await database.close()


@pytest.mark.parametrize(("on", "lookups"), [("0 s", 1), ("58 min", 1), ("59.5 min", 3), ("2 h", 3)])
async def test_keys_end_by_the_clock_of_the_database(
    on: str, lookups: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await world.key_for("acme", lifetime=duration_pb2.Duration(seconds=3600))
    later = remembered._LOOK.sql.replace("clock_timestamp()", f"(clock_timestamp() + interval '{on}')")
    monkeypatch.setattr(remembered, "_LOOK", Statement("look", later))
    await world.plane._freshness._give_up()  # on the connection of before it is prepared as it was
    identities = Identities(world.plane.database, open_vault(world.settings), world.plane._freshness)
    asked = 0

    async def look_up(digest: bytes) -> Holder | None:
        nonlocal asked
        asked += 1
        return await Identities._look_up(identities, digest)

    monkeypatch.setattr(identities, "_lookups", Coalesced[bytes, Any](look_up))
    for _ in range(3):
        assert (await identities.find(key.digest)) is not None
    assert asked == lookups


async def test_a_restart_of_the_database_is_not_noticed_by_who_asks_after_it(world: World, postgres: Postgres) -> None:
    await world.base()
    owner, node = await world.tenant("acme"), await world.node()
    await world.publish(owner, "style", seed=1)
    assert (await _resolve(node, owner)).resolution.arms
    await asyncio.to_thread(postgres.stop)
    try:
        with pytest.raises(grpc.aio.AioRpcError) as away:
            await _resolve(node, owner)
        assert away.value.code() == grpc.StatusCode.UNAVAILABLE  # nothing is answered from memory alone
    finally:
        await asyncio.to_thread(postgres.start)
    for _ in range(2):
        assert (await _resolve(node, owner)).resolution.arms
