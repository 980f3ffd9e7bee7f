"""Nodes over the wire: enrolment, keys, reports."""

from __future__ import annotations

import asyncio
import hashlib

import grpc
import pytest

from tests.fixtures.controlplane import BASE_DIGEST, Client, World, refused, serve, settings_for, tiny_base
from veneer.controlplane.v1 import bases_pb2, catalog_pb2, nodes_pb2

ENROLL = nodes_pb2.EnrollNodeRequest(base_digest=BASE_DIGEST)


async def token(world: World, name: str = "node-1") -> Client:
    request = nodes_pb2.CreateEnrollmentTokenRequest(node_name=name)
    return world.caller((await world.operator.nodes.CreateEnrollmentToken(request)).token)


async def works(client: Client) -> bool:
    try:
        await client.nodes.ListChanges(nodes_pb2.ListChangesRequest())
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        return False
    return True


async def test_a_token_lets_one_node_in_once(world: World) -> None:
    await world.base()
    enrollment = await token(world)
    enrolled = await enrollment.nodes.EnrollNode(ENROLL)

    assert (enrolled.node.name, enrolled.node.base_digest) == ("node-1", BASE_DIGEST)
    assert await works(world.caller(enrolled.secret))
    assert (await refused(enrollment.nodes.EnrollNode(ENROLL)))[0] == grpc.StatusCode.UNAUTHENTICATED


async def test_of_many_that_use_one_token_at_once_one_gets_in(world: World) -> None:
    await world.base()
    enrollment = await token(world)
    results = await asyncio.gather(*(enrollment.nodes.EnrollNode(ENROLL) for _ in range(10)), return_exceptions=True)
    lost = [result.code() for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert lost == [grpc.StatusCode.UNAUTHENTICATED] * 9


async def test_an_unknown_base_is_refused_and_leaves_the_token_good(world: World) -> None:
    enrollment = await token(world)
    code, text = await refused(enrollment.nodes.EnrollNode(ENROLL))
    assert (code, BASE_DIGEST in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    await world.base()
    await enrollment.nodes.EnrollNode(ENROLL)


async def test_a_token_does_nothing_else(world: World) -> None:
    await world.base()
    enrollment = await token(world)
    assert (await refused(enrollment.bases.ListBases(bases_pb2.ListBasesRequest())))[0] == grpc.StatusCode.PERMISSION_DENIED


async def test_a_rotated_key_works_and_the_one_before_it_for_a_while(world: World) -> None:
    await world.base()
    first = await world.node()
    second = world.caller((await first.nodes.RotateNodeKey(nodes_pb2.RotateNodeKeyRequest())).secret)
    assert [await works(first), await works(second)] == [True, True]
    third = world.caller((await second.nodes.RotateNodeKey(nodes_pb2.RotateNodeKeyRequest())).secret)
    assert [await works(client) for client in (first, second, third)] == [False, True, True]


async def test_the_old_key_ends_with_the_overlap(database, pepper_file, tmp_path) -> None:
    async for world in serve(settings_for(database, pepper_file, tmp_path, node_key_overlap_s=0.0)):
        await world.base()
        first = await world.node()
        second = world.caller((await first.nodes.RotateNodeKey(nodes_pb2.RotateNodeKeyRequest())).secret)
        assert [await works(first), await works(second)] == [False, True]


async def test_a_revoked_node_is_out_with_both_of_its_keys(world: World) -> None:
    await world.base()
    first = await world.node("b")
    await world.node("a")
    second = world.caller((await first.nodes.RotateNodeKey(nodes_pb2.RotateNodeKeyRequest())).secret)
    nodes = (await world.operator.nodes.ListNodes(nodes_pb2.ListNodesRequest())).nodes
    assert [one.name for one in nodes] == ["a", "b"]
    request = nodes_pb2.RevokeNodeRequest(id=nodes[1].id)
    revoked, again = await world.operator.nodes.RevokeNode(request), await world.operator.nodes.RevokeNode(request)

    assert revoked.node.HasField("revoke_time")
    assert again == revoked
    assert [await works(first), await works(second)] == [False, False]


async def test_a_node_that_is_none_cannot_be_revoked(world: World) -> None:
    request = nodes_pb2.RevokeNodeRequest(id="7f1c1d2e-0000-4000-8000-000000000000")
    assert await refused(world.operator.nodes.RevokeNode(request)) == (grpc.StatusCode.NOT_FOUND, "there is no such node")


@pytest.mark.parametrize("fault", [nodes_pb2.VERSION_FAULT_NOT_FINITE, nodes_pb2.VERSION_FAULT_CORRUPT])
async def test_a_reported_version_is_quarantined_and_announced(world: World, fault: int) -> None:
    await world.base()
    acme, node = await world.tenant("acme"), await world.node()
    digest = (await world.publish(acme)).version.digest
    cursor = (await node.nodes.ListChanges(nodes_pb2.ListChangesRequest())).next_cursor
    request = nodes_pb2.ReportVersionRequest(version=digest, fault=fault)
    answers = [(await node.nodes.ReportVersion(request)).quarantined for _ in range(2)]
    changes = (await node.nodes.ListChanges(nodes_pb2.ListChangesRequest(cursor=cursor))).changes
    listed = (await acme.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))).versions

    assert answers == [True, True]
    assert [(one.kind, one.tenant, one.version) for one in changes] == [(nodes_pb2.CHANGE_KIND_VERSION, "acme", digest)]
    assert listed[0].state == catalog_pb2.VERSION_STATE_QUARANTINED


async def test_a_quarantine_takes_as_many_nodes_as_the_setting_says(database, pepper_file, tmp_path) -> None:
    async for world in serve(settings_for(database, pepper_file, tmp_path, quarantine_reports=2)):
        await world.base()
        digest = (await world.publish(await world.tenant("acme"))).version.digest
        one, two = await world.node("one"), await world.node("two")
        request = nodes_pb2.ReportVersionRequest(version=digest, fault=nodes_pb2.VERSION_FAULT_CORRUPT)
        answers = [(await node.nodes.ReportVersion(request)).quarantined for node in (one, one, two)]
        assert answers == [False, False, True]


async def test_a_retired_version_stays_retired_when_it_is_reported(world: World) -> None:
    await world.base()
    acme, node = await world.tenant("acme"), await world.node()
    await world.publish(acme, seed=1)
    digest = (await world.publish(acme, seed=2)).version.digest
    await acme.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=digest))
    request = nodes_pb2.ReportVersionRequest(version=digest, fault=nodes_pb2.VERSION_FAULT_CORRUPT)
    assert not (await node.nodes.ReportVersion(request)).quarantined


async def test_a_version_that_is_none_cannot_be_reported(world: World) -> None:
    await world.base()
    node = await world.node()
    request = nodes_pb2.ReportVersionRequest(version="0" * 64, fault=nodes_pb2.VERSION_FAULT_CORRUPT)
    assert await refused(node.nodes.ReportVersion(request)) == (grpc.StatusCode.NOT_FOUND, "there is no such version")


async def test_a_node_of_another_base_cannot_report_a_version(world: World) -> None:
    await world.base()
    acme = await world.tenant("acme")
    digest = (await world.publish(acme)).version.digest
    other = hashlib.sha256(b"other").hexdigest()
    await world.base(tiny_base(other, "other"))
    node = await world.node("elsewhere", other)
    request = nodes_pb2.ReportVersionRequest(version=digest, fault=nodes_pb2.VERSION_FAULT_CORRUPT)
    assert await refused(node.nodes.ReportVersion(request)) == (grpc.StatusCode.NOT_FOUND, "there is no such version")
