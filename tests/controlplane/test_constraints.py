"""Every constraint of the schema has an error of ours, and no name of the schema reaches a caller."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest
from sqlalchemy import text

from controlplane.constraints import CONSTRAINTS, NEUTRAL
from controlplane.db import OPERATOR, Database, Scope
from controlplane.settings import Settings
from tests.fixtures.controlplane import Client, World, refused
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import tenants_pb2
from veneer.errors import InternalError, InvalidArgumentError, VeneerError

# Names of columns that must not be null have no constraint of ours: they are told by their code; see the test on one.
NAMES = """
    SELECT c.conname FROM pg_constraint c JOIN pg_class t ON t.oid = c.conrelid
    WHERE t.relnamespace = 'public'::regnamespace AND t.relname <> 'alembic_version' AND c.contype <> 'n'
    UNION SELECT i.relname FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class t ON t.oid = x.indrelid
    WHERE t.relnamespace = 'public'::regnamespace AND t.relname <> 'alembic_version' AND x.indisunique
    UNION SELECT c.conname FROM pg_constraint c JOIN pg_type d ON d.oid = c.contypid WHERE d.typnamespace = 'public'::regnamespace
"""


def names_of(database: TestDatabase) -> set[str]:
    with database.connect() as connection:
        return {name for (name,) in connection.execute(NAMES)}


def test_every_constraint_and_unique_index_of_the_schema_has_an_error_and_no_other_has_one(database: TestDatabase) -> None:
    names = names_of(database)
    assert len(names) > 80
    assert set(CONSTRAINTS) == names


def test_a_new_constraint_or_unique_index_without_an_error_is_noticed(fresh_database: TestDatabase) -> None:
    with fresh_database.connect() as connection:
        connection.execute("ALTER TABLE tenants ADD CONSTRAINT ck_tenants_new CHECK (weight < 2000)")
        connection.execute("CREATE UNIQUE INDEX ix_keys_new ON keys (tenant, id)")
        connection.execute("CREATE DOMAIN positive AS integer CONSTRAINT ck_positive CHECK (VALUE > 0)")
    assert names_of(fresh_database) - set(CONSTRAINTS) == {"ck_tenants_new", "ix_keys_new", "ck_positive"}


def test_no_error_of_a_constraint_names_the_schema_and_every_refused_input_names_its_field() -> None:
    for error in CONSTRAINTS.values():
        assert not any(name in error.message for name in ("ck_", "pk_", "fk_", "uq_", "ix_", "constraint", "veneer_"))
        assert bool(error.violations) == isinstance(error, InvalidArgumentError)


@pytest.fixture
async def database_of(settings: Settings) -> Any:
    made = Database(settings)
    yield made
    await made.close()


async def violate(database: Database, statement: str, scope: Scope = OPERATOR) -> VeneerError:
    with pytest.raises(VeneerError) as caught:
        async with database.transaction(scope) as connection:
            await connection.execute(text(statement))
    return caught.value


async def test_a_constraint_that_no_table_knows_is_internal_with_its_name_in_the_log_alone(
    database_of: Database, fresh_database: TestDatabase, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with fresh_database.connect() as connection:
        connection.execute("ALTER TABLE tenants ADD CONSTRAINT ck_tenants_later CHECK (weight <> 7)")
    later = Database(settings.model_copy(update={"database_url": fresh_database.url}))
    with caplog.at_level(logging.ERROR, logger="controlplane.db"):
        error = await violate(later, "INSERT INTO tenants (name, fallback_allowed, weight) VALUES ('acme', true, 7)")
    await later.close()
    assert (type(error), error.message, error.violations) == (InternalError, NEUTRAL.message, ())
    (logged,) = [record for record in caplog.records if record.name == "controlplane.db"]
    assert (logged.__dict__["constraint"], logged.__dict__["table"]) == ("ck_tenants_later", "tenants")


async def test_a_column_without_a_value_is_internal_with_its_name_in_the_log_alone(
    database_of: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="controlplane.db"):
        error = await violate(database_of, "INSERT INTO tenants (name, fallback_allowed, weight) VALUES ('acme', true, NULL)")
    assert (type(error), error.message) == (InternalError, NEUTRAL.message)
    assert [record.__dict__["column"] for record in caplog.records if record.name == "controlplane.db"] == ["weight"]


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 99999999999::integer",
        "SELECT 'x'::uuid",
        "SELECT 'infinity-and-more'::timestamptz",
        "SELECT '{'::jsonb",
        "SELECT 'abcdef'::varchar(3)::integer",
        "SELECT 1 / 0",
        # A name that no index takes.
        """INSERT INTO bases (digest, name, family, num_layers, modules, vocab_size, max_context, known_names)
           SELECT repeat('a', 64), string_agg(md5(n::text), ''), 'f', 1, '[]', 1, 1, '{}' FROM generate_series(1, 1000) n""",
    ],
)
async def test_what_cannot_be_stored_is_bad_input_and_its_text_is_ours(database_of: Database, statement: str) -> None:
    error = await violate(database_of, statement)
    assert isinstance(error, InvalidArgumentError)
    assert not {"tenants", "integer", "uuid", "jsonb", "index"} & set(error.message.replace(";", " ").split())


async def test_errors_of_a_constraint_that_are_raised_at_once_are_not_one_object(database_of: Database) -> None:
    statement = "INSERT INTO tenants (name, fallback_allowed, weight) VALUES ('-', true, 1)"
    one, other = await asyncio.gather(violate(database_of, statement), violate(database_of, statement))
    assert one is not other
    assert one.violations == other.violations != ()
    assert CONSTRAINTS["ck_tenants_name"].__traceback__ is None


@pytest.mark.parametrize("grantee", ["Friend", "-friend", "friend-", "a b", "é", "a" * 64, "friend\n", "friend\0", "../x", ""])
async def test_a_grantee_that_no_tenant_can_be_named_is_refused_by_field(acme: Client, grantee: str) -> None:
    call = acme.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter="style", grantee=grantee))
    code, said = await refused(call)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "grantee" in said
    assert "ck_" not in said


@pytest.fixture
async def acme(world: World) -> Client:
    await world.base()
    client = await world.tenant("acme")
    await world.publish(client)
    return client
