"""Answers of Resolve that are given again: to whom, and until when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from controlplane import remembered, told
from controlplane.changes import ChangeKind
from controlplane.pipeline import Statement
from controlplane.remembered import Freshness
from controlplane.resolve import Resolver
from controlplane.service import ControlPlane
from controlplane.settings import Settings
from controlplane.vault import open_vault
from tests.fixtures.controlplane import BASE_DIGEST, Client, World, check_here, refused
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import catalog_pb2, nodes_pb2, tenants_pb2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Adapters that the use case was asked for."""
    names: list[str] = []
    resolve = Resolver.resolve

    async def counted(self: Resolver, key_digest: bytes, reference: Any, **more: Any) -> Any:
        names.append(reference.adapter)
        return await resolve(self, key_digest, reference, **more)

    monkeypatch.setattr(Resolver, "resolve", counted)
    return names


@pytest.fixture
async def owner(world: World) -> Client:
    """A tenant with an adapter."""
    await world.base()
    owner = await world.tenant("acme")
    await world.publish(owner, "style", seed=1)
    return owner


async def _resolve(node: Client, key: Client, adapter: str = "style", **more: Any) -> nodes_pb2.ResolveResponse:
    target = nodes_pb2.AdapterTarget(adapter=adapter, **more)
    return await node.nodes.Resolve(nodes_pb2.ResolveRequest(key_digest=key.digest, target=target, base_digest=BASE_DIGEST))


async def test_what_was_answered_is_answered_again_without_being_asked(world: World, owner: Client, asked: list[str]) -> None:
    node = await world.node()
    answers = [await _resolve(node, owner) for _ in range(4)]
    assert answers == [answers[0]] * 4
    assert len({(await _resolve(node, owner, "")).SerializeToString() for _ in range(3)}) == 1
    assert asked == ["style", ""]


async def test_refusals_are_asked_about_each_time(world: World, owner: Client, asked: list[str]) -> None:
    node, auditor = await world.node(), await world.key("acme", tenants_pb2.ROLE_AUDITOR)
    for _ in range(2):
        assert (await _resolve(node, owner, "none")).refusal == nodes_pb2.REFUSAL_REASON_NOT_FOUND
        assert (await _resolve(node, auditor)).refusal == nodes_pb2.REFUSAL_REASON_ROLE
    assert asked == ["none", "style"] * 2


async def test_each_node_and_each_key_has_answers_of_its_own(world: World, owner: Client) -> None:
    nodes, other = [await world.node(name) for name in ("one", "two")], await world.key("acme", tenants_pb2.ROLE_CALLER)
    for _ in range(2):
        first, second, third = await _resolve(nodes[0], owner), await _resolve(nodes[1], owner), await _resolve(nodes[0], other)
        assert first.caller.ticket == third.caller.ticket != second.caller.ticket
        assert first.resolution.arms[0].ticket == third.resolution.arms[0].ticket != second.resolution.arms[0].ticket
        assert first.caller.key_id == second.caller.key_id != third.caller.key_id


async def test_limits_quotas_and_the_fallback_are_those_of_now(world: World, owner: Client) -> None:
    node = await world.node()
    for number in (1, 2):
        limits, quotas = tenants_pb2.TenantLimits(max_rank_rows=number), tenants_pb2.TenantQuotas(max_streams=number)
        await world.operator.tenants.SetTenantLimits(tenants_pb2.SetTenantLimitsRequest(tenant="acme", limits=limits))
        assert (await _resolve(node, owner)).caller.limits == limits
        await world.operator.tenants.SetTenantQuotas(tenants_pb2.SetTenantQuotasRequest(tenant="acme", quotas=quotas))
        for _ in range(2):
            caller = (await _resolve(node, owner)).caller
            assert (caller.limits, caller.quotas) == (limits, quotas)


async def test_a_rotated_key_and_its_successor_are_seen_by_the_very_next_resolve(world: World, owner: Client) -> None:
    node, key = await world.node(), await world.key("acme", tenants_pb2.ROLE_CALLER)
    id_before = (await _resolve(node, key)).caller.key_id
    assert (await _resolve(node, key)).caller.key_id == id_before
    request = tenants_pb2.RotateKeyRequest(id=id_before, overlap=duration_pb2.Duration(seconds=0))
    successor = world.caller((await owner.tenants.RotateKey(request)).secret)
    assert (await refused(_resolve(node, key)))[0] == grpc.StatusCode.UNAUTHENTICATED
    assert [(await _resolve(node, successor)).caller.key_id != id_before for _ in range(2)] == [True, True]


