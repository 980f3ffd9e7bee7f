"""Deleting over the wire: refused while served, gone at once, and free to be published again."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tests.fixtures.controlplane import BASE_DIGEST, Client, World, refused
from veneer.controlplane.v1 import catalog_pb2, nodes_pb2, tenants_pb2


@pytest.fixture
async def acme(world: World) -> Client:
    """A tenant, and a base to publish for."""
    await world.base()
    return await world.tenant("acme")


async def delete(client: Client, version: str, **fields: Any) -> Any:
    return await client.catalog.DeleteVersion(catalog_pb2.DeleteVersionRequest(adapter="style", version=version, **fields))


async def set_alias(client: Client, alias: str, *arms: tuple[str, int]) -> Any:
    messages = [catalog_pb2.Arm(version=version, weight=weight) for version, weight in arms]
    return await client.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", alias=alias, arms=messages))


async def adapter(client: Client) -> Any:
    return (await client.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style"))).adapter


async def versions(client: Client) -> list[int]:
    response = await client.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))
    return [version.number for version in response.versions]


async def resolve(node: Client, caller: Client, **target: str) -> Any:
    request = nodes_pb2.ResolveRequest(
        key_digest=caller.digest, target=nodes_pb2.AdapterTarget(adapter="style", **target), base_digest=BASE_DIGEST
    )
    return await node.nodes.Resolve(request)


async def test_a_version_that_no_alias_serves_is_gone_at_once(world: World, acme: Client) -> None:
    await world.publish(acme, seed=1)
    second = (await world.publish(acme, seed=2)).version
    node = await world.node()

    assert (await delete(acme, second.digest)).version == second
    assert await versions(acme) == [1]
    assert (await resolve(node, acme, version=second.digest)).refusal == nodes_pb2.REFUSAL_REASON_NOT_FOUND
    assert await refused(node.nodes.GrantBlobs(nodes_pb2.GrantBlobsRequest(version=second.digest))) == (
        grpc.StatusCode.NOT_FOUND,
        "there is no such version",
    )
    assert await refused(delete(acme, second.digest)) == (grpc.StatusCode.NOT_FOUND, "there is no such version")
    assert (await world.publish(acme, seed=3)).version.number == 3  # a number is never given again


async def test_a_version_that_an_alias_serves_is_deleted_by_force_only(world: World, acme: Client) -> None:
    first = (await world.publish(acme, seed=1)).version.digest
    second = (await world.publish(acme, seed=2, alias="canary")).version.digest
    await set_alias(acme, "stable", (first, 9), (second, 1))
    code, text = await refused(delete(acme, second))
    assert (code, "canary, stable" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)

    moved = {alias.name: alias for alias in (await delete(acme, second, force=True)).aliases}
    assert [arm.version for arm in moved["stable"].arms] == [first]
    assert (list(moved["canary"].arms), moved["canary"].generation) == ([], 2)
    assert [alias.name for alias in (await adapter(acme)).aliases] == ["stable"]
    node = await world.node()
    assert (await resolve(node, acme, alias="canary")).refusal == nodes_pb2.REFUSAL_REASON_NOT_FOUND
    assert (await set_alias(acme, "canary", (first, 1))).alias.generation == 3  # it never seems older than it was


async def test_a_frozen_alias_keeps_its_version_even_by_force(world: World, acme: Client) -> None:
    digest = (await world.publish(acme)).version.digest
    await acme.catalog.FreezeAlias(catalog_pb2.FreezeAliasRequest(adapter="style", frozen=True))
    for call in (
        delete(acme, digest, force=True),
        acme.catalog.DeleteAdapter(catalog_pb2.DeleteAdapterRequest(adapter="style", force=True)),
    ):
        code, text = await refused(call)
        assert (code, "frozen" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert await versions(acme) == [1]


async def test_a_roll_back_does_not_take_a_split_with_a_deleted_arm_for_a_whole_version(world: World, acme: Client) -> None:
    one, two, three = [(await world.publish(acme, seed=seed)).version.digest for seed in range(3)]
    await set_alias(acme, "stable", (two, 1), (three, 1))
    await set_alias(acme, "stable", (three, 1))
    await delete(acme, two, force=True)
    back = await acme.catalog.Rollback(catalog_pb2.RollbackRequest(adapter="style"))
    assert [arm.version for arm in back.alias.arms] == [one]


async def test_a_version_that_was_found_corrupt_can_be_published_again_after_it_was_deleted(world: World, acme: Client) -> None:
    first = await world.publish(acme, seed=1)
    node = await world.node()
    report = nodes_pb2.ReportVersionRequest(version=first.version.digest, fault=nodes_pb2.VERSION_FAULT_CORRUPT)
    assert (await node.nodes.ReportVersion(report)).quarantined
    assert (await refused(world.publish(acme, seed=1)))[0] == grpc.StatusCode.ALREADY_EXISTS
    await delete(acme, first.version.digest, force=True)

    again = await world.publish(acme, seed=1)
    assert (again.version.digest, again.version.number) == (first.version.digest, 2)
    assert again.version.state == catalog_pb2.VERSION_STATE_READY
    assert again.alias.name == "stable"  # the adapter had no version left
    assert (await resolve(node, acme)).resolution.arms[0].state == "READY"
    grant = await node.nodes.GrantBlobs(nodes_pb2.GrantBlobsRequest(version=again.version.digest))
    read = nodes_pb2.ReadBlobRequest(grant=grant.grant, digest=grant.blobs[1].digest)
    assert sum([len(part.data) async for part in node.nodes.ReadBlob(read)]) == grant.blobs[1].size_bytes


async def test_a_publish_that_is_repeated_after_its_version_was_deleted_is_answered_and_not_done(
    world: World, acme: Client
) -> None:
    first = await world.publish(acme, seed=1, request_id="once")
    await delete(acme, first.version.digest, force=True)
    assert await world.publish(acme, seed=1, request_id="once") == first
    assert await versions(acme) == []


async def test_an_adapter_goes_with_its_versions_aliases_and_grants_and_its_name_is_free(world: World, acme: Client) -> None:
    rival = await world.tenant("rival")
    for seed in range(3):
        await world.publish(acme, seed=seed)
    await acme.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter="style", grantee="rival"))
    request = catalog_pb2.DeleteAdapterRequest(adapter="style")
    code, text = await refused(acme.catalog.DeleteAdapter(request))
    assert (code, "stable" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)

    request.force = True
    gone = await acme.catalog.DeleteAdapter(request)
    assert (gone.num_versions, [(alias.name, alias.generation) for alias in gone.aliases]) == (3, [("stable", 2)])
    for call in (adapter(acme), versions(acme), acme.catalog.DeleteAdapter(request)):
        assert await refused(call) == (grpc.StatusCode.NOT_FOUND, "there is no such adapter")
    assert list((await acme.catalog.ListAdapters(catalog_pb2.ListAdaptersRequest())).adapters) == []
    assert list((await rival.tenants.ListGrants(tenants_pb2.ListGrantsRequest())).received) == []

    again = await world.publish(acme, seed=0)
    assert (again.version.number, again.alias.generation) == (4, 3)
    assert (await adapter(acme)).num_versions == 4


async def test_a_deletion_is_done_once_for_its_request_id_and_not_at_all_in_a_dry_run(world: World, acme: Client) -> None:
    first = (await world.publish(acme, seed=1)).version.digest
    tried = await delete(acme, first, force=True, dry_run=True, request_id="gone")
    assert await versions(acme) == [1]
    done = await delete(acme, first, force=True, request_id="gone")
    assert tried.version == done.version
    assert await delete(acme, first, force=True, request_id="gone") == done
    code, text = await refused(delete(acme, first, request_id="gone"))
    assert (code, "request_id" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_foreign_version_is_none(world: World, acme: Client) -> None:
    digest = (await world.publish(acme)).version.digest
    rival = await world.tenant("rival")
    await world.publish(rival)
    for force in (False, True):
        assert await refused(delete(rival, digest, force=force)) == (grpc.StatusCode.NOT_FOUND, "there is no such version")
    assert await versions(acme) == [1]
