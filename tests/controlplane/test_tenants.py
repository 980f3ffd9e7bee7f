"""Tenants and keys over the wire."""

from __future__ import annotations

import asyncio
import uuid

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from tests.fixtures.controlplane import CALLER, OWNER, PUBLISHER, World, refused
from veneer.controlplane.v1 import bases_pb2, tenants_pb2


async def test_a_tenant_has_the_weight_and_fallback_that_it_was_made_with(world: World) -> None:
    await world.tenant("acme")
    await world.tenant("strict", weight=7, fallback=tenants_pb2.FALLBACK_POLICY_FORBIDDEN)

    listed = (await world.operator.tenants.ListTenants(tenants_pb2.ListTenantsRequest())).tenants

    assert [(one.name, one.weight, one.fallback) for one in listed] == [
        ("acme", 1, tenants_pb2.FALLBACK_POLICY_ALLOWED),
        ("strict", 7, tenants_pb2.FALLBACK_POLICY_FORBIDDEN),
    ]


async def test_limits_are_set_at_once_and_replaced_whole(world: World) -> None:
    await world.tenant("acme", limits=tenants_pb2.TenantLimits(max_rank_rows=64))
    listed = (await world.operator.tenants.ListTenants(tenants_pb2.ListTenantsRequest())).tenants
    assert listed[0].limits == tenants_pb2.TenantLimits(max_rank_rows=64)

    limits = tenants_pb2.TenantLimits(max_arena_bytes=1 << 40, max_host_bytes=5)
    request = tenants_pb2.SetTenantLimitsRequest(tenant="acme", limits=limits)
    assert (await world.operator.tenants.SetTenantLimits(request)).tenant.limits == limits
    listed = (await world.operator.tenants.ListTenants(tenants_pb2.ListTenantsRequest())).tenants
    assert listed[0].limits == limits


async def test_numbers_that_a_mask_does_not_name_stay(world: World) -> None:
    limits = tenants_pb2.TenantLimits(max_rank_rows=64, max_arena_bytes=7)
    quotas = tenants_pb2.TenantQuotas(max_streams=5, max_adapters=9)
    await world.tenant("acme", limits=limits, quotas=quotas)
    set_limits, set_quotas = world.operator.tenants.SetTenantLimits, world.operator.tenants.SetTenantQuotas
    one = tenants_pb2.TenantLimits(max_host_bytes=3, max_arena_bytes=1)
    request = tenants_pb2.SetTenantLimitsRequest(
        tenant="acme", limits=one, update_mask=FieldMask(paths=["limits.max_host_bytes"])
    )
    limits.max_host_bytes = 3
    assert (await set_limits(request)).tenant.limits == limits
    named = FieldMask(paths=["quotas.max_streams", "quotas.max_stored_bytes"])
    request_of_quotas = tenants_pb2.SetTenantQuotasRequest(
        tenant="acme", quotas=tenants_pb2.TenantQuotas(max_stored_bytes=8), update_mask=named
    )
    assert await refused(
        set_quotas(tenants_pb2.SetTenantQuotasRequest(tenant="acme", update_mask=FieldMask(paths=["quotas.max_streams.x"])))
    ) == (grpc.StatusCode.INVALID_ARGUMENT, "update_mask: quotas.max_streams.x is no field")
    assert (await set_quotas(request_of_quotas)).tenant.quotas == tenants_pb2.TenantQuotas(max_adapters=9, max_stored_bytes=8)


async def test_limits_of_no_tenant_cannot_be_set(world: World) -> None:
    request = tenants_pb2.SetTenantLimitsRequest(tenant="nobody")
    assert await refused(world.operator.tenants.SetTenantLimits(request)) == (
        grpc.StatusCode.NOT_FOUND,
        "there is no such tenant",
    )


async def test_a_name_is_given_once(world: World) -> None:
    await world.tenant("acme")
    assert await refused(world.tenant("acme")) == (grpc.StatusCode.ALREADY_EXISTS, "there is a tenant 'acme' already")


async def test_tenants_come_in_pages_by_name(world: World) -> None:
    for name in ("c", "a", "e", "b", "d"):
        await world.tenant(name)
    names, token, num_pages = [], "", 0
    while True:
        page = await world.operator.tenants.ListTenants(tenants_pb2.ListTenantsRequest(page_size=2, page_token=token))
        names += [one.name for one in page.tenants]
        num_pages += 1
        token = page.next_page_token
        if not token:
            break

    assert names == ["a", "b", "c", "d", "e"]
    assert num_pages == 3


async def test_a_key_is_shown_once_and_listed_without_its_secret(world: World) -> None:
    owner = await world.tenant("acme", OWNER)
    made = await owner.tenants.CreateKey(tenants_pb2.CreateKeyRequest(roles=[CALLER], label="web"))
    listed = await owner.tenants.ListKeys(tenants_pb2.ListKeysRequest())

    assert made.secret.startswith("vnr_")
    assert len(made.secret) == 47
    assert [(key.id, key.label) for key in listed.keys][:1] == [(made.key.id, "web")]
    assert made.secret not in str(listed)


