"""Probes: asked for by a publish, taken on by one node of the base, and judged before an alias moves."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from controlplane.catalog import find_version
from controlplane.db import Scope
from controlplane.probe_report import ProbeMeasures, judge
from tests.fixtures.controlplane import Client, World, refused, tiny_base
from veneer.controlplane.v1 import catalog_pb2, nodes_pb2, signatures_pb2, tenants_pb2

GOOD = {
    "finite": True,
    "num_prompts": 3,
    "num_tokens": 9,
    "max_difference": 0.5,
    "num_samples": 2,
    "max_error": 0.01,
    "tolerance": 0.03,
}


@pytest.fixture
async def acme(world: World) -> Client:
    await world.base()
    return await world.tenant("acme")


def publish(world: World, client: Client, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(world.publish(client, probe=True, **{"seed": 1, "request_id": "probed", **fields}))


async def asked(client: Client, *, number: int = 1) -> str:
    """Digest of the version once it is there."""
    async with asyncio.timeout(60):
        while True:
            try:
                versions = (await client.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))).versions
            except grpc.aio.AioRpcError:
                versions = []
            if len(versions) == number:
                return str(versions[0].digest)
            await asyncio.sleep(0.02)


async def take(node: Client, version: str) -> Any:
    return await node.nodes.TakeProbe(nodes_pb2.TakeProbeRequest(version=version))


async def report(node: Client, version: str, **measures: Any) -> None:
    message = nodes_pb2.ProbeMeasures(**{**GOOD, **measures})
    await node.nodes.ReportProbe(nodes_pb2.ReportProbeRequest(version=version, measures=message))


async def do(node: Client, version: str) -> None:
    """Takes a probe and reports it, and again where it was asked for anew in between."""
    async with asyncio.timeout(60):
        while True:
            try:
                await take(node, version)
                await report(node, version)
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.NOT_FOUND
                await asyncio.sleep(0.02)
            else:
                return


async def probe_of(client: Client) -> Any:
    return (await client.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))).versions[0].report.probe


async def aliases(client: Client) -> list[tuple[str, str]]:
    adapter = (await client.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style"))).adapter
    return [(alias.name, alias.arms[0].version) for alias in adapter.aliases]


async def test_an_alias_moves_once_a_node_found_the_version_good(world: World, acme: Client) -> None:
    node = await world.node()
    publishing = publish(world, acme)
    version = await asked(acme)
    assert await aliases(acme) == []
    taken = await take(node, version)
    assert (taken.owner, list(taken.invocation_tokens)) == ("acme", [])
    await report(node, version)
    response = await publishing
    assert (response.alias.name, response.alias.arms[0].version) == ("stable", version)
    probe = response.version.report.probe
    assert (probe.state, probe.num_tokens, list(probe.faults)) == (catalog_pb2.PROBE_STATE_PASSED, 9, [])
    assert await probe_of(acme) == probe
    assert await world.publish(acme, seed=1, request_id="probed", probe=True) == response
    code, _ = await refused(lambda: world.publish(acme, seed=1, request_id="probed"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT, "with a probe or without one are two requests"


@pytest.mark.parametrize(
    ("measures", "text"),
    [
        ({"finite": False}, "not finite"),
        ({"max_error": 0.04}, "differs from the stored files by 0.04"),
        ({"fault": "FAILED_PRECONDITION: the version cannot be loaded"}, "could not be run: FAILED_PRECONDITION"),
    ],
)
async def test_a_version_that_fails_is_published_and_its_alias_stays(
    measures: dict[str, Any], text: str, world: World, acme: Client
) -> None:
    first = (await world.publish(acme, seed=7)).version.digest
    node = await world.node()
    publishing = publish(world, acme, alias="stable")
    version = await asked(acme, number=2)
    await take(node, version)
    await report(node, version, **measures)
    code, message = await refused(publishing)
    assert (code, text in message, version in message) == (grpc.StatusCode.FAILED_PRECONDITION, True, True)
    assert await aliases(acme) == [("stable", first)]
    assert (await probe_of(acme)).state == catalog_pb2.PROBE_STATE_FAILED
    code, again = await refused(lambda: world.publish(acme, seed=1, request_id="probed", probe=True, alias="stable"))
    assert (code, again) == (grpc.StatusCode.FAILED_PRECONDITION, message)


async def test_without_a_data_plane_the_answer_names_the_base_and_a_repeat_goes_on(world: World, acme: Client) -> None:
    world.shorten_probes(probe_take_s=0.2)
    code, message = await refused(publish(world, acme))
    assert (code, "no data plane of base 'tiny'" in message) == (grpc.StatusCode.UNAVAILABLE, True)
    assert await aliases(acme) == []
    world.shorten_probes(probe_take_s=60.0)
    node = await world.node()
    publishing = publish(world, acme)
    version = await asked(acme)
    await do(node, version)
    assert (await publishing).alias.arms[0].version == version
    assert await aliases(acme) == [("stable", version)]


async def test_a_node_that_does_not_answer_is_named_and_may_not_answer_later(world: World, acme: Client) -> None:
    lost, other = await world.node("node-1"), await world.node("node-2")
    publishing = publish(world, acme)
    version = await asked(acme)
    await take(lost, version)
    world.shorten_probes(probe_timeout_s=0.0)
    code, message = await refused(publishing)
    assert (code, "gave no answer" in message) == (grpc.StatusCode.UNAVAILABLE, True)
    assert (await refused(lambda: publish(world, acme)))[0] == grpc.StatusCode.UNAVAILABLE
    world.shorten_probes(probe_timeout_s=90.0)
    publishing = publish(world, acme)
    async with asyncio.timeout(60):
        while (await probe_of(acme)).node:  # noqa: ASYNC110  until it is asked for anew
            await asyncio.sleep(0.02)
    await take(other, version)
    assert (await refused(report(lost, version, finite=False)))[0] == grpc.StatusCode.NOT_FOUND
    await report(other, version)
    assert (await publishing).version.report.probe.state == catalog_pb2.PROBE_STATE_PASSED


async def test_a_repeat_of_the_publish_leaves_the_probe_to_the_node_that_is_busy_with_it(world: World, acme: Client) -> None:
    node = await world.node()
    publishing = publish(world, acme)
    version = await asked(acme)
    await take(node, version)
    async with world.plane.database.transaction(Scope.of_tenant("acme")) as connection:
        stored = await find_version(connection, "acme", "style", version)
    await world.plane.publisher._probes.again(stored)
    assert (await probe_of(acme)).node, "it is asked for anew only where the node had all the time that it may take"
    world.shorten_probes(probe_take_s=90.0)  # it may have been taken on at the very end of what its publish waited
    await world.plane.publisher._probes.again(stored)
    assert not (await probe_of(acme)).node
    await do(node, version)
    assert (await publishing).alias.arms[0].version == version


async def test_a_probe_is_one_nodes_and_only_of_its_base(world: World, acme: Client) -> None:
    await world.base(tiny_base("e" * 64, "other"))
    node, second = await world.node("node-1"), await world.node("node-2")
    foreign = await world.node("node-3", "e" * 64)
    plain = (await world.publish(acme, adapter="plain", seed=5)).version.digest
    publishing = publish(world, acme)
    version = await asked(acme)
    for refusing, digest in ((foreign, version), (node, plain), (node, "0" * 64)):
        assert (await refused(take(refusing, digest)))[0] == grpc.StatusCode.NOT_FOUND
    limits = tenants_pb2.TenantLimits(max_rank_rows=64, max_host_bytes=1 << 30)
    await world.operator.tenants.SetTenantLimits(tenants_pb2.SetTenantLimitsRequest(tenant="acme", limits=limits))
    assert (await take(node, version)).limits == limits
    assert (await refused(take(second, version)))[0] == grpc.StatusCode.NOT_FOUND
    for refusing in (second, foreign):
        assert (await refused(report(refusing, version)))[0] == grpc.StatusCode.NOT_FOUND
    code, _ = await refused(report(node, version, max_error=float("nan")))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    await report(node, version)
    await publishing
    assert (await refused(report(node, version)))[0] == grpc.StatusCode.NOT_FOUND


async def test_equal_publishes_at_once_share_a_probe_and_move_the_alias_once(world: World, acme: Client) -> None:
    node = await world.node()
    first = publish(world, acme)
    version = await asked(acme)
    await take(node, version)
    await report(node, version)
    answers = await asyncio.gather(first, *(publish(world, acme) for _ in range(3)))
    assert all(answer.alias == answers[0].alias for answer in answers)
    assert answers[0].alias.generation == 1


async def test_stable_stays_where_another_publish_put_it_unless_it_is_asked_for(world: World, acme: Client) -> None:
    node = await world.node()
    publishing = publish(world, acme)
    version = await asked(acme)
    other = (await world.publish(acme, seed=2, alias="stable")).version.digest
    await take(node, version)
    await report(node, version)
    response = await publishing
    assert not response.HasField("alias")
    assert await aliases(acme) == [("stable", other)]


async def test_an_alias_that_moved_while_a_version_was_probed_stays_there(world: World, acme: Client) -> None:
    first = (await world.publish(acme, seed=2, alias="stable")).version.digest
    await world.publish(acme, seed=3, alias="stable")
    world.shorten_probes(probe_take_s=0.2)
    assert (await refused(publish(world, acme, alias="stable")))[0] == grpc.StatusCode.UNAVAILABLE
    world.shorten_probes(probe_take_s=60.0)
    back = catalog_pb2.RollbackRequest(adapter="style", alias="stable")
    assert (await acme.catalog.Rollback(back)).alias.arms[0].version == first
    node = await world.node()
    publishing = publish(world, acme, alias="stable")
    version = await asked(acme, number=3)
    await do(node, version)
    code, message = await refused(publishing)
    assert (code, "moved while the version was probed" in message) == (grpc.StatusCode.ABORTED, True)
    assert await aliases(acme) == [("stable", first)]
    assert (await refused(publish(world, acme, alias="stable")))[0] == grpc.StatusCode.ABORTED
    assert await aliases(acme) == [("stable", first)]


async def test_of_two_publishes_with_probes_the_second_does_not_take_the_alias_of_the_first(world: World, acme: Client) -> None:
    await world.publish(acme, seed=2, alias="stable")
    node = await world.node()
    publishing = publish(world, acme, alias="stable")
    version = await asked(acme, number=2)
    other = publish(world, acme, alias="stable", seed=3, request_id="other")
    later = await asked(acme, number=3)
    await do(node, later)
    assert (await other).alias.arms[0].version == later
    await do(node, version)
    assert (await refused(publishing))[0] == grpc.StatusCode.ABORTED
    assert await aliases(acme) == [("stable", later)]


async def test_publishes_with_probes_are_bounded_by_tenant_and_in_all_and_others_are_not(world: World, acme: Client) -> None:
    other, node = await world.tenant("other"), await world.node()
    world.shorten_probes(max_probes_per_tenant=1)
    publishing = publish(world, acme)
    version = await asked(acme)
    code, message = await refused(lambda: publish(world, acme, seed=2, request_id="second"))
    assert (code, "max_probes_per_tenant: 1" in message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    assert (await refused(lambda: publish(world, acme)))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED, "a repeat counts too"
    world.shorten_probes(max_probes_per_tenant=8, max_probes=1)
    code, message = await refused(lambda: publish(world, other))
    assert (code, "max_probes: 1" in message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    assert (await world.publish(acme, adapter="plain", seed=4)).alias.name == "stable"
    await do(node, version)
    assert (await publishing).alias.arms[0].version == version
    world.shorten_probes(max_probes=64)
    publishing = publish(world, acme, seed=2, request_id="second", alias="stable")
    version = await asked(acme, number=2)
    await do(node, version)
    assert (await publishing).alias.arms[0].version == version


async def test_a_version_retired_while_it_is_probed_moves_nothing(world: World, acme: Client) -> None:
    node = await world.node()
    publishing = publish(world, acme)
    version = await asked(acme)
    await take(node, version)
    await acme.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=version))
    await report(node, version)
    code, message = await refused(publishing)
    assert (code, "is retired" in message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert await aliases(acme) == []


async def test_no_alias_moves_to_what_is_not_signed_as_its_owner_asks_once_its_probe_is_over(world: World, acme: Client) -> None:
    async def ask(policy: int) -> None:
        await acme.signatures.SetSignaturePolicy(signatures_pb2.SetSignaturePolicyRequest(policy=policy))

    await world.publish(acme, seed=2)
    publishing = publish(world, acme, alias="stable")
    version = await asked(acme, number=2)
    before = await aliases(acme)
    await ask(signatures_pb2.SIGNATURE_POLICY_REQUIRE)
    await do(await world.node(), version)
    for call in (publishing, publish(world, acme, alias="stable")):
        code, message = await refused(call)
        assert (code, "is not signed as its owner asks" in message) == (grpc.StatusCode.FAILED_PRECONDITION, True), message
        assert await aliases(acme) == before
    await ask(signatures_pb2.SIGNATURE_POLICY_OFF)
    assert (await publish(world, acme, alias="stable")).alias.arms[0].version == version


async def test_a_frozen_alias_does_not_move_when_a_probe_is_over(world: World, acme: Client) -> None:
    async def freeze(*, frozen: bool) -> None:
        await acme.catalog.FreezeAlias(catalog_pb2.FreezeAliasRequest(adapter="style", frozen=frozen))

    await world.publish(acme, seed=2)
    publishing = publish(world, acme, alias="stable")
    version = await asked(acme, number=2)
    before = await aliases(acme)
    await freeze(frozen=True)
    await do(await world.node(), version)
    code, message = await refused(publishing)
    assert (code, "frozen" in message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert await aliases(acme) == before
    await freeze(frozen=False)
    assert (await publish(world, acme, alias="stable")).alias.arms[0].version == version


def test_no_difference_from_the_base_and_no_samples_are_warnings() -> None:
    same = judge(ProbeMeasures(finite=True, num_prompts=3, num_tokens=9, tolerance=0.03), node="n", max_norm=1.5)
    assert (same.state, len(same.warnings)) == ("PASSED", 2)
    assert "though its weights are not zero" in same.warnings[0]
    zero = judge(ProbeMeasures(finite=True, num_prompts=3, num_samples=1), node="n", max_norm=0.0)
    assert zero.warnings == ("on 3 prompts it answers exactly as the base does",)
