"""A write that is only tried: answered as if it had been done, and nothing of the database changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from psycopg import sql

from tests.fixtures.controlplane import Client, World
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import bases_pb2, canaries_pb2, catalog_pb2, nodes_pb2, organizations_pb2, signatures_pb2, tenants_pb2

_STEPS = [canaries_pb2.CanaryStep(weight_percent=10)]
_APIS = (bases_pb2, catalog_pb2, nodes_pb2, organizations_pb2, signatures_pb2, tenants_pb2)

_Make = Callable[[str, str, str], Any]
"""Makes a request of three versions: which `stable` served before, which it serves, and which no alias serves."""

WRITES: dict[str, _Make] = {
    "SetAlias": lambda before, served, spare: catalog_pb2.SetAliasRequest(arms=[_arm(served), _arm(spare)]),
    "Rollback": lambda before, served, spare: catalog_pb2.RollbackRequest(version=before),
    "Promote": lambda before, served, spare: catalog_pb2.PromoteRequest(version=served),
    "StartCanary": lambda before, served, spare: canaries_pb2.StartCanaryRequest(version=spare, steps=_STEPS),
    "StopCanary": lambda before, served, spare: canaries_pb2.StopCanaryRequest(alias="tried"),
    "RetireVersion": lambda before, served, spare: catalog_pb2.RetireVersionRequest(version=spare),
    "DeleteVersion": lambda before, served, spare: catalog_pb2.DeleteVersionRequest(version=served, force=True),
    "DeleteAdapter": lambda before, served, spare: catalog_pb2.DeleteAdapterRequest(force=True),
}


def _arm(version: str) -> catalog_pb2.Arm:
    return catalog_pb2.Arm(version=version, weight=1)


def _rows(database: TestDatabase) -> dict[str, list[str]]:
    """Every row of every table, as text."""
    with database.connect() as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        query = sql.SQL("SELECT to_jsonb(t)::text FROM {} t ORDER BY 1")
        of = {table: connection.execute(query.format(sql.Identifier(table))).fetchall() for (table,) in tables}
    return {table: [text for (text,) in rows] for table, rows in of.items()}


def _without_times(value: Any) -> Any:
    if isinstance(value, Message):
        return _without_times(MessageToDict(value))
    if isinstance(value, dict):
        return {name: _without_times(one) for name, one in value.items() if not name.endswith("Time")}
    return [_without_times(one) for one in value] if isinstance(value, list) else value


def test_every_write_that_can_be_tried_is_tried_below() -> None:
    services = [service for api in _APIS for service in api.DESCRIPTOR.services_by_name.values()]
    offered = {method.name for service in services for method in service.methods if "dry_run" in method.input_type.fields_by_name}
    assert offered == set(WRITES)


@pytest.mark.parametrize("method", WRITES)
async def test_a_write_that_is_tried_changes_no_row_and_answers_as_it_does_when_it_is_done(
    world: World, database: TestDatabase, method: str
) -> None:
    await world.base()
    acme: Client = await world.tenant("acme")
    _first, before, served, spare = [
        (await world.publish(acme, seed=seed, alias=alias)).version.digest
        for seed, alias in enumerate(("tried", "stable", "stable", ""))
    ]
    canary = canaries_pb2.StartCanaryRequest(adapter="style", alias="tried", version=served, steps=_STEPS)
    await acme.catalog.StartCanary(canary)

    request = WRITES[method](before, served, spare)
    request.adapter, request.request_id, request.dry_run = "style", "once", True
    rows = _rows(database)
    answer = await getattr(acme.catalog, method)(request)
    assert _rows(database) == rows
    request.dry_run = False
    assert _without_times(await getattr(acme.catalog, method)(request)) == _without_times(answer)
    after = _rows(database)
    assert all(len(after[table]) > len(rows[table]) for table in ("audit", "changes", "requests"))