async def test_keys_come_in_pages_newest_first(world: World) -> None:
    owner = await world.tenant("acme", OWNER)
    made = [(await owner.tenants.CreateKey(tenants_pb2.CreateKeyRequest(roles=[CALLER]))).key.id for _ in range(4)]
    first = await owner.tenants.ListKeys(tenants_pb2.ListKeysRequest(page_size=3))
    second = await owner.tenants.ListKeys(tenants_pb2.ListKeysRequest(page_size=3, page_token=first.next_page_token))

    assert [key.id for key in first.keys] == made[:0:-1]
    assert second.keys[0].id == made[0]
    assert len(second.keys) == 2
    assert second.next_page_token == ""


async def test_a_revoked_key_is_refused_at_once_and_stays_in_the_list(world: World) -> None:
    owner = await world.tenant("acme", OWNER)
    made = await owner.tenants.CreateKey(tenants_pb2.CreateKeyRequest(roles=[CALLER]))
    client = world.caller(made.secret)
    await client.bases.ListBases(bases_pb2.ListBasesRequest())

    first = await owner.tenants.RevokeKey(tenants_pb2.RevokeKeyRequest(id=made.key.id))
    again = await owner.tenants.RevokeKey(tenants_pb2.RevokeKeyRequest(id=made.key.id))

    assert first.key.HasField("revoke_time")
    assert again == first
    code, _ = await refused(client.bases.ListBases(bases_pb2.ListBasesRequest()))
    assert code == grpc.StatusCode.UNAUTHENTICATED


async def test_a_key_ends_by_itself(world: World) -> None:
    client = await world.key_for("acme", CALLER, lifetime=Duration(seconds=3))
    num_answers = 0
    async with asyncio.timeout(60):
        while True:
            try:
                await client.bases.ListBases(bases_pb2.ListBasesRequest())
                num_answers += 1
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED
                break
    assert num_answers > 0


async def test_a_lifetime_beyond_ten_years_is_refused(world: World) -> None:
    owner = await world.tenant("acme", OWNER)
    request = tenants_pb2.CreateKeyRequest(roles=[CALLER], lifetime=Duration(seconds=3651 * 86400))
    code, text = await refused(owner.tenants.CreateKey(request))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "lifetime" in text


async def test_an_owner_manages_keys_of_its_own_tenant_only(world: World) -> None:
    owner = await world.tenant("acme", OWNER)
    rival = await world.tenant("rival", OWNER)
    theirs = (await rival.tenants.ListKeys(tenants_pb2.ListKeysRequest())).keys[0].id
    calls = {
        "CreateKey": lambda tenant: owner.tenants.CreateKey(tenants_pb2.CreateKeyRequest(tenant=tenant, roles=[CALLER])),
        "ListKeys": lambda tenant: owner.tenants.ListKeys(tenants_pb2.ListKeysRequest(tenant=tenant)),
        "RevokeKey": lambda tenant: owner.tenants.RevokeKey(tenants_pb2.RevokeKeyRequest(tenant=tenant, id=theirs)),
    }
    for name, call in calls.items():
        foreign, unknown = await refused(call("rival")), await refused(call("nobody"))
        assert foreign == unknown == (grpc.StatusCode.NOT_FOUND, "there is no such tenant"), name
    foreign = await refused(owner.tenants.RevokeKey(tenants_pb2.RevokeKeyRequest(id=theirs)))
    unknown = await refused(owner.tenants.RevokeKey(tenants_pb2.RevokeKeyRequest(id=str(uuid.uuid4()))))
    assert foreign == unknown == (grpc.StatusCode.NOT_FOUND, "there is no such key")


async def test_operators_name_the_tenant_whose_keys_they_manage(world: World) -> None:
    await world.tenant("acme")
    tenants = world.operator.tenants
    missing = await refused(tenants.CreateKey(tenants_pb2.CreateKeyRequest(roles=[CALLER])))
    unknown = [
        await refused(tenants.CreateKey(tenants_pb2.CreateKeyRequest(tenant="nobody", roles=[CALLER]))),
        await refused(tenants.ListKeys(tenants_pb2.ListKeysRequest(tenant="nobody"))),
    ]
    assert missing[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert unknown == [(grpc.StatusCode.NOT_FOUND, "there is no such tenant")] * 2
    assert len((await tenants.ListKeys(tenants_pb2.ListKeysRequest(tenant="acme"))).keys) == 1


@pytest.mark.parametrize("roles", [(CALLER,), (PUBLISHER,), (CALLER, PUBLISHER)])
async def test_only_owners_make_keys(world: World, roles: tuple[int, ...]) -> None:
    client = await world.tenant("acme", *roles)
    code, _ = await refused(client.tenants.CreateKey(tenants_pb2.CreateKeyRequest(roles=[OWNER])))
    assert code == grpc.StatusCode.PERMISSION_DENIED
