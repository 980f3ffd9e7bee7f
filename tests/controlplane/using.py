"""Use as a data plane tells of it, and as tenants read it, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dataplane.catalog_client import CatalogClient, open_channel
from dataplane.resolution import Resolution, Target
from dataplane.resolve_cache import Key
from dataplane.usage import Use
from tests.fixtures.controlplane import BASE_DIGEST, Client, World
from veneer.controlplane.v1 import tenants_pb2

DAY_S = 86_400
NOON_S = 20_000 * DAY_S + 12 * 3600


@asynccontextmanager
async def node_client(world: World, node: Client) -> AsyncIterator[CatalogClient]:
    assert world.plane.server.addresses is not None
    async with open_channel(world.plane.server.addresses.callers, ca_pem=None) as channel:
        client = CatalogClient(channel, base_digest=BASE_DIGEST, timeout_s=60)
        client._secret = node.secret
        yield client


async def use_of(client: CatalogClient, caller: Client, adapter: str = "style", *, unix_s: int = NOON_S) -> Use:
    """A record of a request as a data plane would make it of what it was told."""
    answer = await client.resolve(Key(caller.digest, Target(adapter)))
    if not adapter:
        return Use(answer.caller.tenant, "", "", "", answer.caller.ticket.hex(), "OK", unix_s, 10, 4, 3)
    assert isinstance(answer.outcome, Resolution)
    (arm,) = answer.outcome.arms
    owner = answer.outcome.owner
    return Use(answer.caller.tenant, owner, adapter, arm.version, arm.ticket.hex(), "OK", unix_s, 10, 4, 3)


async def listed(caller: Client, **fields: Any) -> list[tenants_pb2.Usage]:
    return list((await caller.tenants.ListUsage(tenants_pb2.ListUsageRequest(**fields))).usage)
