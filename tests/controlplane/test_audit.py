"""The audit log: every write with who did it and what changed, and nobody takes an entry back."""

from __future__ import annotations

import json
from typing import Any

import grpc
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import create_async_engine

from controlplane import models
from controlplane.db import Scope, set_scope
from controlplane.settings import APP_ROLE, AUTH_ROLE, RELAY_ROLE
from tests.fixtures.controlplane import Client, World, refused
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import catalog_pb2, tenants_pb2


async def entries(client: Client, **fields: Any) -> list[Any]:
    return list((await client.tenants.ListAudit(tenants_pb2.ListAuditRequest(**fields))).entries)


async def test_every_write_is_told_with_who_did_it_and_what_it_changed(world: World) -> None:
    await world.base()
    acme = await world.tenant("acme")
    first, second = [(await world.publish(acme, seed=seed)).version.digest for seed in range(2)]
    publisher = await world.key("acme", tenants_pb2.ROLE_PUBLISHER)
    arms = [catalog_pb2.Arm(version=second, weight=1)]
    await publisher.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms))
    await acme.catalog.DeleteVersion(catalog_pb2.DeleteVersionRequest(adapter="style", version=first))

    found = list(reversed(await entries(acme)))
    assert [entry.id for entry in found] == sorted(entry.id for entry in found)
    [moved] = [entry for entry in found if (entry.object, entry.action) == ("aliases", "update")]
    keys = {key.id: key for key in (await acme.tenants.ListKeys(tenants_pb2.ListKeysRequest())).keys}
    kind, key_id = moved.actor.split()
    assert (kind, list(keys[key_id].roles)) == ("tenant", [tenants_pb2.ROLE_PUBLISHER])
    assert (json.loads(moved.before)["generation"], json.loads(moved.after)["generation"]) == (1, 2)
    [gone] = [entry for entry in found if (entry.object, entry.action) == ("versions", "delete")]
    assert (json.loads(gone.before)["digest"], gone.after) == (first, "")
    [made] = [entry for entry in found if entry.object == "tenants"]
    assert made.actor.startswith("operator ")
    assert {entry.object for entry in found} == {"tenants", "keys", "adapters", "versions", "aliases", "arms"}
    assert not any("hash" in entry.before + entry.after for entry in found)


async def test_a_write_that_changed_nothing_or_was_only_tried_is_not_told(world: World) -> None:
    await world.base()
    acme = await world.tenant("acme")
    digest = (await world.publish(acme)).version.digest
    before = await entries(acme)
    arms = [catalog_pb2.Arm(version=digest, weight=1)]
    await acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms, dry_run=True))
    await refused(acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms, expected_generation=9)))
    assert await entries(acme) == before


async def test_a_tenant_reads_its_own_entries_and_an_operator_anybodys(world: World) -> None:
    await world.base()
    acme, rival = await world.tenant("acme"), await world.tenant("rival")
    await world.publish(acme)
    assert await refused(entries(rival, tenant="acme")) == (grpc.StatusCode.NOT_FOUND, "there is no such tenant")
    assert {entry.object for entry in await entries(rival)} == {"tenants", "keys"}
    assert await entries(world.operator, tenant="acme") == await entries(acme)
    assert "bases" in {entry.object for entry in await entries(world.operator)}
    pages = await acme.tenants.ListAudit(tenants_pb2.ListAuditRequest(page_size=2))
    rest = await acme.tenants.ListAudit(tenants_pb2.ListAuditRequest(page_token=pages.next_page_token))
    assert [*pages.entries, *rest.entries] == await entries(acme)


async def test_nobody_changes_or_removes_an_entry(world: World, database: TestDatabase) -> None:
    await world.tenant("acme")
    for statement in (
        models.audit.delete(),
        models.audit.update().values(actor="x"),
        models.audit.insert().values(tenant="acme"),
    ):
        with pytest.raises(ProgrammingError, match="permission denied"):
            async with world.plane.database.transaction(Scope.of_tenant("acme")) as connection:
                await connection.execute(statement)
    with database.connect() as owner, pytest.raises(psycopg.errors.RaiseException, match="only added to"):
        owner.execute("DELETE FROM audit")
    with database.connect() as owner, pytest.raises(psycopg.errors.RaiseException, match="only added to"):
        owner.execute("TRUNCATE audit")


