"""The whole way over the wire: bootstrap, tenant, key, base, publish, resolve, blobs."""

from __future__ import annotations

import asyncio
import hashlib

import grpc
import pytest

from controlplane.settings import Settings
from tests.fixtures.controlplane import BASE_DIGEST, Files, World, adapter_files, refused, serve, upload
from veneer.controlplane.v1 import bases_pb2, catalog_pb2, nodes_pb2
from veneer.local.postgres import Postgres
from veneer.statuses import error_of

HEADER = {"adapter": "style", "base": BASE_DIGEST, "request_id": "once"}


async def test_a_published_version_can_be_resolved_and_read_by_a_node(world: World) -> None:
    await world.base()
    tenant = await world.tenant("acme")
    node = await world.node()

    published = await world.publish(tenant, "style", seed=1)
    target = nodes_pb2.AdapterTarget(adapter="style")
    request = nodes_pb2.ResolveRequest(key_digest=tenant.digest, target=target, base_digest=BASE_DIGEST)
    resolved = await node.nodes.Resolve(request)
    granted = await node.nodes.GrantBlobs(nodes_pb2.GrantBlobsRequest(version=published.version.digest))

    assert published.version.number == 1
    assert published.alias.name == "stable"
    assert resolved.caller.tenant == "acme"
    assert [arm.digest for arm in resolved.resolution.arms] == [published.version.digest]
    assert resolved.resolution.generation == 1
    files = {}
    for blob in granted.blobs:
        parts = node.nodes.ReadBlob(nodes_pb2.ReadBlobRequest(grant=granted.grant, digest=blob.digest))
        files[blob.name] = b"".join([part.data async for part in parts])
        assert hashlib.sha256(files[blob.name]).hexdigest() == blob.digest
    sent = adapter_files(1)
    assert files == {"adapter_config.json": sent.config, "adapter_model.safetensors": sent.weights}


async def test_the_publish_check_runs_in_its_jail_by_default(settings: Settings) -> None:
    async for world in serve(settings, check=None):
        await world.base()
        tenant = await world.tenant("acme")
        published = await world.publish(tenant, seed=1)
        code, text = await refused(lambda tenant=tenant: tenant.catalog.Publish(upload(Files(b"{}", b"PK\x03\x04"), **HEADER)))

    assert published.version.report.num_pairs == 1
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "adapter_model.safetensors" in text


async def test_without_a_database_calls_end_unavailable_with_a_delay_and_later_ones_work(
    world: World, postgres: Postgres
) -> None:
    await world.base()
    tenant = await world.tenant("acme")
    postgres.stop()
    try:
        async with asyncio.timeout(60):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tenant.bases.ListBases(bases_pb2.ListBasesRequest())
    finally:
        postgres.start()

    error = error_of(caught.value)
    assert (error.status, error.retry_after_s) == ("UNAVAILABLE", 1.0)
    assert len((await tenant.bases.ListBases(bases_pb2.ListBasesRequest())).bases) == 1


async def test_a_text_with_a_nul_character_is_refused_and_harms_nothing(world: World) -> None:
    await world.base()
    tenant = await world.tenant("acme")
    code, _ = await refused(tenant.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="a\x00b")))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    header = {**HEADER, "label": "a\x00b"}
    assert (await refused(lambda: tenant.catalog.Publish(upload(adapter_files(1), **header))))[
        0
    ] == grpc.StatusCode.INVALID_ARGUMENT
    assert (await world.publish(tenant, seed=1)).version.number == 1


async def test_calls_that_their_callers_cancel_leak_no_connection(world: World) -> None:
    await world.base()
    tenant = await world.tenant("acme")
    for _ in range(40):
        call = tenant.bases.ListBases(bases_pb2.ListBasesRequest())
        await asyncio.sleep(0)
        call.cancel()
    async with asyncio.timeout(60):
        for _ in range(5):
            await tenant.bases.ListBases(bases_pb2.ListBasesRequest())
    await world.plane.server.stop()

    pool = world.plane.database.app.sync_engine.pool
    async with asyncio.timeout(60):
        while pool.checkedout():  # noqa: ASYNC110  the plane's own loops borrow connections too
            await asyncio.sleep(0.01)
