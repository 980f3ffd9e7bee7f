"""Where an adapter is, is found without work that depends on what the caller may not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import text

from controlplane import locate
from controlplane.db import Scope
from tests.fixtures.controlplane import World
from veneer.controlplane.v1 import tenants_pb2


async def test_a_foreign_adapter_takes_the_same_steps_as_one_that_does_not_exist(world: World) -> None:
    await world.base()
    acme, _ = await world.tenant("acme"), await world.tenant("other")
    for seed in range(3):
        await world.publish(acme, seed=seed)
    assert await visits(world, "acme", "style", tenant="acme") > 0
    assert await visits(world, "acme", "style", tenant="other") == await visits(world, "acme", "unknown", tenant="other") == 0
    await acme.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter="style", grantee="other"))
    assert await visits(world, "acme", "style", tenant="other") > 0


async def visits(world: World, owner: str, adapter: str, *, tenant: str) -> int:
    """How often a tenant's look-up read the table of versions."""
    wanted = {"tenant": tenant, "owner": owner, "adapter": adapter, "ready": "READY"}
    async with world.plane.database.transaction(Scope.of_caller(tenant)) as connection:
        query = text(f"EXPLAIN (ANALYZE, FORMAT JSON) {locate._BASE.text}")
        (plan,) = (await connection.execute(query, wanted)).scalar_one()
    return sum(node["Actual Loops"] for node in nodes(plan["Plan"]) if node.get("Relation Name") == "versions")


def nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)
