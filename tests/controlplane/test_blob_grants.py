"""Blob grants over the wire: one node, one version, a short time."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from controlplane.blob_grants import BlobGrants
from controlplane.collector import Collector
from controlplane.db import NODE, Scope
from controlplane.identities import Identities
from controlplane.probe_report import ProbeReport
from controlplane.remembered import Freshness
from controlplane.vault import Vault
from tests.fixtures.controlplane import BASE_DIGEST, Client, World, refused, tiny_base
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import catalog_pb2, nodes_pb2
from veneer.errors import PermissionDeniedError


async def read(node: Client, grant: str, digest: str, offset: int = 0) -> bytes:
    request = nodes_pb2.ReadBlobRequest(grant=grant, digest=digest, offset=offset)
    return b"".join([part.data async for part in node.nodes.ReadBlob(request)])


@pytest.fixture
async def acme(world: World) -> Client:
    await world.base()
    return await world.tenant("acme")


@pytest.fixture
async def published(world: World, acme: Client) -> Any:
    return await world.publish(acme)


async def give(node: Client, version: str, **more: Any) -> nodes_pb2.GrantBlobsResponse:
    return await node.nodes.GrantBlobs(nodes_pb2.GrantBlobsRequest(version=version, **more))


async def asked(world: World, caller: Client, name: str = "node-1") -> Client:
    """A node that was asked to serve the caller's adapter."""
    node = await world.node(name)
    await world.ask(node, caller)
    return node


async def may_read(node: Client, version: str, **more: Any) -> bool:
    """Whether a node is granted a version; a refusal says that the node was told nothing of it."""
    try:
        await give(node, version, **more)
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "neither asked to serve" in (error.details() or "")
        return False
    return True


async def test_a_grant_names_both_files_and_what_the_version_digest_covers(world: World, acme: Client, published: Any) -> None:
    grant = await give(await asked(world, acme), published.version.digest)
    assert [blob.name for blob in grant.blobs] == ["adapter_config.json", "adapter_model.safetensors"]
    assert sum(blob.size_bytes for blob in grant.blobs) == published.version.size_bytes
    assert (grant.owner, grant.base_digest) == ("acme", BASE_DIGEST)
    assert (grant.adapter, grant.version_number) == (published.version.adapter, published.version.number)
    assert {blob.url for blob in grant.blobs} == {""}


async def test_a_read_goes_on_from_its_offset(world: World, acme: Client, published: Any) -> None:
    node = await asked(world, acme)
    grant = await give(node, published.version.digest)
    blob = grant.blobs[1]
    whole = await read(node, grant.grant, blob.digest)
    assert len(whole) == blob.size_bytes
    assert await read(node, grant.grant, blob.digest, 10) == whole[10:]


async def test_a_grant_is_good_for_its_node_and_files_only(world: World, acme: Client, published: Any) -> None:
    one, two = await asked(world, acme, "one"), await asked(world, acme, "two")
    grant = await give(one, published.version.digest)
    digest = grant.blobs[0].digest
    forged = base64.urlsafe_b64encode(bytes(32) + base64.urlsafe_b64decode(grant.grant)[32:]).decode()
    for node, token, wanted, cause in (
        (two, grant.grant, digest, "another node"),
        (one, grant.grant, "0" * 64, "not cover"),
        (one, forged, digest, "not valid"),
        (one, "x", digest, "not valid"),
    ):
        code, text = await refused(read(node, token, wanted))
        assert (code, cause in text) == (grpc.StatusCode.PERMISSION_DENIED, True), cause


async def test_there_is_no_grant_for_a_version_that_is_none_or_has_ended(world: World, acme: Client, published: Any) -> None:
    node = await asked(world, acme)
    assert await refused(give(node, "0" * 64)) == (grpc.StatusCode.NOT_FOUND, "there is no such version")
    second = (await world.publish(acme, seed=5)).version.digest
    await acme.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=second))
    code, text = await refused(give(node, second))
    assert (code, "retired" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)


async def test_a_node_of_another_base_gets_no_grant(world: World, published: Any) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    await world.base(tiny_base(other, "other"))
    code, text = await refused(give(await world.node("elsewhere", other), published.version.digest))
    assert (code, "another base" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)


async def test_a_grant_ends(world: World, acme: Client, published: Any) -> None:
    now = [1000.0]
    vault = Vault(bytes(32))
    plane = world.plane
    grants = BlobGrants(
        plane.database,
        vault,
        plane.blobs,
        identities=Identities(plane.database, vault, Freshness(plane.database)),
        lifetime_s=100,
        registry=CollectorRegistry(),
        clock=lambda: now[0],
    )
    await asked(world, acme)
    node = (await world.operator.nodes.ListNodes(nodes_pb2.ListNodesRequest())).nodes[0].id
    grant = await grants.give(node, published.version.digest)
    digest = grant.blobs[0].digest
    for time in (1000.0, 1100.0, 1160.0):  # a minute of leeway between the clocks of two processes
        now[0] = time
        assert published.version.digest in grants.check(node, grant.token, digest=digest)
    now[0] = 1161.0
    with pytest.raises(PermissionDeniedError, match="ended"):
        grants.check(node, grant.token, digest=digest)


