"""Grants over the wire: use, not read."""

from __future__ import annotations

import grpc

from tests.fixtures.controlplane import CALLER, World, refused
from veneer.controlplane.v1 import catalog_pb2, tenants_pb2


async def test_a_grant_is_listed_by_both_sides_and_by_nobody_else(world: World) -> None:
    await world.base()
    owner, friend, other = [await world.tenant(name) for name in ("acme", "friend", "other")]
    await world.publish(owner)
    request = tenants_pb2.CreateGrantRequest(adapter="style", grantee="friend")
    first, again = await owner.tenants.CreateGrant(request), await owner.tenants.CreateGrant(request)

    async def listed(client: object) -> tuple[int, int]:
        grants = await client.tenants.ListGrants(tenants_pb2.ListGrantsRequest())
        return len(grants.given), len(grants.received)

    assert first == again
    assert (first.grant.owner, first.grant.adapter, first.grant.grantee) == ("acme", "style", "friend")
    assert [await listed(client) for client in (owner, friend, other)] == [(1, 0), (0, 1), (0, 0)]


async def test_a_grantee_may_use_but_not_read_the_adapter(world: World) -> None:
    await world.base()
    owner, friend = await world.tenant("acme"), await world.tenant("friend")
    await world.publish(owner)
    await owner.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter="style", grantee="friend"))

    assert (await friend.catalog.ListAdapters(catalog_pb2.ListAdaptersRequest())).adapters == []
    for call in (
        friend.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style")),
        friend.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style")),
    ):
        assert await refused(call) == (grpc.StatusCode.NOT_FOUND, "there is no such adapter")


async def test_a_grant_needs_an_adapter_and_another_name(world: World) -> None:
    await world.base()
    owner = await world.tenant("acme")
    await world.tenant("friend")
    await world.publish(owner)

    async def grant(adapter: str, grantee: str) -> tuple[grpc.StatusCode, str]:
        return await refused(owner.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter=adapter, grantee=grantee)))

    assert await grant("nothing", "friend") == (grpc.StatusCode.NOT_FOUND, "there is no such adapter")
    assert (await grant("style", "acme"))[0] == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_grant_to_nobody_is_answered_like_one_to_somebody(world: World) -> None:
    await world.base()
    owner = await world.tenant("acme")
    await world.tenant("friend")
    await world.publish(owner)
    answers = [
        await owner.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter="style", grantee=name))
        for name in ("friend", "nobody")
    ]
    for answer in answers:
        answer.grant.ClearField("create_time")
        answer.grant.ClearField("grantee")
    assert answers[0] == answers[1]
    assert len((await owner.tenants.ListGrants(tenants_pb2.ListGrantsRequest())).given) == 2
    await owner.tenants.RevokeGrant(tenants_pb2.RevokeGrantRequest(adapter="style", grantee="nobody"))


async def test_grants_come_in_pages_first_given_then_received(world: World) -> None:
    await world.base()
    owner, friend = await world.tenant("acme"), await world.tenant("friend")
    for seed, adapter in enumerate("ab"):
        await world.publish(owner, adapter, seed=seed)
        await world.publish(friend, adapter, seed=seed)
        for name in ("x", "y", "friend"):
            await owner.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter=adapter, grantee=name))
        await friend.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter=adapter, grantee="acme"))

    async def pages(size: int) -> list[tuple[str, str, str]]:
        found, token = [], ""
        while True:
            page = await owner.tenants.ListGrants(tenants_pb2.ListGrantsRequest(page_size=size, page_token=token))
            assert len(page.given) + len(page.received) <= size
            found += [(one.owner, one.adapter, one.grantee) for one in (*page.given, *page.received)]
            token = page.next_page_token
            if not token:
                return found

    whole = await pages(100)
    assert whole == [
        *[("acme", adapter, name) for adapter in "ab" for name in ("friend", "x", "y")],
        *[("friend", adapter, "acme") for adapter in "ab"],
    ]
    for size in (1, 2, 3, 6, 7, 8):
        assert await pages(size) == whole, size


async def test_a_withdrawn_grant_is_gone(world: World) -> None:
    await world.base()
    owner, friend = await world.tenant("acme"), await world.tenant("friend")
    await world.publish(owner)
    await owner.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter="style", grantee="friend"))
    request = tenants_pb2.RevokeGrantRequest(adapter="style", grantee="friend")
    await owner.tenants.RevokeGrant(request)

    assert await refused(owner.tenants.RevokeGrant(request)) == (grpc.StatusCode.NOT_FOUND, "there is no such grant")
    assert (await friend.tenants.ListGrants(tenants_pb2.ListGrantsRequest())).received == []


async def test_callers_share_nothing(world: World) -> None:
    await world.base()
    await world.publish(await world.tenant("acme"))
    await world.tenant("friend")
    caller = await world.key("acme", CALLER)
    code, _ = await refused(caller.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter="style", grantee="friend")))
    assert code == grpc.StatusCode.PERMISSION_DENIED
