"""Blob grants over the wire: one node, one version, a short time."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import grpc
import pytest

from controlplane.blob_grants import BlobGrants
from controlplane.vault import Vault
from tests.fixtures.controlplane import BASE_DIGEST, Client, World, refused, tiny_base
from veneer.controlplane.v1 import catalog_pb2, nodes_pb2
from veneer.errors import PermissionDeniedError


async def read(node: Client, grant: str, digest: str, offset: int = 0) -> bytes:
    request = nodes_pb2.ReadBlobRequest(grant=grant, digest=digest, offset=offset)
    return b"".join([part.data async for part in node.nodes.ReadBlob(request)])


@pytest.fixture
async def published(world: World) -> Any:
    await world.base()
    return await world.publish(await world.tenant("acme"))


async def give(node: Client, version: str) -> nodes_pb2.GrantBlobsResponse:
    return await node.nodes.GrantBlobs(nodes_pb2.GrantBlobsRequest(version=version))


async def test_a_grant_names_both_files_and_what_the_version_digest_covers(world: World, published: Any) -> None:
    grant = await give(await world.node(), published.version.digest)
    assert [blob.name for blob in grant.blobs] == ["adapter_config.json", "adapter_model.safetensors"]
    assert sum(blob.size_bytes for blob in grant.blobs) == published.version.size_bytes
    assert (grant.owner, grant.base_digest) == ("acme", BASE_DIGEST)
    assert (grant.adapter, grant.version_number) == (published.version.adapter, published.version.number)
    assert {blob.url for blob in grant.blobs} == {""}


async def test_a_read_goes_on_from_its_offset(world: World, published: Any) -> None:
    node = await world.node()
    grant = await give(node, published.version.digest)
    blob = grant.blobs[1]
    whole = await read(node, grant.grant, blob.digest)
    assert len(whole) == blob.size_bytes
    assert await read(node, grant.grant, blob.digest, 10) == whole[10:]


async def test_a_grant_is_good_for_its_node_and_files_only(world: World, published: Any) -> None:
    one, two = await world.node("one"), await world.node("two")
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


async def test_there_is_no_grant_for_a_version_that_is_none_or_has_ended(world: World, published: Any) -> None:
    node = await world.node()
    assert await refused(give(node, "0" * 64)) == (grpc.StatusCode.NOT_FOUND, "there is no such version")
    acme = await world.key("acme")
    second = (await world.publish(acme, seed=5)).version.digest
    await acme.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=second))
    code, text = await refused(give(node, second))
    assert (code, "retired" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)


async def test_a_node_of_another_base_gets_no_grant(world: World, published: Any) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    await world.base(tiny_base(other, "other"))
    code, text = await refused(give(await world.node("elsewhere", other), published.version.digest))
    assert (code, "another base" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)


async def test_a_grant_ends(world: World, published: Any) -> None:
    now = [1000.0]
    vault = Vault(bytes(32))
    plane = world.plane
    grants = BlobGrants(plane.database, vault, plane.blobs, lifetime_s=100, clock=lambda: now[0])
    await world.node()
    node = (await world.operator.nodes.ListNodes(nodes_pb2.ListNodesRequest())).nodes[0].id
    grant = await grants.give(node, published.version.digest)
    digest = grant.blobs[0].digest
    for time in (1000.0, 1100.0, 1160.0):  # a minute of leeway between the clocks of two processes
        now[0] = time
        assert published.version.digest in grants.check(node, grant.token, digest=digest)
    now[0] = 1161.0
    with pytest.raises(PermissionDeniedError, match="ended"):
        grants.check(node, grant.token, digest=digest)
