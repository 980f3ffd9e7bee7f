"""The schema as the migrations make it: equal to the models, and walled for every table that has rows of tenants."""

from __future__ import annotations

import asyncio

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text
from sqlalchemy.dialects.postgresql.base import ischema_names

from controlplane import models
from controlplane.db import Database
from controlplane.pipeline import Statement
from controlplane.schema import make_first_operator, migrate
from controlplane.settings import APP_ROLE, AUTH_ROLE, RELAY_ROLE, Settings
from controlplane.vault import new_secret, open_vault
from tests.fixtures.services import TestDatabase
from veneer.errors import AlreadyExistsError

GLOBAL_TABLES = {"bases", "alembic_version"}
"""Tables without a row of any tenant or credential; every other one must force row-level security."""
UNFORCED = """
    SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'public' AND c.relkind IN ('r', 'p') AND NOT (c.relrowsecurity AND c.relforcerowsecurity)
"""


def unforced(database: TestDatabase) -> set[str]:
    with database.connect() as connection:
        return {row[0] for row in connection.execute(UNFORCED)}


def test_the_migrations_make_the_tables_of_the_models(database: TestDatabase) -> None:
    ischema_names["xid8"] = models.Xid8  # or reflection warns that it does not know the type
    engine = create_engine(database.owner_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": False})
        assert compare_metadata(context, models.metadata) == []
    engine.dispose()


def test_every_table_but_the_global_ones_forces_row_level_security(database: TestDatabase) -> None:
    assert unforced(database) == GLOBAL_TABLES


def test_a_new_table_without_forced_row_level_security_is_noticed(fresh_database: TestDatabase) -> None:
    with fresh_database.connect() as connection:
        connection.execute("CREATE TABLE quotas (tenant text)")
        connection.execute("CREATE TABLE limits (tenant text)")
        connection.execute("ALTER TABLE limits ENABLE ROW LEVEL SECURITY")

    assert unforced(fresh_database) - GLOBAL_TABLES == {"quotas", "limits"}


def test_every_forced_table_with_a_right_of_a_service_role_has_a_policy_for_it(database: TestDatabase) -> None:
    query = """
        SELECT DISTINCT g.table_name, g.grantee FROM information_schema.column_privileges g
        WHERE g.grantee LIKE 'veneer_%' AND g.table_name NOT IN ('bases') AND NOT EXISTS (
            SELECT FROM pg_policies p WHERE p.tablename = g.table_name AND g.grantee = ANY (p.roles::text[]))
    """
    with database.connect() as connection:
        assert connection.execute(query).fetchall() == []


@pytest.mark.parametrize("role", [APP_ROLE, AUTH_ROLE, RELAY_ROLE])
def test_no_service_role_can_pass_the_wall(database: TestDatabase, role: str) -> None:
    query = "SELECT rolsuper, rolbypassrls, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname = %s"
    owned = "SELECT count(*) FROM pg_class WHERE pg_get_userbyid(relowner) = %s"
    members = "SELECT count(*) FROM pg_auth_members WHERE member = %s::regrole"
    with database.connect() as connection:
        assert connection.execute(query, [role]).fetchone() == (False, False, False, False)
        assert connection.execute(owned, [role]).fetchone() == (0,)
        assert connection.execute(members, [role]).fetchone() == (0,)


async def test_the_service_connects_as_its_roles(settings: Settings) -> None:
    database = Database(settings)
    users = []
    for engine in (database.app, database.relay):
        async with engine.connect() as connection:
            users.append((await connection.execute(text("SELECT session_user"))).scalar_one())
    asked = Statement("user", "SELECT session_user::text")
    for role in (APP_ROLE, AUTH_ROLE, RELAY_ROLE):
        [[(user,)]] = await database.lines(role, asked).ask((asked, []))
        users.append(user)
    await database.close()

    assert users == [APP_ROLE, RELAY_ROLE, APP_ROLE, AUTH_ROLE, RELAY_ROLE]


async def test_a_migrated_database_can_be_migrated_again_and_at_the_same_time(settings: Settings) -> None:
    await asyncio.gather(*(asyncio.to_thread(migrate, settings) for _ in range(3)))


def test_migrating_sets_the_passwords_of_the_roles(fresh_database: TestDatabase) -> None:
    with fresh_database.connect() as connection:
        before = connection.execute("SELECT rolpassword FROM pg_authid WHERE rolname = %s", [RELAY_ROLE]).fetchone()
        migrate(Settings(owner_url=fresh_database.owner_url, relay_password="it's a \\ password"))
        after = connection.execute("SELECT rolpassword FROM pg_authid WHERE rolname = %s", [RELAY_ROLE]).fetchone()
        connection.execute("ALTER ROLE veneer_relay PASSWORD NULL")

    assert before == (None,)
    assert after is not None
    assert after[0].startswith("SCRAM-SHA-256$")


def test_the_first_operator_is_made_once(settings: Settings) -> None:
    vault = open_vault(settings)
    assert make_first_operator(settings, vault).startswith("vnr_")
    with pytest.raises(AlreadyExistsError, match="cannot be shown again"):
        make_first_operator(settings, vault)


def test_the_first_operator_is_made_again_with_the_same_key_and_no_other(settings: Settings) -> None:
    vault, key = open_vault(settings), new_secret()
    assert make_first_operator(settings, vault, secret=key) == key
    assert make_first_operator(settings, vault, secret=key) == key
    with pytest.raises(AlreadyExistsError, match="made before"):
        make_first_operator(settings, vault, secret=new_secret())
