"""Resolving over the wire: who the caller is, and what a reference means for it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import Any

import grpc
import pytest

from tests.fixtures.controlplane import (
    BASE_DIGEST,
    CALLER,
    OWNER,
    PUBLISHER,
    Client,
    World,
    adapter_files,
    refused,
    tiny_base,
    upload,
)
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import catalog_pb2, nodes_pb2, tenants_pb2

OTHER_BASE = "a" * 64


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """A tenant with two versions of an adapter, and a node."""

    acme: Client
    node: Client
    one: str
    two: str

    async def resolve(
        self, client: Client, adapter: str = "style", *, base: str = BASE_DIGEST, **target: Any
    ) -> nodes_pb2.ResolveResponse:
        request = nodes_pb2.ResolveRequest(
            key_digest=client.digest, target=nodes_pb2.AdapterTarget(adapter=adapter, **target), base_digest=base
        )
        return await self.node.nodes.Resolve(request)

    async def refusal(self, client: Client, adapter: str = "style", **fields: Any) -> str:
        response = await self.resolve(client, adapter, **fields)
        assert response.WhichOneof("outcome") == "refusal"
        assert response.caller.tenant
        return nodes_pb2.RefusalReason.Name(response.refusal).removeprefix("REFUSAL_REASON_")


@pytest.fixture
async def scene(world: World) -> Scene:
    await world.base()
    acme = await world.tenant("acme")
    one, two = [(await world.publish(acme, seed=seed)).version.digest for seed in (1, 2)]
    return Scene(acme, await world.node(), one, two)


async def test_an_alias_gives_its_arms_with_generation_and_no_salt_for_a_single_one(scene: Scene) -> None:
    for target in ({}, {"alias": ""}, {"alias": "stable"}, {"owner": "acme"}):
        resolution = (await scene.resolve(scene.acme, **target)).resolution
        assert (resolution.owner, resolution.adapter, resolution.alias) == ("acme", "style", "stable")
        assert resolution.generation == 1
        assert [(arm.digest, arm.number, arm.weight, arm.max_rank, arm.state) for arm in resolution.arms] == [
            (scene.one, 1, 1, 2, "READY")
        ]
        assert resolution.arms[0].size_bytes > 0
        assert resolution.split_salt == b""


async def test_a_version_tells_which_tokens_activate_it(scene: Scene) -> None:
    files = adapter_files(3, alora_invocation_tokens=[5, 6])
    header = {"adapter": "style", "base": BASE_DIGEST, "request_id": "activated", "alias": "activated"}
    version = (await scene.acme.catalog.Publish(upload(files, **header))).version
    assert list(version.report.invocation_tokens) == [5, 6]
    for target in ({"alias": "activated"}, {"version": version.digest}):
        assert list((await scene.resolve(scene.acme, **target)).resolution.arms[0].invocation_tokens) == [5, 6]
    assert list((await scene.resolve(scene.acme)).resolution.arms[0].invocation_tokens) == []


async def test_a_report_of_an_earlier_release_is_of_an_adapter_that_is_always_active(
    scene: Scene, database: TestDatabase
) -> None:
    with database.connect() as connection:
        connection.execute("UPDATE versions SET report = report - 'invocation_tokens'")
    assert list((await scene.resolve(scene.acme)).resolution.arms[0].invocation_tokens) == []


async def test_a_version_is_resolved_without_alias_or_generation(scene: Scene) -> None:
    resolution = (await scene.resolve(scene.acme, version=scene.two)).resolution
    assert (resolution.alias, resolution.generation, resolution.arms[0].digest) == ("", 0, scene.two)


async def test_the_base_is_resolved_to_nothing(scene: Scene) -> None:
    response = await scene.resolve(scene.acme, "")
    assert response.WhichOneof("outcome") == "resolution"
    assert response.resolution == nodes_pb2.Resolution()


async def test_a_split_has_a_salt_that_stays_while_weights_change_and_is_another_for_other_versions(
    world: World, scene: Scene
) -> None:
    third = (await world.publish(scene.acme, seed=3)).version.digest

    async def split(alias: str, **weights: int) -> bytes:
        digests = {"one": scene.one, "two": scene.two, "third": third}
        arms = [catalog_pb2.Arm(version=digests[name], weight=weight) for name, weight in weights.items()]
        await scene.acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", alias=alias, arms=arms))
        resolution = (await scene.resolve(scene.acme, alias=alias)).resolution
        assert [(arm.digest, arm.weight) for arm in resolution.arms] == [(arm.version, arm.weight) for arm in arms]
        return resolution.split_salt

    first = await split("stable", one=3, two=1)
    assert len(first) == 32
    assert await split("stable", one=1, two=3) == first
    others = [await split("canary", one=3, two=1), await split("stable", one=3, third=1)]
    others.append(await split("stable", one=3, two=1, third=1))
    assert len({first, *others}) == 4
    assert await split("stable", one=3, two=1) == first


async def test_the_caller_is_described_by_its_key_and_tenant(world: World, scene: Scene) -> None:
    strict = await world.tenant("strict", CALLER, PUBLISHER, weight=5, fallback=tenants_pb2.FALLBACK_POLICY_FORBIDDEN)
    caller = (await scene.resolve(strict, "")).caller
    acme = (await scene.resolve(scene.acme, "")).caller

    assert (caller.tenant, caller.roles, caller.weight, caller.fallback_allowed) == ("strict", ["caller", "publisher"], 5, False)
    assert not caller.HasField("expire_time")
    assert len(caller.cache_salt) == 32
    assert caller.max_priority == 50
    assert acme.fallback_allowed
    assert acme.cache_salt != caller.cache_salt


@pytest.mark.parametrize("role", [one for one in tenants_pb2.Role.values() if one])
async def test_a_key_with_any_role_beside_the_callers_is_resolved(world: World, scene: Scene, role: int) -> None:
    response = await scene.resolve(await world.key("acme", *{CALLER, role}))
    assert response.WhichOneof("outcome") == "resolution"


async def test_limits_come_with_the_caller_and_a_change_of_them_is_told_to_nodes(world: World, scene: Scene) -> None:
    assert (await scene.resolve(scene.acme, "")).caller.limits == tenants_pb2.TenantLimits()
    cursor = (await scene.node.nodes.ListChanges(nodes_pb2.ListChangesRequest())).next_cursor

    limits = tenants_pb2.TenantLimits(max_rank_rows=48, max_arena_bytes=1 << 40, max_host_bytes=7)
    await world.operator.tenants.SetTenantLimits(tenants_pb2.SetTenantLimitsRequest(tenant="acme", limits=limits))

    assert (await scene.resolve(scene.acme, "")).caller.limits == limits
    changes = (await scene.node.nodes.ListChanges(nodes_pb2.ListChangesRequest(cursor=cursor))).changes
    assert [(change.kind, change.tenant) for change in changes] == [(nodes_pb2.CHANGE_KIND_KEY, "acme")]


async def test_a_key_that_is_none_is_unauthenticated(world: World, scene: Scene) -> None:
    revoked = await world.key("acme", CALLER)
    keys = (await scene.acme.tenants.ListKeys(tenants_pb2.ListKeysRequest())).keys
    await scene.acme.tenants.RevokeKey(tenants_pb2.RevokeKeyRequest(id=keys[0].id))
    digests = {
        "random": os.urandom(32),
        "revoked": revoked.digest,
        "node": scene.node.digest,
        "operator": world.operator.digest,
        "hash of the hash": hashlib.sha256(scene.acme.digest).digest(),
    }
    for name, digest in digests.items():
        target = nodes_pb2.AdapterTarget(adapter="style")
        request = nodes_pb2.ResolveRequest(key_digest=digest, target=target, base_digest=BASE_DIGEST)
        assert (await refused(scene.node.nodes.Resolve(request)))[0] == grpc.StatusCode.UNAUTHENTICATED, name


async def test_a_key_without_the_role_of_callers_is_refused_whatever_it_asks_for(world: World, scene: Scene) -> None:
    owner = await world.key("acme", OWNER)
    for adapter in ("", "style", "nothing"):
        assert await scene.refusal(owner, adapter) == "ROLE"


async def test_foreign_and_unknown_references_are_refused_the_same(world: World, scene: Scene) -> None:
    rival = await world.tenant("rival")
    await world.publish(rival, "theirs", seed=9)
    answers = []
    for target in (
        {"owner": "acme"},
        {"owner": "acme", "version": scene.one},
        {"owner": "acme", "adapter": "nothing"},
        {"owner": "nobody"},
        {"adapter": "nothing"},
        {"version": scene.one},
        {"adapter": "theirs", "version": scene.one},
        {"adapter": "theirs", "alias": "nothing"},
    ):
        adapter = target.pop("adapter", "style")
        answers.append(await scene.resolve(rival, adapter, **target))
    assert all(answer == answers[0] for answer in answers)
    assert answers[0].refusal == nodes_pb2.REFUSAL_REASON_NOT_FOUND


async def test_a_grant_opens_one_adapter_until_it_is_withdrawn(world: World, scene: Scene) -> None:
    friend = await world.tenant("friend")
    await world.publish(scene.acme, "secret", seed=8)
    await scene.acme.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter="style", grantee="friend"))

    for target in ({}, {"version": scene.two}):
        resolution = (await scene.resolve(friend, owner="acme", **target)).resolution
        assert (resolution.owner, len(resolution.arms)) == ("acme", 1)
    assert (await scene.resolve(friend, owner="acme")).caller.tenant == "friend"
    assert await scene.refusal(friend, "secret", owner="acme") == "NOT_FOUND"
    assert await scene.refusal(friend) == "NOT_FOUND"  # it is not the friend's own

    await scene.acme.tenants.RevokeGrant(tenants_pb2.RevokeGrantRequest(adapter="style", grantee="friend"))
    assert await scene.refusal(friend, owner="acme") == "NOT_FOUND"


async def test_a_version_for_another_base_is_refused(world: World, scene: Scene) -> None:
    await world.base(tiny_base(OTHER_BASE, "other"))
    assert await scene.refusal(scene.acme, base=OTHER_BASE) == "BASE_MISMATCH"
    assert await scene.refusal(scene.acme, base=OTHER_BASE, version=scene.two) == "BASE_MISMATCH"


async def test_a_version_that_ended_is_refused_with_its_state(scene: Scene) -> None:
    await scene.acme.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=scene.two))
    report = nodes_pb2.ReportVersionRequest(version=scene.one, fault=nodes_pb2.VERSION_FAULT_NOT_FINITE)
    await scene.node.nodes.ReportVersion(report)

    assert await scene.refusal(scene.acme, version=scene.two) == "RETIRED"
    assert await scene.refusal(scene.acme, version=scene.one) == "QUARANTINED"
    assert await scene.refusal(scene.acme) == "QUARANTINED"


async def test_an_arm_that_ended_is_marked_in_its_split(scene: Scene) -> None:
    arms = [catalog_pb2.Arm(version=scene.one, weight=1), catalog_pb2.Arm(version=scene.two, weight=1)]
    await scene.acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms))
    report = nodes_pb2.ReportVersionRequest(version=scene.two, fault=nodes_pb2.VERSION_FAULT_NOT_FINITE)
    await scene.node.nodes.ReportVersion(report)

    states = [arm.state for arm in (await scene.resolve(scene.acme)).resolution.arms]
    assert states == ["READY", "QUARANTINED"]


async def test_introspection_tells_kind_and_roles_of_valid_credentials_only(world: World, scene: Scene) -> None:
    async def introspect(digest: bytes) -> nodes_pb2.IntrospectResponse:
        return await scene.node.nodes.Introspect(nodes_pb2.IntrospectRequest(key_digest=digest))

    tenant, operator, node = [await introspect(client.digest) for client in (scene.acme, world.operator, scene.node)]
    assert (tenant.kind, tenant.tenant, tenant.roles) == ("tenant", "acme", ["caller", "owner", "publisher"])
    assert (operator.kind, operator.tenant, operator.roles) == ("operator", "", [])
    assert node.kind == "node"
    assert all(one.key_id for one in (tenant, operator, node))
    token = await world.operator.nodes.CreateEnrollmentToken(nodes_pb2.CreateEnrollmentTokenRequest(node_name="n"))
    for digest in (os.urandom(32), hashlib.sha256(token.token.encode()).digest()):
        assert (await refused(introspect(digest)))[0] == grpc.StatusCode.UNAUTHENTICATED