async def test_a_node_reads_no_version_that_it_was_not_asked_to_serve_and_the_refusal_is_logged(
    world: World, acme: Client, published: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rival = await world.tenant("rival")
    secret = (await world.publish(rival, seed=7)).version
    node = await asked(world, acme)
    assert await may_read(node, published.version.digest)
    with caplog.at_level(logging.WARNING, "controlplane.blob_grants"):
        assert not await may_read(node, secret.digest)
    [entry] = [one for one in caplog.records if one.name == "controlplane.blob_grants"]
    [known] = (await world.operator.nodes.ListNodes(nodes_pb2.ListNodesRequest())).nodes
    told = [getattr(entry, name) for name in ("node", "owner", "adapter", "number", "version")]
    assert told == [known.id, "rival", "style", 1, secret.digest]

    await world.ask(node, rival)
    assert await may_read(node, secret.digest)


async def test_what_one_node_is_asked_for_is_no_leave_for_another(world: World, acme: Client, published: Any) -> None:
    await asked(world, acme, "one")
    assert not await may_read(await world.node("two"), published.version.digest)


async def test_a_node_reads_each_arm_of_a_split_and_what_may_take_its_place(world: World, acme: Client, published: Any) -> None:
    second, third, fourth = [(await world.publish(acme, seed=seed)).version.digest for seed in (2, 3, 4)]
    arms = [catalog_pb2.Arm(version=version, weight=1) for version in (second, third)]
    await acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms))
    node = await asked(world, acme)
    answers = [await may_read(node, version) for version in (second, third, published.version.digest, fourth)]
    assert answers == [True, True, True, False], "both arms and the version before them, and not one that serves nothing"


async def test_a_node_that_serves_an_adapter_reads_the_version_to_which_an_alias_moves(
    world: World, acme: Client, published: Any
) -> None:
    second = (await world.publish(acme, seed=2)).version.digest
    node, stranger = await asked(world, acme, "one"), await world.node("two")
    assert not await may_read(node, second)
    arms = [catalog_pb2.Arm(version=second, weight=1)]
    await acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms))
    assert await may_read(node, second)
    assert not await may_read(stranger, second)


async def test_an_operator_has_a_node_bring_a_version_and_no_other_credential_does(
    world: World, acme: Client, published: Any
) -> None:
    node = await world.node()
    version = published.version.digest
    for other in (acme.digest, node.digest, bytes(32), b""):
        assert not await may_read(node, version, operator_key_digest=other)
    assert await may_read(node, version, operator_key_digest=world.operator.digest)
    assert await may_read(node, version), "the load that follows names no operator"


async def test_a_node_that_took_a_probe_on_reads_its_version(world: World, acme: Client, database: TestDatabase) -> None:
    version = (await world.publish(acme)).version.digest
    with database.connect() as owner:
        owner.execute("UPDATE versions SET probe = %s", [json.dumps(dataclasses.asdict(ProbeReport(state="ASKED")))])
    node, other = await world.node("one"), await world.node("two")
    assert not await may_read(node, version)
    await node.nodes.TakeProbe(nodes_pb2.TakeProbeRequest(version=version))
    assert (await may_read(node, version), await may_read(other, version)) == (True, False)


async def test_a_node_of_before_reads_all_versions_of_its_base_for_a_day(
    world: World, acme: Client, published: Any, database: TestDatabase
) -> None:
    second = (await world.publish(acme, seed=2)).version.digest
    node = await world.node()
    for until, version in (("- interval '1 second'", second), ("+ interval '1 day'", published.version.digest)):
        with database.connect() as owner:
            owner.execute(f"UPDATE nodes SET reads_all_until = now() {until}")
        assert await may_read(node, version) == until.startswith("+")
    with database.connect() as owner:
        owner.execute("UPDATE nodes SET reads_all_until = NULL")
    assert await may_read(node, published.version.digest), "what it read in that time is noted"


async def test_leave_ends_when_nothing_asked_for_a_month_and_is_renewed_before(
    world: World, acme: Client, published: Any, database: TestDatabase
) -> None:
    node = await asked(world, acme)
    collector = Collector(world.plane.database, world.plane.blobs, world.settings, registry=CollectorRegistry())
    for days, renews, left in ((29, True, True), (29, False, True), (31, False, False)):
        with database.connect() as owner:
            owner.execute("UPDATE node_versions SET use_time = now() - make_interval(days => %s)", [days])
        if renews:
            world.plane._freshness.forget_all()  # as it does every minute
            await world.ask(node, acme)
            with database.connect() as owner:
                [age] = owner.execute("SELECT now() - use_time < interval '1 day' FROM node_versions").fetchone() or [None]
            assert age is True
        await collector.collect()
        with database.connect() as owner:
            assert bool(owner.execute("SELECT FROM node_versions").fetchall()) == left
    assert not await may_read(node, published.version.digest)


async def test_rows_that_a_database_lost_are_written_again(
    world: World, acme: Client, published: Any, database: TestDatabase
) -> None:
    node = await asked(world, acme)
    with database.connect() as owner:
        owner.execute("DELETE FROM node_versions")
    world.plane._freshness.forget_all()  # as when the server is another one
    await world.ask(node, acme)
    assert await may_read(node, published.version.digest)


@pytest.mark.parametrize("scope", [Scope("tenant", "acme"), Scope("caller", "acme"), Scope("operator"), Scope("public")])
async def test_what_nodes_were_told_is_seen_by_nodes_alone(world: World, acme: Client, published: Any, scope: Scope) -> None:
    await asked(world, acme)
    rows = text("SELECT tenant FROM node_versions")
    async with world.plane.database.transaction(scope) as connection:
        assert (await connection.execute(rows)).all() == []
    async with world.plane.database.transaction(NODE) as connection:
        assert len((await connection.execute(rows)).all()) == 1
