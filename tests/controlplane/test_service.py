"""The whole way over the wire: bootstrap, tenant, key, base, publish, resolve, blobs."""

from __future__ import annotations

import hashlib

from tests.fixtures.controlplane import BASE_DIGEST, World, adapter_files
from veneer.controlplane.v1 import nodes_pb2


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
