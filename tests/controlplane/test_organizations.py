"""Organisations over the wire: what their keys reach, which is their own tenants and no more of them than it takes."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from controlplane.db import OPERATOR
from tests.fixtures.controlplane import AUDITOR, CALLER, OWNER, PUBLISHER, Client, World, refused
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import bases_pb2, catalog_pb2, nodes_pb2, tenants_pb2
from veneer.controlplane.v1 import organizations_pb2 as pb

_T = tenants_pb2
NOT_FOUND, INVALID = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT
NO_TENANT = (NOT_FOUND, "there is no such tenant")
LIMITS = _T.TenantLimits(max_rank_rows=64)
QUOTAS = _T.TenantQuotas(max_requests_per_minute=60, max_adapters=9)


async def make(client: Client, name: str, **fields: Any) -> _T.Tenant:
    request_id = fields.pop("request_id", "")
    request = _T.CreateTenantRequest(tenant=_T.Tenant(name=name, **fields), request_id=request_id)
    return (await client.tenants.CreateTenant(request)).tenant


async def names(client: Client, **fields: Any) -> list[str]:
    return [one.name for one in (await client.tenants.ListTenants(_T.ListTenantsRequest(**fields))).tenants]


async def shown(client: Client, name: str = "") -> pb.GetOrganizationResponse:
    return await client.organizations.GetOrganization(pb.GetOrganizationRequest(organization=name))


async def works(client: Client) -> bool:
    try:
        await shown(client)
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        return False
    return True


async def test_it_makes_tenants_whose_keys_work_with_what_operators_laid_down(world: World) -> None:
    await world.base()
    node = await world.node()
    group = await world.organization("group", OWNER, tenant_limits=LIMITS, tenant_quotas=QUOTAS)
    made = await make(group, "group--search", fallback=_T.FALLBACK_POLICY_EXACT)
    assert (made.organization, made.weight, made.limits, made.quotas) == ("group", 1, LIMITS, QUOTAS)
    assert made.fallback == _T.FALLBACK_POLICY_EXACT

    request = _T.CreateKeyRequest(tenant="group--search", roles=[OWNER, PUBLISHER, CALLER])
    tenant = world.caller((await group.tenants.CreateKey(request)).secret)
    published = await world.publish(tenant)
    target = nodes_pb2.AdapterTarget(adapter="style")
    resolve = nodes_pb2.ResolveRequest(key_digest=tenant.digest, target=target, base_digest=published.version.base_digest)
    resolved = await node.nodes.Resolve(resolve)
    assert (resolved.caller.tenant, resolved.caller.quotas) == ("group--search", QUOTAS)
    assert [arm.digest for arm in resolved.resolution.arms] == [published.version.digest]


async def test_it_sees_its_own_tenants_and_no_other(world: World) -> None:
    group, rival = await world.organization("group"), await world.organization("rival")
    await world.tenant("acme")
    for owner, name in ((group, "group--b"), (rival, "rival--a"), (group, "group--a")):
        await world.tenant_of(owner, name)
    assert await names(group) == await names(group, organization="group") == ["group--a", "group--b"]
    assert await names(rival) == await names(world.operator, organization="rival") == ["rival--a"]
    assert await names(world.operator) == ["acme", "group--a", "group--b", "rival--a"]
    for name in ("rival", "nobody"):
        missing = (NOT_FOUND, "there is no such organisation")
        assert await refused(names(group, organization=name)) == missing
        assert await refused(shown(group, name)) == missing
        keys = group.organizations.ListOrganizationKeys(pb.ListOrganizationKeysRequest(organization=name))
        assert await refused(keys) == missing


async def test_foreign_and_unknown_tenants_are_one_to_it(world: World) -> None:
    group = await world.organization("group", OWNER)
    await world.organization("rival")
    await world.tenant("acme")
    keys = await world.operator.tenants.ListKeys(_T.ListKeysRequest(tenant="acme"))
    for name in ("acme", "nobody"):
        for call in (
            group.tenants.CreateKey(_T.CreateKeyRequest(tenant=name, roles=[OWNER])),
            group.tenants.CreateKey(_T.CreateKeyRequest(tenant=name, roles=[OWNER], request_id="once")),
            group.tenants.RotateKey(_T.RotateKeyRequest(tenant=name, id=keys.keys[0].id)),
            group.tenants.RevokeKey(_T.RevokeKeyRequest(tenant=name, id=keys.keys[0].id)),
            group.tenants.ListKeys(_T.ListKeysRequest(tenant=name)),
            group.tenants.ListUsage(_T.ListUsageRequest(tenant=name)),
            group.tenants.ListAudit(_T.ListAuditRequest(tenant=name)),
        ):
            assert await refused(call) == NO_TENANT
    assert (await world.operator.tenants.ListKeys(_T.ListKeysRequest(tenant="acme"))).keys == keys.keys


async def test_it_manages_the_keys_of_its_tenants_and_reads_who_did_what(world: World) -> None:
    await world.base()
    group = await world.organization("group", OWNER)
    tenant = await world.tenant_of(group, "group--a", OWNER, PUBLISHER)
    await world.publish(tenant)
    [first] = (await group.tenants.ListKeys(_T.ListKeysRequest(tenant="group--a"))).keys
    rotated = await group.tenants.RotateKey(_T.RotateKeyRequest(tenant="group--a", id=first.id, overlap=Duration()))
    revoked = await group.tenants.RevokeKey(_T.RevokeKeyRequest(tenant="group--a", id=rotated.key.id))
    assert (rotated.previous.successor, revoked.key.HasField("revoke_time")) == (rotated.key.id, True)
    for client in (tenant, world.caller(rotated.secret)):
        code, _ = await refused(client.bases.ListBases(bases_pb2.ListBasesRequest()))
        assert code == grpc.StatusCode.UNAUTHENTICATED

    auditor = await world.organization_key("group", AUDITOR)
    told = (await auditor.tenants.ListAudit(_T.ListAuditRequest(tenant="group--a"))).entries
    assert told == (await world.operator.tenants.ListAudit(_T.ListAuditRequest(tenant="group--a"))).entries
    assert {"tenants", "keys", "versions"} <= {one.object for one in told}
    assert {one.actor.split()[0] for one in told if one.object in ("tenants", "keys")} == {"organization"}
    assert (await auditor.tenants.ListUsage(_T.ListUsageRequest(tenant="group--a"))).usage == []


async def test_a_tenant_must_be_named(world: World) -> None:
    group = await world.organization("group")
    code, message = await refused(group.tenants.ListKeys(_T.ListKeysRequest()))
    assert (code, "must name the tenant" in message) == (INVALID, True)
    code, message = await refused(world.operator.organizations.GetOrganization(pb.GetOrganizationRequest()))
    assert (code, "must name the organisation" in message) == (INVALID, True)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"name": "search"}, "must begin with 'group--'"),
        ({"name": "rival--a"}, "must begin with 'group--'"),
        ({"name": "group-a"}, "must begin with 'group--'"),
        ({"name": "group--a", "weight": 2}, "tenant.weight"),
        ({"name": "group--a", "limits": LIMITS}, "tenant.limits"),
        ({"name": "group--a", "quotas": QUOTAS}, "tenant.quotas"),
    ],
)
async def test_names_and_shares_are_not_its_to_choose(world: World, fields: dict[str, Any], fault: str) -> None:
    group = await world.organization("group")
    code, message = await refused(make(group, **fields))
    assert (code, fault in message) == (INVALID, True)
    assert await refused(make(group, "group--a", organization="rival")) == (NOT_FOUND, "there is no such organisation")
    assert await names(group) == []


async def test_nobody_else_takes_a_name_of_its_tenants(world: World) -> None:
    await world.organization("group")
    code, message = await refused(make(world.operator, "group--a"))
    assert (code, "'group--'" in message) == (INVALID, True)
    assert (await make(world.operator, "group--a", organization="group", weight=7)).weight == 7
    assert (await make(world.operator, "elsewhere", organization="group")).organization == "group"
    assert await refused(make(world.operator, "other", organization="nobody")) == (NOT_FOUND, "there is no such organisation")
    assert await refused(world.organization("group")) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "there is an organisation 'group' already",
    )


async def test_a_name_that_tenants_of_before_have_is_not_given_to_one(world: World, database: TestDatabase) -> None:
    with database.connect() as connection:
        connection.execute("INSERT INTO tenants (name, fallback_allowed, weight) VALUES ('old--one', true, 1)")
    taken = "has a name that would be this organisation's alone: choose another name"
    assert await refused(world.organization("old")) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        f"tenant 'old--one', which belongs to no organisation, {taken}; one of any name can adopt that tenant",
    )
    group = await world.organization("group")
    await world.operator.organizations.AdoptTenant(pb.AdoptTenantRequest(organization="group", tenant="old--one"))
    assert await names(group) == ["old--one"]
    assert await refused(world.organization("old")) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        f"tenant 'old--one', which belongs to organisation 'group' for ever, {taken}",
    )


async def test_a_tenant_of_nobodys_is_given_to_one_for_ever(world: World) -> None:
    await world.base()
    tenant = await world.tenant("acme", weight=7)
    await world.publish(tenant)
    group, rival = await world.organization("group"), await world.organization("rival")

    def adopt(organization: str, name: str) -> Any:
        return world.operator.organizations.AdoptTenant(pb.AdoptTenantRequest(organization=organization, tenant=name))

    assert (await adopt("group", "acme")).tenant.weight == 7
    assert (await adopt("group", "acme")).tenant.organization == "group"
    assert await names(group) == ["acme"]
    assert (await shown(group)).use.num_adapters == 1
    await world.publish(tenant, seed=1)
    code, message = await refused(adopt("rival", "acme"))
    assert (code, "'group'" in message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert await names(rival) == []
    assert await refused(adopt("group", "nobody")) == NO_TENANT
    assert await refused(adopt("nobody", "acme")) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "the tenant belongs to the organisation 'group', and stays there",
    )
    with pytest.raises(ProgrammingError, match="stays with its organisation"):
        async with world.plane.database.transaction(OPERATOR) as connection:
            await connection.execute(text("UPDATE tenants SET organization = 'rival' WHERE name = 'acme'"))


async def test_its_own_keys_are_issued_rotated_and_revoked_by_its_owners(world: World) -> None:
    group, rival = await world.organization("group", OWNER), await world.organization("rival", OWNER)
    create = pb.CreateOrganizationKeyRequest(roles=[AUDITOR], label="books", lifetime=Duration(seconds=3600), request_id="once")
    first = await group.organizations.CreateOrganizationKey(create)
    assert await group.organizations.CreateOrganizationKey(create) == first
    assert (first.key.organization, first.key.tenant, first.key.label) == ("group", "", "books")
    other = await rival.organizations.CreateOrganizationKey(create)
    assert other.secret != first.secret

    second = await group.organizations.RotateOrganizationKey(pb.RotateOrganizationKeyRequest(id=first.key.id, overlap=Duration()))
    assert [await works(world.caller(secret)) for secret in (first.secret, second.secret)] == [False, True]
    missing = (NOT_FOUND, "there is no such key")
    for key_id in (other.key.id, str(uuid.uuid4())):
        for call in (
            group.organizations.RotateOrganizationKey(pb.RotateOrganizationKeyRequest(id=key_id)),
            group.organizations.RevokeOrganizationKey(pb.RevokeOrganizationKeyRequest(id=key_id)),
        ):
            assert await refused(call) == missing
    await group.organizations.RevokeOrganizationKey(pb.RevokeOrganizationKeyRequest(id=second.key.id))
    assert [await works(client) for client in (group, world.caller(second.secret), world.caller(other.secret))] == [
        True,
        False,
        True,
    ]
    listed = (await group.organizations.ListOrganizationKeys(pb.ListOrganizationKeysRequest())).keys
    assert [(key.label, list(key.roles)) for key in listed] == [("books", [AUDITOR]), ("books", [AUDITOR]), ("", [OWNER])]
    code, message = await refused(group.organizations.CreateOrganizationKey(pb.CreateOrganizationKeyRequest(roles=[CALLER])))
    assert (code, "roles" in message) == (INVALID, True)


async def test_an_auditor_writes_nothing_and_no_key_of_it_reaches_a_catalogue_or_a_data_plane(world: World) -> None:
    await world.base()
    node = await world.node()
    group = await world.organization("group")
    await world.tenant_of(group, "group--a")
    auditor = await world.organization_key("group", AUDITOR)
    denied = grpc.StatusCode.PERMISSION_DENIED
    for call in (
        make(auditor, "group--b"),
        auditor.tenants.CreateKey(_T.CreateKeyRequest(tenant="group--a", roles=[CALLER])),
        auditor.organizations.CreateOrganizationKey(pb.CreateOrganizationKeyRequest(roles=[OWNER])),
        group.tenants.SetFallback(_T.SetFallbackRequest(tenant="group--a")),
        group.tenants.SetTenantQuotas(_T.SetTenantQuotasRequest(tenant="group--a")),
        group.tenants.ListGrants(_T.ListGrantsRequest()),
        group.catalog.ListAdapters(catalog_pb2.ListAdaptersRequest()),
        group.organizations.SetOrganizationQuotas(pb.SetOrganizationQuotasRequest(organization="group")),
    ):
        assert (await refused(call))[0] == denied
    for call in (
        node.nodes.Introspect(nodes_pb2.IntrospectRequest(key_digest=group.digest)),
        node.nodes.Resolve(
            nodes_pb2.ResolveRequest(key_digest=group.digest, target=nodes_pb2.AdapterTarget(), base_digest="0" * 64)
        ),
    ):
        assert (await refused(call))[0] == grpc.StatusCode.UNAUTHENTICATED


async def test_its_log_is_its_own_and_part_of_the_installations(world: World) -> None:
    group, rival = await world.organization("group", OWNER), await world.organization("rival")
    request = pb.SetOrganizationQuotasRequest(organization="group", quotas=pb.OrganizationQuotas(max_tenants=3))
    await world.operator.organizations.SetOrganizationQuotas(request)
    told = (await group.tenants.ListAudit(_T.ListAuditRequest())).entries
    assert [(one.action, one.object) for one in told] == [
        ("update", "organizations"),
        ("insert", "organization_keys"),
        ("insert", "organizations"),
    ]
    assert [json.loads(text)["max_tenants"] for text in (told[0].before, told[0].after)] == [0, 3]
    assert not any("hash" in one.before + one.after for one in told)
    assert len((await rival.tenants.ListAudit(_T.ListAuditRequest())).entries) == 2
    whole = {one.id for one in (await world.operator.tenants.ListAudit(_T.ListAuditRequest())).entries}
    assert {one.id for one in told} < whole


async def test_its_numbers_that_a_mask_does_not_name_stay(world: World) -> None:
    await world.organization("group")
    whole = pb.SetOrganizationQuotasRequest(
        organization="group",
        quotas=pb.OrganizationQuotas(max_tenants=3, max_adapters=4),
        tenant_limits=_T.TenantLimits(max_rank_rows=16, max_host_bytes=2),
        tenant_quotas=_T.TenantQuotas(max_streams=5, max_adapters=6),
    )
    await world.operator.organizations.SetOrganizationQuotas(whole)
    paths = ["quotas.max_tenants", "tenant_limits.max_rank_rows", "tenant_quotas.max_streams"]
    some = pb.SetOrganizationQuotasRequest(
        organization="group", tenant_quotas=_T.TenantQuotas(max_streams=7, max_adapters=8), update_mask=FieldMask(paths=paths)
    )
    changed = (await world.operator.organizations.SetOrganizationQuotas(some)).organization
    assert changed.quotas == pb.OrganizationQuotas(max_adapters=4)
    assert changed.tenant_limits == _T.TenantLimits(max_host_bytes=2)
    assert changed.tenant_quotas == _T.TenantQuotas(max_streams=7, max_adapters=6)
    await world.operator.organizations.SetOrganizationQuotas(pb.SetOrganizationQuotasRequest(organization="group"))
    [listed] = (await world.operator.organizations.ListOrganizations(pb.ListOrganizationsRequest())).organizations
    assert (listed.quotas, listed.tenant_quotas) == (pb.OrganizationQuotas(), _T.TenantQuotas())


async def all_rows(world: World) -> list[Any]:
    listed = (await world.operator.tenants.ListTenants(_T.ListTenantsRequest())).tenants
    found = (await world.operator.organizations.ListOrganizations(pb.ListOrganizationsRequest())).organizations
    asked = [
        *(
            world.operator.organizations.ListOrganizationKeys(pb.ListOrganizationKeysRequest(organization=one.name))
            for one in found
        ),
        *(world.operator.tenants.ListKeys(_T.ListKeysRequest(tenant=one.name)) for one in listed),
    ]
    keys = [list((await one).keys) for one in asked]
    told = (await world.operator.tenants.ListAudit(_T.ListAuditRequest(page_size=1))).entries
    return [list(listed), list(found), *keys, *told]


async def test_its_writes_and_those_to_it_are_done_once_under_one_identifier(world: World) -> None:
    group = await world.organization("group", OWNER)
    await world.tenant("acme")
    await world.tenant_of(group, "group--a")
    organizations, operator = group.organizations, world.operator.organizations
    key = (await organizations.CreateOrganizationKey(pb.CreateOrganizationKeyRequest(roles=[OWNER]))).key.id
    tenants_key = (await group.tenants.CreateKey(_T.CreateKeyRequest(tenant="group--a", roles=[CALLER]))).key.id
    quotas = pb.OrganizationQuotas(max_tenants=9)
    another = pb.Organization(name="another", quotas=quotas)
    writes = [
        (operator.CreateOrganization, pb.CreateOrganizationRequest(organization=another)),
        (operator.SetOrganizationQuotas, pb.SetOrganizationQuotasRequest(organization="group", quotas=quotas)),
        (operator.AdoptTenant, pb.AdoptTenantRequest(organization="group", tenant="acme")),
        (organizations.CreateOrganizationKey, pb.CreateOrganizationKeyRequest(roles=[AUDITOR])),
        (organizations.RotateOrganizationKey, pb.RotateOrganizationKeyRequest(id=key)),
        (organizations.RevokeOrganizationKey, pb.RevokeOrganizationKeyRequest(id=key)),
        (group.tenants.CreateTenant, _T.CreateTenantRequest(tenant=_T.Tenant(name="group--b"))),
        (group.tenants.CreateKey, _T.CreateKeyRequest(tenant="group--a", roles=[CALLER])),
        (group.tenants.RotateKey, _T.RotateKeyRequest(tenant="group--a", id=tenants_key)),
        (group.tenants.RevokeKey, _T.RevokeKeyRequest(tenant="group--a", id=tenants_key)),
    ]
    for number, (call, request) in enumerate(writes):
        request.request_id = f"write-{number}"
        first = await call(request)
        before = await all_rows(world)
        assert await asyncio.gather(*(call(request) for _ in range(3))) == [first] * 3, number
        assert await all_rows(world) == before, number
        other = type(request)()
        other.CopyFrom(request)
        if "id" in other.DESCRIPTOR.fields_by_name:
            other.id = str(uuid.uuid4())
        elif "roles" in other.DESCRIPTOR.fields_by_name:
            other.label = "other"
        else:
            continue
        code, message = await refused(call(other))
        assert (code, "request_id" in message) == (INVALID, True), number


async def test_its_identifiers_are_apart_from_those_of_its_tenants(world: World) -> None:
    group = await world.organization("group", OWNER)
    tenant = await world.tenant_of(group, "group--a", OWNER)
    request = _T.CreateKeyRequest(tenant="group--a", roles=[CALLER], request_id="same")
    made = {(await client.tenants.CreateKey(request)).secret for client in (group, tenant)}
    assert len(made) == 2


async def test_what_an_operator_writes_for_it_is_answered_to_nobody_else(world: World, database: TestDatabase) -> None:
    group, operator = await world.organization("group", OWNER), world.operator
    tenant = await world.tenant_of(group, "group--a", OWNER)
    create = pb.CreateOrganizationKeyRequest(organization="group", roles=[OWNER], request_id="same")
    create_tenants = _T.CreateKeyRequest(tenant="group--a", roles=[CALLER], request_id="equal")
    made = [await one.organizations.CreateOrganizationKey(create) for one in (operator, group)]
    made += [await one.tenants.CreateKey(create_tenants) for one in (operator, group, tenant)]
    assert len({one.secret for one in made}) == 5
    for one, first in zip((operator, group), made[:2], strict=True):
        assert await one.organizations.CreateOrganizationKey(create) == first
    for one, first in zip((operator, group, tenant), made[2:], strict=True):
        assert await one.tenants.CreateKey(create_tenants) == first

    def rotate(one: Client) -> Any:
        request = pb.RotateOrganizationKeyRequest(organization="group", id=made[0].key.id, request_id="turn")
        return one.organizations.RotateOrganizationKey(request)

    def revoke(one: Client) -> Any:
        request = pb.RevokeOrganizationKeyRequest(organization="group", id=made[0].key.id, request_id="turn")
        return one.organizations.RevokeOrganizationKey(request)

    made.append(await rotate(operator))
    code, message = await refused(rotate(group))
    assert (code, "rotated before" in message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert (await revoke(group)).key.id == made[0].key.id, "the identifier is new to it"
    fallback = _T.SetFallbackRequest(tenant="group--a", fallback=_T.FALLBACK_POLICY_EXACT, request_id="same")
    await operator.tenants.SetFallback(fallback)
    fallback.fallback = _T.FALLBACK_POLICY_ALLOWED
    code, message = await refused(operator.tenants.SetFallback(fallback))
    assert (code, "request_id" in message) == (INVALID, True)

    with database.connect() as connection:
        tables = ("requests", "organization_requests")
        kept = str([connection.execute(f"SELECT answer FROM {table}").fetchall() for table in tables])
    assert made[0].key.id in kept
    assert not any(one.secret in kept or world.caller(one.secret).digest.hex() in kept for one in made)


async def test_answers_are_kept_for_a_day_and_not_for_ever(world: World, database: TestDatabase) -> None:
    group = await world.organization("group", OWNER)
    for name in ("old", "young"):
        await make(group, f"group--{name}", request_id=name)
    with database.connect() as connection:
        connection.execute("UPDATE organization_requests SET create_time = now() - interval '30 days' WHERE request_id = 'old'")
        await world.plane.relay.trim()
        left = connection.execute("SELECT request_id FROM organization_requests").fetchall()
    assert left == [("young",)]
    assert (await make(group, "group--young", request_id="young")).name == "group--young"
    code, _ = await refused(make(group, "group--old", request_id="old"))
    assert code == grpc.StatusCode.ALREADY_EXISTS
