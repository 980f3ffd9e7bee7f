"""The schema of the database: migrations, passwords of the service's roles, the first operator."""

from __future__ import annotations

import uuid
from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config
from psycopg import sql
from sqlalchemy import Connection, create_engine, select
from sqlalchemy.dialects.postgresql import insert

from controlplane import locks, models
from controlplane.locks import Lock
from controlplane.settings import APP_ROLE, AUTH_ROLE, RELAY_ROLE, Settings
from controlplane.vault import Vault, new_secret, secret_digest
from veneer.errors import AlreadyExistsError

_HERE = Path(__file__).resolve().parent
_MIGRATIONS = next(folder for folder in (_HERE / "migrations", _HERE.parent / "migrations") if folder.is_dir())
"""Beside this module in an installed wheel, at the root in a checkout."""
_FIRST = "bootstrap"


def migrate(settings: Settings, *, revision: str = "head") -> None:
    """Brings the schema to a revision and sets the roles' passwords, as the owner of the tables. Blocks."""
    engine = create_engine(settings.owner())
    try:
        with engine.connect() as connection:
            config = Config()
            config.set_main_option("script_location", str(_MIGRATIONS))
            config.attributes["connection"] = connection
            connection.execute(locks.TAKE, locks.parameters(Lock.MIGRATION))  # another may migrate at the same time
            connection.commit()
            command.upgrade(config, revision)
            connection.commit()
            _set_passwords(connection, settings)
            connection.commit()
    finally:
        engine.dispose()


def make_first_operator(settings: Settings, vault: Vault, *, secret: str | None = None) -> str:
    """Makes the first operator and returns its key. Blocks.

    Args:
        settings: Say who the owner of the tables is.
        vault: Derives what is stored.
        secret: The key, where the caller keeps it: made again with the same key, nothing changes. None draws one.

    Raises:
        AlreadyExistsError: It was made before, with another key; that cannot be shown again.
    """
    key = new_secret() if secret is None else secret
    row = {"id": uuid.uuid4(), "origin": _FIRST, "hash": vault.key_hash(secret_digest(key))}
    columns = models.operators.c
    engine = create_engine(settings.owner())
    try:
        with engine.begin() as connection:
            connection.execute(insert(models.operators).values(row).on_conflict_do_nothing(index_elements=["origin"]))
            stored = connection.execute(select(columns.hash).where(columns.origin == _FIRST)).scalar_one()
    finally:
        engine.dispose()
    if stored != row["hash"]:
        raise AlreadyExistsError("the first operator was made before; its key was shown then and cannot be shown again")
    return key


def _set_passwords(connection: Connection, settings: Settings) -> None:
    passwords = {APP_ROLE: settings.app_password, AUTH_ROLE: settings.auth_password, RELAY_ROLE: settings.relay_password}
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    for role, password in passwords.items():
        if password is not None:
            statement = sql.SQL("ALTER ROLE {} PASSWORD {}").format(
                sql.Identifier(role), sql.Literal(password.get_secret_value())
            )
            connection.exec_driver_sql(statement.as_string(driver))
