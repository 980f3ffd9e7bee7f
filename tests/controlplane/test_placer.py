"""The loop that plans, on real servers, with nodes that only report."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from controlplane.leader import Term
from controlplane.node_versions import NodeVersions
from controlplane.placer import Placer
from controlplane.remembered import Freshness
from controlplane.settings import Settings
from tests.controlplane.test_fleet_reports import write
from tests.fixtures.controlplane import BASE_DIGEST, Client, World, refused, serve, settings_for
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import hints_pb2, nodes_pb2, placement_pb2, reports_pb2
from veneer.errors import AbortedError
from veneer.local.valkey import Valkey

HOMES = f"veneer:homes:v1:{{{BASE_DIGEST}}}"
NEVER_S = 3600.0  # beyond what the setting may be, since a test on a busy machine may take longer than that


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A server that the test may kill."""
    with Valkey(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
def planning(database: TestDatabase, pepper_file: Path, tmp_path: Path, own_valkey: Valkey) -> Settings:
    """Settings under which the process's own loop does nothing for the length of a test: tests call rounds."""
    settings = settings_for(database, pepper_file, tmp_path, redis_url=own_valkey.url())
    return settings.model_copy(update={"placement_interval_s": NEVER_S})


@pytest.fixture
async def redis(own_valkey: Valkey) -> AsyncIterator[Redis]:
    async with Redis.from_url(own_valkey.url()) as client:
        yield client


@pytest.fixture
async def world(planning: Settings) -> AsyncIterator[World]:
    async for one in serve(planning):
        await one.base()
        yield one


@pytest.fixture
async def acme(world: World) -> Client:
    return await world.tenant("acme")


@pytest.fixture
async def placer(world: World, redis: Redis, planning: Settings) -> Placer:
    return make_placer(world, redis, planning)


def make_placer(world: World, redis: Redis, planning: Settings) -> Placer:
    told = NodeVersions(world.plane.database, Freshness(world.plane.database))
    return Placer(world.plane.database, redis, planning, node_versions=told, registry=CollectorRegistry())


async def enrolled(world: World, count: int) -> list[str]:
    for number in range(count):
        await world.node(f"node-{number}")
    return [node.id for node in (await world.operator.nodes.ListNodes(nodes_pb2.ListNodesRequest())).nodes]


async def report(redis: Redis, node: str, *, sequence: int, serving: bool = True, **uses: int) -> None:
    """Reports for a node: versions with their uses; the address follows from the node."""
    await write(redis, node, sequence=sequence, serving=serving, base_digest=BASE_DIGEST, address=address(node))
    await redis.delete(f"veneer:holdings:v1:{{{node}}}:7")
    for version, count in uses.items():
        holding = reports_pb2.NodeHolding(tier=reports_pb2.HOLDING_TIER_DEVICE, max_rank=2, size_bytes=100, uses=count)
        await redis.hset(f"veneer:holdings:v1:{{{node}}}:7", version, holding.SerializeToString())


def address(node: str) -> str:
    return f"{node}:7700"


async def homes(redis: Redis) -> dict[str, list[str]]:
    raw = await redis.hgetall(HOMES)
    return {key.decode(): list(hints_pb2.AdapterHomes.FromString(value).nodes) for key, value in raw.items() if key != b"term"}


async def staged(redis: Redis, node: str) -> list[str]:
    hint = await redis.hget(f"veneer:staging:v1:{{{node}}}", "hint")
    return [] if hint is None else list(hints_pb2.StagingHint.FromString(hint).stage)


async def locate(client: Client, world: World, adapter: str, owner: str = "") -> placement_pb2.LocateAdapterResponse:
    from veneer.controlplane.v1 import placement_pb2_grpc

    stub = placement_pb2_grpc.PlacementServiceStub(world._callers)
    request = placement_pb2.LocateAdapterRequest(adapter=adapter, owner=owner)
    return await stub.LocateAdapter(request, metadata=(("authorization", f"Bearer {client.secret}"),), timeout=60)


async def test_requests_go_where_the_adapter_is_and_follow_it(world: World, acme: Client, redis: Redis, placer: Placer) -> None:
    version = (await world.publish(acme, "tone")).version.digest
    first, second = await enrolled(world, 2)
    await report(redis, first, sequence=1, **{version: 5})
    await report(redis, second, sequence=1)
    await placer.round(Term("placement", 1))
    assert await homes(redis) == {"acme/tone": [first]}
    assert list((await locate(acme, world, "tone")).addresses) == [address(first)]

    assert await staged(redis, second) == [version], "with two nodes, all traffic of one adapter wants both"
    await report(redis, second, sequence=2, **{version: 0})
    await placer.round(Term("placement", 1))
    assert set((await locate(acme, world, "tone")).addresses) == {address(first), address(second)}
    assert await staged(redis, second) == []

    await report(redis, first, sequence=2, serving=False, **{version: 5})
    assert list((await locate(acme, world, "tone")).addresses) == [address(second)], "at once, though the plan still names it"
    await placer.round(Term("placement", 1))
    assert await homes(redis) == {"acme/tone": [second]}


async def test_what_is_larger_than_it_can_be_is_not_told_to_callers(
    world: World, acme: Client, redis: Redis, placer: Placer
) -> None:
    version = (await world.publish(acme, "tone")).version.digest
    (node,) = await enrolled(world, 1)
    await report(redis, node, sequence=1, **{version: 5})
    await placer.round(Term("placement", 1))
    whole = await redis.hget(HOMES, "acme/tone")
    forged = reports_pb2.NodeReport(node=node, serving=True, address="a" * 5000)
    await redis.hset(f"veneer:node:v1:{{{node}}}", "report", forged.SerializeToString())
    assert list((await locate(acme, world, "tone")).addresses) == []
    await report(redis, node, sequence=2, **{version: 5})
    assert list((await locate(acme, world, "tone")).addresses) == [address(node)]
    many = hints_pb2.AdapterHomes.FromString(whole).nodes[:] * 1000
    await redis.hset(HOMES, "acme/tone", hints_pb2.AdapterHomes(nodes=many).SerializeToString())
    assert list((await locate(acme, world, "tone")).addresses) == []


async def test_nodes_and_versions_that_the_catalogue_does_not_have_count_for_nothing(
    world: World, acme: Client, redis: Redis, placer: Placer
) -> None:
    version = (await world.publish(acme, "tone")).version.digest
    (node,) = await enrolled(world, 1)
    unknown = {hashlib.sha256(bytes([number])).hexdigest(): 1000 for number in range(50)}
    await report(redis, node, sequence=1, **{version: 1, "not a digest": 9}, **unknown)
    await report(redis, "33333333-3333-3333-3333-333333333333", sequence=1, **{version: 10**9})
    await placer.round(Term("placement", 1))
    assert await homes(redis) == {"acme/tone": [node]}


async def test_a_node_may_read_what_it_is_told_to_stage(world: World, acme: Client, redis: Redis, placer: Placer) -> None:
    (version,) = [(await world.publish(acme, "tone")).version.digest]
    known = {name: await world.node(name) for name in ("first", "second")}
    ids = {node.name: node.id for node in (await world.operator.nodes.ListNodes(nodes_pb2.ListNodesRequest())).nodes}
    grant = nodes_pb2.GrantBlobsRequest(version=version)
    assert (await refused(known["second"].nodes.GrantBlobs(grant)))[0] == grpc.StatusCode.PERMISSION_DENIED
    await report(redis, ids["first"], sequence=1, **{version: 5})
    await report(redis, ids["second"], sequence=1)
    await placer.round(Term("placement", 1))
    assert await staged(redis, ids["second"]) == [version]
    assert (await known["second"].nodes.GrantBlobs(grant)).owner == "acme"
    code, _ = await refused(known["first"].nodes.GrantBlobs(grant))
    assert code == grpc.StatusCode.PERMISSION_DENIED, "to report a version is no leave to read it"


async def test_a_revoked_node_leaves_the_plan(world: World, acme: Client, redis: Redis, placer: Placer) -> None:
    version = (await world.publish(acme, "tone")).version.digest
    first, second = await enrolled(world, 2)
    for node in (first, second):
        await report(redis, node, sequence=1, **{version: 5})
    await placer.round(Term("placement", 1))
    await world.operator.nodes.RevokeNode(nodes_pb2.RevokeNodeRequest(id=first))
    await placer.round(Term("placement", 1))
    assert await homes(redis) == {"acme/tone": [second]}


async def test_a_leader_that_was_replaced_writes_nothing(
    world: World, acme: Client, redis: Redis, placer: Placer, planning: Settings
) -> None:
    version = (await world.publish(acme, "tone")).version.digest
    (node,) = await enrolled(world, 1)
    await report(redis, node, sequence=1, **{version: 5})
    await placer.round(Term("placement", 2))
    before = await redis.hgetall(HOMES)
    late = make_placer(world, redis, planning)
    with pytest.raises(AbortedError):
        await late.round(Term("placement", 1))
    assert await redis.hgetall(HOMES) == before


async def test_a_new_leader_begins_with_the_plan_that_it_finds(
    world: World, acme: Client, redis: Redis, placer: Placer, planning: Settings
) -> None:
    versions = [(await world.publish(acme, f"tone-{number}", seed=number)).version.digest for number in range(12)]
    nodes = await enrolled(world, 4)
    for place, node in enumerate(nodes):
        await report(redis, node, sequence=1, **dict.fromkeys(versions[place::4], 5))
    await placer.round(Term("placement", 1))
    before = await homes(redis)
    successor = make_placer(world, redis, planning)
    await successor.round(Term("placement", 2))
    assert await homes(redis) == before
    assert await redis.hget(HOMES, "term") == b"2"


async def test_what_redis_forgot_is_written_again(world: World, acme: Client, redis: Redis, placer: Placer) -> None:
    version = (await world.publish(acme, "tone")).version.digest
    (node,) = await enrolled(world, 1)
    await report(redis, node, sequence=1, **{version: 5})
    await placer.round(Term("placement", 1))
    await redis.delete(HOMES)
    await placer.round(Term("placement", 1))
    await placer.round(Term("placement", 1))
    assert await homes(redis) == {"acme/tone": [node]}
    assert 0 < await redis.pttl(HOMES) <= 60_000


async def test_an_adapter_that_one_may_not_use_is_not_there(world: World, acme: Client) -> None:
    await world.publish(acme, "tone")
    rival = await world.tenant("rival")
    for adapter, owner in (("tone", "acme"), ("absent", "acme"), ("tone", "")):
        code, text = await refused(locate(rival, world, adapter, owner))
        assert (code, text) == (grpc.StatusCode.NOT_FOUND, "no such adapter, alias or version")


async def test_without_redis_the_key_is_all_that_is_known(world: World, acme: Client, own_valkey: Valkey) -> None:
    await world.publish(acme, "tone")
    own_valkey.kill()
    found = await locate(acme, world, "tone")
    assert (found.key, list(found.addresses)) == ("acme/tone", [])


async def test_of_two_processes_one_plans_and_the_other_takes_over(
    database: TestDatabase, pepper_file: Path, tmp_path: Path, own_valkey: Valkey, redis: Redis
) -> None:
    from tests.controlplane.test_outbox import another

    fast = settings_for(database, pepper_file, tmp_path, redis_url=own_valkey.url(), placement_interval_s=0.05)
    async for second in another(fast):
        async for first in serve(fast):
            await first.base()
            acme = await first.tenant("acme")
            version = (await first.publish(acme, "tone")).version.digest
            (node,) = await enrolled(first, 1)
            await report(redis, node, sequence=1, **{version: 5})
            await planned(redis)
        await redis.delete(HOMES)
        await planned(redis)
        assert second.plane.placer is not None


async def planned(redis: Redis) -> None:
    async with asyncio.timeout(60):
        while not await homes(redis):  # noqa: ASYNC110  a reader can only look
            await asyncio.sleep(0.02)
