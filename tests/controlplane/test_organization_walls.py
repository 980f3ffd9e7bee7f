"""What bounds an organisation: ceilings over its tenants together, and row-level security under the service."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from controlplane.db import OPERATOR, Scope
from controlplane.stored_quotas import check_stored
from tests.controlplane.test_organizations import NO_TENANT, all_rows, make, names, shown
from tests.fixtures.controlplane import AUDITOR, Client, World, refused
from veneer.controlplane.v1 import catalog_pb2
from veneer.controlplane.v1 import organizations_pb2 as pb
from veneer.controlplane.v1 import tenants_pb2 as _T
from veneer.errors import ResourceExhaustedError


async def test_as_many_tenants_as_it_may_and_not_one_more_at_a_time(world: World) -> None:
    group = await world.organization("group", quotas=pb.OrganizationQuotas(max_tenants=3))

    async def attempt(number: int) -> str:
        try:
            return (await make(group, f"group--{number}")).name
        except grpc.aio.AioRpcError as error:
            return error.code().name

    made = await asyncio.gather(*(attempt(number) for number in range(8)))
    assert sorted(made).count("RESOURCE_EXHAUSTED") == 5
    assert (await shown(group)).use.num_tenants == 3
    await world.tenant("acme")
    adopt = world.operator.organizations.AdoptTenant(pb.AdoptTenantRequest(organization="group", tenant="acme"))
    code, message = await refused(adopt)
    assert (code, "max_tenants" in message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


async def test_its_tenants_share_a_ceiling_of_adapters_and_learn_nothing_else_of_each_other(world: World) -> None:
    await world.base()
    group = await world.organization("group", quotas=pb.OrganizationQuotas(max_adapters=3))
    first, second = await world.tenant_of(group, "group--a"), await world.tenant_of(group, "group--b")
    for seed, name in enumerate(("one", "two")):
        await world.publish(first, name, seed=seed)
    await world.publish(second, "one", seed=2)
    expected = "the tenant's organisation has its 3 adapters"
    refusals = await asyncio.gather(*(refused(world.publish(second, f"more-{n}", seed=3 + n)) for n in range(2)))
    for code, message in refusals:
        assert (code, expected in message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        assert "group--a" not in message
    await world.publish(second, "one", seed=5)  # a version more of what there is
    await first.catalog.DeleteAdapter(catalog_pb2.DeleteAdapterRequest(adapter="two", force=True))
    await world.publish(second, "two", seed=6)
    assert (await shown(group)).use.num_adapters == 3
    apart = await world.tenant("acme")
    await world.publish(apart, "free", seed=7)


async def test_its_tenants_share_a_ceiling_of_bytes_though_they_publish_at_the_same_time(world: World) -> None:
    await world.base()
    group = await world.organization("group")
    tenants = [await world.tenant_of(group, f"group--{number}") for number in range(4)]
    size = (await world.publish(tenants[0], seed=0)).version.size_bytes
    most = 3 * size + size // 2
    request = pb.SetOrganizationQuotasRequest(organization="group", quotas=pb.OrganizationQuotas(max_stored_bytes=most))
    await world.operator.organizations.SetOrganizationQuotas(request)

    async def attempt(tenant: Client, seed: int) -> str:
        try:
            await world.publish(tenant, seed=seed)
        except grpc.aio.AioRpcError as error:
            assert str(most) in (error.details() or "")
            return error.code().name
        return "OK"

    outcomes = await asyncio.gather(*(attempt(tenant, seed) for seed, tenant in enumerate(tenants * 2, 1)))
    stored = (await shown(group)).use.stored_bytes
    assert stored <= most
    assert outcomes.count("OK") == 2
    assert set(outcomes) == {"OK", "RESOURCE_EXHAUSTED"}


async def test_a_tenant_that_is_adopted_while_it_publishes_is_counted_with_what_it_publishes(world: World) -> None:
    await world.base()
    tenant = await world.tenant("acme")
    size = (await world.publish(tenant)).version.size_bytes
    group = await world.organization("group", quotas=pb.OrganizationQuotas(max_stored_bytes=2 * size))
    mine = await world.tenant_of(group, "group--a")
    adopt = world.operator.organizations.AdoptTenant(pb.AdoptTenantRequest(organization="group", tenant="acme"))
    async with world.plane.database.transaction(Scope.of_tenant("acme")) as publishing:
        await check_stored(publishing, "acme", "style", num_bytes=size, final=True)
        async with world.plane.database.transaction(Scope.of_tenant("acme")) as other:  # publishes do not wait for each other
            await check_stored(other, "acme", "style", num_bytes=size, final=True)
        adopting = asyncio.ensure_future(adopt)
        waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid()")
        async with asyncio.timeout(60):
            while not adopting.done() and not (await publishing.execute(waits)).scalar_one():  # noqa: ASYNC110  another session's
                await asyncio.sleep(0.01)
        assert not adopting.done(), "it does not wait for the publish"
    assert (await adopting).tenant.organization == "group"
    async with world.plane.database.transaction(Scope.of_tenant("acme")) as publishing:
        with pytest.raises(ResourceExhaustedError, match=r"organization\.max_stored_bytes"):
            await check_stored(publishing, "acme", "style", num_bytes=2 * size, final=True)
    await world.publish(mine, seed=1)


_FORBIDDEN = (
    "UPDATE tenants SET weight = 9",
    "UPDATE tenants SET organization = NULL",
    "UPDATE organizations SET max_tenants = 9",
    "UPDATE organization_keys SET expire_time = now() + interval '9 years'",
    "UPDATE organization_keys SET roles = ARRAY['owner']",
    "DELETE FROM organization_keys",
    "INSERT INTO tenants (name, fallback_allowed, weight, organization) VALUES ('group--x', true, 2, 'group')",
    "INSERT INTO tenants (name, fallback_allowed, weight, organization, max_streams) VALUES ('group--x', true, 1, 'group', 9)",
    "INSERT INTO tenants (name, fallback_allowed, weight, organization) VALUES ('x', true, 1, 'group')",
    "INSERT INTO tenants (name, fallback_allowed, weight, organization) VALUES ('rival--x', true, 1, 'rival')",
    "INSERT INTO tenants (name, fallback_allowed, weight) VALUES ('x', true, 1)",
    "INSERT INTO keys (tenant, id, hash, roles, label) VALUES ('rival--a', gen_random_uuid(), '\\x01', ARRAY['owner'], '')",
    "UPDATE keys SET revoke_time = now() WHERE tenant = 'rival--a'",
    "INSERT INTO changes (kind, tenant, adapter, version, generation) VALUES (4, 'rival--a', '', '', 0)",
    "INSERT INTO adapters (tenant, name, num_versions) VALUES ('group--a', 'x', 0)",
    "INSERT INTO organizations (name) VALUES ('another')",
)


async def test_the_database_lets_it_do_no_more_than_the_service_does(world: World) -> None:
    group, rival = await world.organization("group"), await world.organization("rival")
    await world.organization_key("group", AUDITOR, lifetime=Duration(seconds=3600))
    await world.tenant_of(group, "group--a")
    await world.tenant_of(rival, "rival--a")
    before = await all_rows(world)
    for statement in _FORBIDDEN:
        try:
            async with world.plane.database.transaction(Scope.of_organization("group")) as connection:
                assert (await connection.execute(text(statement))).rowcount == 0, statement
        except ProgrammingError as error:
            assert any(one in str(error) for one in ("row-level security", "permission denied", "no more time")), statement
        assert await all_rows(world) == before, statement


async def test_without_its_own_filter_the_database_shows_it_its_ownall_rows_alone(world: World) -> None:
    await world.base()
    group, rival = await world.organization("group"), await world.organization("rival")
    for owner, name in ((group, "group--a"), (rival, "rival--a")):
        await world.publish(await world.tenant_of(owner, name), seed=len(name))
    apart = await world.tenant("acme")
    await world.publish(apart, seed=9)
    columns = {"organizations": "name", "organization_keys": "organization", "organization_requests": "organization"}
    columns |= {"tenants": "organization", "keys": "tenant", "usage": "tenant"}
    async with world.plane.database.transaction(Scope.of_organization("group")) as connection:
        for table, column in columns.items():
            seen = {row[0] for row in await connection.execute(text(f"SELECT {column} FROM {table}"))}
            assert seen <= {"group", "group--a"}, table
        for table in ("adapters", "versions", "aliases", "arms", "grants", "requests", "uploads"):
            assert (await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one() == 0, table
        seen = {tuple(row) for row in await connection.execute(text("SELECT DISTINCT tenant, organization FROM audit"))}
        assert seen == {("", "group"), ("group--a", None)}
        stored = (await connection.execute(text("SELECT * FROM stored_in_organization('', '')"))).one()
        assert (stored.organization, stored.num_adapters) == ("group", 1)
    for scope in (Scope.of_tenant("acme"), OPERATOR, Scope.of_caller("group--a"), Scope("node", "group")):
        async with world.plane.database.transaction(scope) as connection:
            stored = (await connection.execute(text("SELECT * FROM stored_in_organization('', '')"))).one()
            assert set(stored) == {None}, scope
            keys = (await connection.execute(text("SELECT count(*) FROM organization_keys"))).scalar_one()
            assert keys == 0, scope


async def test_an_organisation_and_a_tenant_of_one_name_are_strangers(world: World) -> None:
    tenant = await world.tenant("same")
    group = await world.organization("same")
    assert await names(group) == []
    assert await refused(group.tenants.ListKeys(_T.ListKeysRequest(tenant="same"))) == NO_TENANT
    entries = (await tenant.tenants.ListAudit(_T.ListAuditRequest())).entries
    assert {one.object for one in entries} == {"tenants", "keys"}
    assert [key.organization for key in (await tenant.tenants.ListKeys(_T.ListKeysRequest())).keys] == [""]