@pytest.fixture
async def beside(world: World, settings: Settings) -> AsyncIterator[World]:
    """Another process over the same database."""
    async with ControlPlane(settings, open_vault(settings), check=check_here) as plane:
        await plane.server.start()
        other = World(plane, settings, world.operator.secret)
        try:
            yield other
        finally:
            await other.close()
            await plane.server.stop(grace_s=0)


async def _is_let_in(node: Client, key: Client) -> bool:
    try:
        await _resolve(node, key)
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        return False
    return True


async def test_a_nodes_end_is_seen_by_the_next_resolve_of_every_process(world: World, owner: Client, beside: World) -> None:
    first, other = await world.node("first"), await world.node("other")
    there = [beside.caller(one.secret) for one in (first, other)]
    assert [await _is_let_in(node, owner) for node in (first, other, *there) for _ in range(2)] == [True] * 8
    nodes = (await world.operator.nodes.ListNodes(nodes_pb2.ListNodesRequest())).nodes
    await world.operator.nodes.RevokeNode(nodes_pb2.RevokeNodeRequest(id=nodes[0].id))
    assert [await _is_let_in(node, owner) for node in (*there, first, other)] == [False, True, False, True]


async def test_of_a_node_whose_key_was_rotated_twice_the_first_ends_at_once(world: World, owner: Client, beside: World) -> None:
    keys = [await world.node()]
    for _ in range(2):
        assert [await _is_let_in(node, owner) for node in (keys[-1], beside.caller(keys[-1].secret))] == [True, True]
        keys.append(world.caller((await keys[-1].nodes.RotateNodeKey(nodes_pb2.RotateNodeKeyRequest())).secret))
    assert [await _is_let_in(beside.caller(one.secret), owner) for one in keys] == [False, True, True]


async def test_the_tests_notice_what_is_not_forgotten(
    world: World, owner: Client, database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await world.node()
    second = (await world.publish(owner, "style", seed=2)).version.digest
    assert await _is_let_in(node, owner)
    with database.connect() as connection:
        connection.execute("ALTER TABLE nodes DISABLE TRIGGER feed")
        try:
            nodes = (await world.operator.nodes.ListNodes(nodes_pb2.ListNodesRequest())).nodes
            await world.operator.nodes.RevokeNode(nodes_pb2.RevokeNodeRequest(id=nodes[0].id))
            assert await _is_let_in(node, owner)  # nobody told
        finally:
            connection.execute("ALTER TABLE nodes ENABLE TRIGGER feed")
    monkeypatch.setattr(Freshness, "_forget", lambda *_: None)
    arms = [catalog_pb2.Arm(version=second, weight=1)]
    await owner.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms))
    assert (await _resolve(node, owner)).resolution.arms[0].digest != second


@pytest.mark.parametrize(("on", "calls"), [("0 s", 1), ("59.5 min", 3)])
async def test_answers_end_ahead_of_the_key_by_the_clock_of_the_database(
    on: str, calls: int, world: World, owner: Client, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, key = await world.node(), await world.key("acme", lifetime=duration_pb2.Duration(seconds=3600))
    later = remembered._LOOK.sql.replace("clock_timestamp()", f"(clock_timestamp() + interval '{on}')")
    monkeypatch.setattr(remembered, "_LOOK", Statement("look", later))
    await world.plane._freshness._give_up()
    for _ in range(3):
        await _resolve(node, key)
    assert len(asked) == calls


async def test_long_answers_are_not_kept(world: World, owner: Client, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "MAX_BYTES", 100)
    node = await world.node()
    for _ in range(2):
        await _resolve(node, owner)
    assert asked == ["style", "style"]
    assert len(world.plane._freshness.answers) == 0


@pytest.mark.parametrize("change", [("PROBE", "noisy"), ("TRUST", "")])
async def test_what_one_tenant_tells_of_itself_costs_no_other_what_is_remembered(
    change: tuple[str, str], world: World, owner: Client, database: TestDatabase, asked: list[str]
) -> None:
    node, rival = await world.node(), await world.tenant("rival")
    await world.publish(rival, "noisy", seed=2)
    for key, adapter in ((owner, "style"), (rival, "noisy")):
        await _resolve(node, key, adapter)
    kind, about = change
    with database.connect() as connection:
        connection.execute(
            "INSERT INTO changes (kind, tenant, adapter, version, generation) VALUES (%s, 'rival', %s, '', 0)",
            [int(ChangeKind[kind]), about],
        )
    for key, adapter in ((owner, "style"), (rival, "noisy")):
        await _resolve(node, key, adapter)
    assert asked == ["style", "noisy", "noisy"]
