"""What a tenant lets answer in place of a version: set, told to nodes, and never wider than it says."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from tests.fixtures.controlplane import BASE_DIGEST, CALLER, OWNER, Client, World, refused
from veneer.controlplane.v1 import nodes_pb2
from veneer.controlplane.v1 import tenants_pb2 as pb

ALLOWED, FORBIDDEN, EXACT = pb.FALLBACK_POLICY_ALLOWED, pb.FALLBACK_POLICY_FORBIDDEN, pb.FALLBACK_POLICY_EXACT
BY_BASE = {pb.DEFAULT_FALLBACK_NOT_READY, pb.DEFAULT_FALLBACK_ANY}


async def told(node: Client, client: Client) -> tuple[bool, bool, str]:
    """What a node hears of a caller: whether the base may answer, whether an earlier version may, and the default."""
    request = nodes_pb2.ResolveRequest(key_digest=client.digest, target=nodes_pb2.AdapterTarget(), base_digest=BASE_DIGEST)
    caller = (await node.nodes.Resolve(request)).caller
    return caller.fallback_allowed, caller.previous_allowed, caller.default_fallback


async def test_a_tenant_that_says_nothing_lets_the_request_decide_and_waits_by_default(world: World) -> None:
    node = await world.bare_node()
    acme = await world.tenant("acme")
    assert await told(node, acme) == (True, True, "NONE")


@pytest.mark.parametrize("default", pb.DefaultFallback.values())
async def test_a_policy_is_stored_as_it_was_set_unless_its_default_is_beyond_it(
    world: World, default: pb.DefaultFallback.ValueType
) -> None:
    node = await world.bare_node()
    acme = await world.tenant("acme")
    named = default or pb.DEFAULT_FALLBACK_NONE
    for policy, by_base, by_previous in ((ALLOWED, True, True), (FORBIDDEN, False, True), (EXACT, False, False)):
        request = pb.SetFallbackRequest(fallback=policy, default_fallback=default)
        if (default in BY_BASE and not by_base) or (default == pb.DEFAULT_FALLBACK_PREVIOUS and not by_previous):
            before = await told(node, acme)
            code, _ = await refused(acme.tenants.SetFallback(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert await told(node, acme) == before
            continue
        stored = (await acme.tenants.SetFallback(request)).tenant
        assert (stored.name, stored.fallback, stored.default_fallback) == ("acme", policy, named)
        short = pb.DefaultFallback.Name(named).removeprefix("DEFAULT_FALLBACK_")
        assert await told(node, acme) == (by_base, by_previous, short)


async def test_what_a_mask_does_not_name_of_a_policy_stays_and_must_still_fit(world: World) -> None:
    acme = await world.tenant("acme", fallback=ALLOWED, default_fallback=pb.DEFAULT_FALLBACK_PREVIOUS)
    policy, default = FieldMask(paths=["fallback"]), FieldMask(paths=["default_fallback"])
    stored = (await acme.tenants.SetFallback(pb.SetFallbackRequest(fallback=FORBIDDEN, update_mask=policy))).tenant
    assert (stored.fallback, stored.default_fallback) == (FORBIDDEN, pb.DEFAULT_FALLBACK_PREVIOUS)
    for request in (
        pb.SetFallbackRequest(fallback=EXACT, update_mask=policy),
        pb.SetFallbackRequest(default_fallback=pb.DEFAULT_FALLBACK_ANY, update_mask=default),
    ):
        assert (await refused(acme.tenants.SetFallback(request)))[0] is grpc.StatusCode.INVALID_ARGUMENT
    request = pb.SetFallbackRequest(default_fallback=pb.DEFAULT_FALLBACK_FAIL, update_mask=default)
    stored = (await acme.tenants.SetFallback(request)).tenant
    assert (stored.fallback, stored.default_fallback) == (FORBIDDEN, pb.DEFAULT_FALLBACK_FAIL)


async def test_a_tenant_can_be_made_with_its_policy(world: World) -> None:
    node = await world.bare_node()
    strict = await world.tenant("strict", fallback=EXACT, default_fallback=pb.DEFAULT_FALLBACK_FAIL)
    assert await told(node, strict) == (False, False, "FAIL")
    code, _ = await refused(world.tenant("wrong", fallback=EXACT, default_fallback=pb.DEFAULT_FALLBACK_ANY))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_owners_set_their_own_and_operators_any_and_the_feed_tells_of_it(world: World) -> None:
    node = await world.bare_node()
    acme, other = await world.tenant("acme", OWNER, CALLER), await world.tenant("other", OWNER)
    cursor = (await node.nodes.ListChanges(nodes_pb2.ListChangesRequest())).next_cursor
    request = pb.SetFallbackRequest(tenant="acme", fallback=EXACT)
    assert (await refused(other.tenants.SetFallback(request)))[0] is grpc.StatusCode.NOT_FOUND
    await world.operator.tenants.SetFallback(request)
    changes = (await node.nodes.ListChanges(nodes_pb2.ListChangesRequest(cursor=cursor))).changes
    assert [(one.kind, one.tenant) for one in changes] == [(nodes_pb2.CHANGE_KIND_KEY, "acme")]
    assert await told(node, acme) == (False, False, "NONE")
    nobody = pb.SetFallbackRequest(tenant="nobody", fallback=EXACT)
    assert (await refused(world.operator.tenants.SetFallback(nobody)))[0] is grpc.StatusCode.NOT_FOUND
