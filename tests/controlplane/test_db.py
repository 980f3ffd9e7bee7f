"""Scopes and the database's absence: the second wall, pooled connections, and errors of the driver as ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import ProgrammingError

from controlplane import models
from controlplane.db import NODE, OPERATOR, PUBLIC, Database, Scope
from controlplane.pipeline import Statement
from controlplane.settings import AUTH_ROLE, Settings
from tests.fixtures.controlplane import World, settings_for
from tests.fixtures.services import TestDatabase
from veneer.errors import AlreadyExistsError, InvalidArgumentError, UnavailableError
from veneer.local.postgres import Postgres

TENANT_TABLES = [
    table for table in models.metadata.sorted_tables if "tenant" in table.columns and table.name not in ("changes", "outbox")
]


@pytest.fixture
async def narrow(world: World, database: TestDatabase, tmp_path: Path) -> AsyncIterator[Database]:
    """A database with one connection for the application, and rows of two tenants in all tables."""
    await world.base()
    acme, rival = await world.tenant("acme"), await world.tenant("rival")
    await world.node()
    for seed, client in enumerate((acme, rival)):
        await world.publish(client, "style", seed=seed)
    one = Database(settings_for(database, tmp_path / "none", tmp_path, pool_size=1, pool_overflow=0))
    yield one
    await one.close()


async def count(database: Database, scope: Scope, table: str) -> int:
    async with database.transaction(scope) as connection:
        return int((await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one())


async def test_without_a_scope_no_row_of_any_tenant_is_seen(narrow: Database) -> None:
    for table in TENANT_TABLES:
        async with narrow.app.begin() as connection:
            assert (await connection.execute(select(table.c.tenant))).all() == [], table.name


async def test_the_scope_of_a_transaction_does_not_stay_on_its_connection(narrow: Database) -> None:
    assert await count(narrow, Scope.of_tenant("acme"), "versions") == 1
    async with narrow.app.begin() as connection:
        assert (await connection.execute(select(models.versions.c.digest))).all() == []


async def test_a_forgotten_tenant_filter_shows_own_rows_only_on_one_shared_connection(narrow: Database) -> None:
    async def forgetful(tenant: str) -> set[str]:
        async with narrow.transaction(Scope.of_tenant(tenant)) as connection:
            return set((await connection.execute(select(models.versions.c.tenant))).scalars())

    seen = await asyncio.gather(*(forgetful(tenant) for tenant in ("acme", "rival", "stranger") * 10))

    assert seen == [{"acme"}, {"rival"}, set()] * 10


async def test_a_tenant_cannot_write_rows_of_another(narrow: Database) -> None:
    rows = {
        "adapters": {"tenant": "rival", "name": "planted", "num_versions": 0},
        "grants": {"tenant": "rival", "adapter": "style", "grantee": "acme"},
    }
    for name, row in rows.items():
        with pytest.raises(ProgrammingError, match="row-level security"):
            async with narrow.transaction(Scope.of_tenant("acme")) as connection:
                await connection.execute(models.metadata.tables[name].insert().values(row))
    async with narrow.transaction(Scope.of_tenant("acme")) as connection:
        changed = await connection.execute(models.adapters.update().values(num_versions=99))
    assert changed.rowcount == 1


async def test_operators_see_no_adapter_and_nodes_change_none(narrow: Database) -> None:
    for table in ("adapters", "versions", "aliases", "arms", "grants", "keys"):
        assert await count(narrow, OPERATOR, table) == 0, table
    assert await count(narrow, OPERATOR, "tenants") == 2
    assert await count(narrow, NODE, "versions") == 2
    for table in ("adapters", "aliases", "arms", "grants", "keys", "tenants"):
        assert await count(narrow, NODE, table) == 0, table
    async with narrow.transaction(NODE) as connection:
        assert (await connection.execute(models.versions.update().values(state="QUARANTINED"))).rowcount == 0


async def test_the_application_cannot_read_what_credentials_are_compared_with(narrow: Database) -> None:
    for column in (models.keys.c.hash, models.operators.c.hash):
        with pytest.raises(ProgrammingError, match="permission denied"):
            async with narrow.transaction(Scope.of_tenant("acme")) as connection:
                await connection.execute(select(column))


@pytest.mark.parametrize("column", ["report", "label", "labels", "training_run", "data_digest", "weights_digest", "number"])
async def test_nobody_can_change_what_a_version_is_or_where_it_comes_from(narrow: Database, column: str) -> None:
    for scope in (Scope.of_tenant("acme"), NODE, OPERATOR):
        with pytest.raises(ProgrammingError, match="permission denied"):
            async with narrow.transaction(scope) as connection:
                await connection.execute(text(f"UPDATE versions SET {column} = {column}"))


@pytest.mark.parametrize(
    "statement", ["SELECT * FROM keys", "SELECT * FROM tenants", "SELECT * FROM versions", "SELECT * FROM outbox"]
)
async def test_the_authentication_role_can_call_its_function_only(narrow: Database, statement: str) -> None:
    asked = Statement("asked", statement)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
        await narrow.lines(AUTH_ROLE, asked).ask((asked, []))


@pytest.mark.parametrize(
    "statement", ["SELECT * FROM identify('x')", "SELECT * FROM versions", "SELECT fingerprint FROM requests"]
)
async def test_the_relay_role_reads_no_catalogue(narrow: Database, statement: str) -> None:
    with pytest.raises(ProgrammingError, match="permission denied"):
        async with narrow.relay.connect() as connection:
            await connection.execute(text(statement))


async def test_a_violated_constraint_becomes_the_error_named_for_it(narrow: Database) -> None:
    taken = AlreadyExistsError("taken")
    row = {"name": "acme", "fallback_allowed": True, "weight": 1}
    with pytest.raises(AlreadyExistsError, match="taken"):
        async with narrow.transaction(OPERATOR, refusals={"pk_tenants": taken}) as connection:
            await connection.execute(models.tenants.insert().values(row))
    with pytest.raises(AlreadyExistsError, match="a tenant of this name"):
        async with narrow.transaction(OPERATOR) as connection:
            await connection.execute(models.tenants.insert().values(row))


async def test_a_text_with_a_nul_character_is_refused_as_bad_input(narrow: Database) -> None:
    with pytest.raises(InvalidArgumentError, match="NUL"):
        async with narrow.transaction(Scope.of_tenant("acme")) as connection:
            await connection.execute(select(models.adapters).where(models.adapters.c.name == "a\x00b"))


async def test_calls_that_are_cancelled_leak_no_connection(narrow: Database) -> None:
    started = asyncio.Event()

    async def slow() -> None:
        async with narrow.transaction(PUBLIC) as connection:
            started.set()
            await connection.execute(text("SELECT pg_sleep(1)"))

    for _ in range(10):
        started.clear()
        task = asyncio.create_task(slow())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert narrow.app.sync_engine.pool.checkedout() == 0
    async with asyncio.timeout(60):
        assert await count(narrow, PUBLIC, "bases") == 1


async def test_a_pool_without_a_free_connection_answers_unavailable(database: TestDatabase, tmp_path: Path) -> None:
    limits = {"pool_size": 1, "pool_overflow": 0, "pool_timeout_s": 0.2}
    impatient = Database(settings_for(database, tmp_path / "none", tmp_path, **limits))
    async with impatient.transaction(PUBLIC):
        with pytest.raises(UnavailableError, match="away"):
            await count(impatient, PUBLIC, "bases")
    await impatient.close()


async def test_connections_that_the_server_ended_are_replaced(narrow: Database, database: TestDatabase) -> None:
    assert await count(narrow, PUBLIC, "bases") == 1
    with database.connect() as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename LIKE 'veneer_%'")

    assert await count(narrow, PUBLIC, "bases") == 1


async def test_a_primary_that_turned_read_only_is_left(narrow: Database) -> None:
    async with narrow.app.connect() as connection:
        first = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
    with pytest.raises(UnavailableError):
        async with narrow.transaction(OPERATOR) as connection:
            await connection.execute(text("SET TRANSACTION READ ONLY"))
            await connection.execute(models.tenants.insert().values(name="new", fallback_allowed=True, weight=1))
    async with narrow.app.connect() as connection:
        assert (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one() != first


async def test_the_service_answers_unavailable_without_a_database_and_recovers_by_itself(
    postgres: Postgres, narrow: Database
) -> None:
    postgres.stop()
    try:
        async with asyncio.timeout(60):
            with pytest.raises(UnavailableError, match="away"):
                await count(narrow, PUBLIC, "bases")
    finally:
        postgres.start()

    assert await count(narrow, PUBLIC, "bases") == 1


def test_a_scope_states_its_tenant(settings: Settings) -> None:
    assert Scope.of_tenant("acme") == Scope("tenant", "acme")
    assert Scope.of_caller("acme") == Scope("caller", "acme")
