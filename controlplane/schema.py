"""The schema of the database: migrations, passwords of the service's roles, the first operator."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg import sql
from sqlalchemy import Connection, create_engine, exc, select
from sqlalchemy.dialects.postgresql import insert

from controlplane import locks, models
from controlplane.locks import Lock
from controlplane.settings import APP_ROLE, AUTH_ROLE, RELAY_ROLE, Settings
from controlplane.vault import Vault, new_secret, secret_digest
from veneer.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, UnavailableError, Violation

_HERE = Path(__file__).resolve().parent
_MIGRATIONS = next(folder for folder in (_HERE / "migrations", _HERE.parent / "migrations") if folder.is_dir())
"""Beside this module in an installed wheel, at the root in a checkout."""
_FIRST = "bootstrap"


_HEAD = "head"
_POSTGRES_PORT = 5432


@dataclass(frozen=True, slots=True)
class Migration:
    """What a migration did.

    Attributes:
        before: Revision that the schema was at; empty before the first.
        after: Revision that it is at.
    """

    before: str
    after: str


def migrate(settings: Settings, *, revision: str = _HEAD) -> Migration:
    """Brings the schema to a revision, up or down, and sets the roles' passwords, as the owner of the tables. Blocks.

    Args:
        settings: Say who the owner of the tables is.
        revision: Where to; the newest by default. An older one than the schema's takes away what came since, or refuses where
            something would be lost that cannot be.

    Raises:
        SettingError: The owner's address is not set.
        InvalidArgumentError: This release has no such revision.
        UnavailableError: The database cannot be reached.
        FailedPreconditionError: The schema is of a newer release, or the database refuses.
    """
    with _owner(settings) as connection:
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        config.attributes["connection"] = connection
        known = [one.revision for one in ScriptDirectory.from_config(config).walk_revisions()]  # newest first
        if revision not in (_HEAD, *known):
            raise InvalidArgumentError.of([Violation("--to", f"{revision!r} is no revision; there are {', '.join(known[::-1])}")])
        connection.execute(locks.TAKE, locks.parameters(Lock.MIGRATION))  # another may migrate at the same time
        connection.commit()
        before = _revision(connection)
        if before and before not in known:
            newer = f"the schema is at revision {before}, which this release does not know"
            raise FailedPreconditionError(f"{newer}: migrate with the release that made it")
        target = known[0] if revision == _HEAD else revision
        if before and known.index(target) > known.index(before):
            command.downgrade(config, target)
        else:
            command.upgrade(config, target)
        connection.commit()
        _set_passwords(connection, settings)
        connection.commit()
        return Migration(before, _revision(connection))


def _revision(connection: Connection) -> str:
    """The revision that the schema is at; empty before the first."""
    found = MigrationContext.configure(connection).get_current_revision() or ""
    connection.commit()
    return found


@contextmanager
def _owner(settings: Settings) -> Iterator[Connection]:
    """A connection as the owner of the tables.

    Raises:
        UnavailableError: The database cannot be reached.
        FailedPreconditionError: It refuses.
    """
    url = settings.owner()
    engine = create_engine(url, connect_args={"connect_timeout": settings.connect_timeout_s})
    try:
        with engine.connect() as connection:
            yield connection
    except exc.OperationalError as error:
        where = f"{url.database} at {url.host or 'this machine'}:{url.port or _POSTGRES_PORT}"
        raise UnavailableError(f"the database {where} cannot be reached: {_first_line(error)}") from error
    except exc.DBAPIError as error:
        raise FailedPreconditionError(f"the database refuses: {_first_line(error)}") from error
    finally:
        engine.dispose()


def _first_line(error: exc.DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0]


def make_first_operator(settings: Settings, vault: Vault, *, secret: str | None = None) -> str:
    """Makes the first operator and returns its key. Blocks.

    Args:
        settings: Say who the owner of the tables is.
        vault: Derives what is stored.
        secret: The key, where the caller keeps it: made again with the same key, nothing changes. None draws one.

    Raises:
        AlreadyExistsError: It was made before, with another key; that cannot be shown again.
        UnavailableError: The database cannot be reached.
        FailedPreconditionError: The database refuses, e.g. since `migrate` was not run.
    """
    key = new_secret() if secret is None else secret
    row = {"id": uuid.uuid4(), "origin": _FIRST, "hash": vault.key_hash(secret_digest(key))}
    columns = models.operators.c
    with _owner(settings) as connection:
        connection.execute(insert(models.operators).values(row).on_conflict_do_nothing(index_elements=["origin"]))
        stored = connection.execute(select(columns.hash).where(columns.origin == _FIRST)).scalar_one()
        connection.commit()
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