@pytest.mark.parametrize("role", [APP_ROLE, AUTH_ROLE, RELAY_ROLE])
async def test_no_role_of_the_service_takes_the_log_away_or_writes_in_it(world: World, role: str) -> None:
    await world.tenant("acme")
    before = await entries(world.operator, tenant="acme")
    engine = create_async_engine(world.settings.role_url(role))
    for scope in ("tenant", "organization", "operator", "node", "caller", ""):
        for statement in (
            "UPDATE audit SET actor = 'x'",
            "DELETE FROM audit",
            "TRUNCATE audit",
            "INSERT INTO audit (tenant, actor, action, object) VALUES ('acme', 'x', 'UPDATE', 'tenants')",
            "ALTER TABLE audit DISABLE TRIGGER stays",
            "ALTER TABLE tenants DISABLE TRIGGER audit",
            "DROP TRIGGER stays_whole ON audit",
            "SET session_replication_role = replica",
        ):
            with pytest.raises(ProgrammingError, match=r"permission denied|must be owner"):
                async with engine.begin() as connection:
                    await set_scope(connection, Scope(scope, "acme"))
                    await connection.execute(text(statement))
    await engine.dispose()
    assert await entries(world.operator, tenant="acme") == before


# Answers and hints of writes that are told themselves, and what data planes and the service keep for their own work.
_NOT_TOLD = {
    "alembic_version",
    "audit",
    "blob_leases",
    "canary_steps",  # of canaries, which are told
    "change_floor",
    "changes",
    "leaders",
    "node_versions",
    "organization_requests",
    "outbox",
    "outcome_batches",
    "quota_leases",
    "reports",
    "requests",
    "uploads",
    "usage",
    "usage_journals",
}


async def test_every_table_that_callers_write_to_is_told_of(world: World, database: TestDatabase) -> None:
    query = """
        SELECT c.relname FROM pg_class c WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace
            AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = 'audit')
    """
    with database.connect() as owner:
        assert {name for (name,) in owner.execute(query).fetchall()} == _NOT_TOLD


async def age(database: TestDatabase, tenant: str, days: int) -> None:
    """Has a tenant's entries so far be as old as that."""
    with database.connect() as owner:
        owner.execute("SET session_replication_role = replica")
        owner.execute("UPDATE audit SET create_time = now() - make_interval(days => %s) WHERE tenant = %s", [days, tenant])


@pytest.mark.parametrize(("kept_days", "left"), [(0, ["old", "young"]), (60, ["young"]), (30, ["young"])])
async def test_entries_are_kept_for_as_long_as_the_operator_says(
    world: World, database: TestDatabase, kept_days: int, left: list[str]
) -> None:
    for name, days in (("old", 61), ("young", 29)):
        await world.tenant(name)
        await age(database, name, days)
    world.plane.relay._audit_days = kept_days

    await world.plane.relay.trim()

    assert [name for name in ("old", "young") if await entries(world.operator, tenant=name)] == left


async def test_no_entry_goes_before_its_thirty_days_are_over(world: World, database: TestDatabase) -> None:
    await world.tenant("acme")
    await age(database, "acme", 29)
    before = await entries(world.operator, tenant="acme")
    async with world.plane.database.relay.begin() as connection:
        assert (await connection.execute(text("SELECT audit_trim(interval '0')"))).scalar_one() == 0
    with pytest.raises(ProgrammingError, match="permission denied"):
        async with world.plane.database.transaction(Scope.of_tenant("acme")) as connection:
            await connection.execute(text("SELECT audit_trim(interval '0')"))
    assert await entries(world.operator, tenant="acme") == before
