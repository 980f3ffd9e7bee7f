"""Which version stands behind each arm of an alias: the last good one before it, and never one that may not be served."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.fixtures.controlplane import BASE_DIGEST, CALLER, Client, World
from veneer.controlplane.v1 import catalog_pb2, nodes_pb2, tenants_pb2

NAMES = "abcd"


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """A tenant with four versions of an adapter, a to d, and a node."""

    acme: Client
    node: Client
    digests: dict[str, str]

    async def point(self, arms: str) -> None:
        """Points the alias `live` at one version, or at a split."""
        split = [catalog_pb2.Arm(version=self.digests[name], weight=1) for name in arms]
        await self.acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", alias="live", arms=split))

    async def before(self, client: Client, **target: Any) -> str:
        """The version before each arm, by name; `-` for none."""
        named = {digest: name for name, digest in self.digests.items()}
        wanted = nodes_pb2.AdapterTarget(adapter="style", owner="acme", **(target or {"alias": "live"}))
        request = nodes_pb2.ResolveRequest(key_digest=client.digest, target=wanted, base_digest=BASE_DIGEST)
        arms = (await self.node.nodes.Resolve(request)).resolution.arms
        return "".join(named[arm.previous.digest] if arm.HasField("previous") else "-" for arm in arms)


@pytest.fixture
async def scene(world: World) -> Scene:
    await world.base()
    acme = await world.tenant("acme")
    digests = {name: (await world.publish(acme, seed=seed)).version.digest for seed, name in enumerate(NAMES, 1)}
    return Scene(acme, await world.node(), digests)


@pytest.mark.parametrize(
    ("history", "before"),
    [
        ("a", "-"),
        ("a b", "a"),
        ("a b c", "b"),
        ("a b a", "-"),  # what was rolled back is not what came before
        ("a b a c", "a"),
        ("a ab", "-a"),  # a canary
        ("ab b", "-"),  # nothing ever had all traffic before b had some
        ("a b bc c", "b"),
        ("a ab abc", "-aa"),
    ],
)
async def test_it_is_the_last_that_had_all_traffic_before_the_arm_had_any(scene: Scene, history: str, before: str) -> None:
    for arms in history.split():
        await scene.point(arms)
    assert await scene.before(scene.acme) == before


async def test_one_that_may_not_be_served_any_more_is_passed_over(scene: Scene) -> None:
    for arms in NAMES:
        await scene.point(arms)
    assert await scene.before(scene.acme) == "c"
    await scene.acme.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=scene.digests["c"]))
    assert await scene.before(scene.acme) == "b"
    fault = nodes_pb2.VERSION_FAULT_CORRUPT
    await scene.node.nodes.ReportVersion(nodes_pb2.ReportVersionRequest(version=scene.digests["b"], fault=fault))
    assert await scene.before(scene.acme) == "a"


async def test_it_is_told_to_those_alone_who_may_use_the_adapter(world: World, scene: Scene) -> None:
    await scene.point("a")
    await scene.point("b")
    other = await world.tenant("other", CALLER)
    assert await scene.before(other) == ""
    await scene.acme.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter="style", grantee="other"))
    assert await scene.before(other) == "a"


async def test_there_is_none_for_a_version_that_was_named(scene: Scene) -> None:
    await scene.point("a")
    await scene.point("b")
    assert await scene.before(scene.acme, version=scene.digests["b"]) == "-"
