"""The audit log: every write with who did it and what changed, and nobody takes an entry back."""

from __future__ import annotations

import json
from typing import Any

import grpc
import psycopg
import pytest
from sqlalchemy.exc import ProgrammingError

from controlplane import models
from controlplane.db import Scope
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
