"""Connections and transactions: three roles, the row-level-security scope of each transaction, errors of the database as ours."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import psycopg
from psycopg import errors as pg_errors
from sqlalchemy import event, exc, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from controlplane.constraints import CONSTRAINTS, NEUTRAL
from controlplane.lines import Lines
from controlplane.pipeline import Pipeline, Statement
from controlplane.settings import APP_ROLE, RELAY_ROLE, Settings
from veneer.access import current_actor
from veneer.errors import AbortedError, InvalidArgumentError, UnavailableError, VeneerError

_LOG = logging.getLogger(__name__)

_READ_ONLY = "25006"
_ADMIN_SHUTDOWN = "57P01"
_POOL_RECYCLE_S = 300
# A server that vanished without a word is found within seconds; by default TCP asks after two hours.
_AWAY = (
    exc.OperationalError,
    exc.InterfaceError,
    exc.TimeoutError,
    asyncio.TimeoutError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
)
_LIVENESS = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}
_SET_SCOPE = text("""
    SELECT set_config('app.tenant', :tenant, true), set_config('app.scope', :scope, true), set_config('app.actor', :actor, true)
""")


@dataclass(frozen=True, slots=True)
class Scope:
    """On whose behalf a transaction runs; row-level security shows it those rows and no others.

    Attributes:
        kind: Name that the policies know.
        tenant: The tenant, where there is one; for the kind `organization` that.
    """

    kind: str
    tenant: str = ""

    @classmethod
    def of_tenant(cls, tenant: str) -> Scope:
        """A tenant working on what it owns."""
        return cls("tenant", tenant)

    @classmethod
    def of_caller(cls, tenant: str) -> Scope:
        """A tenant about to use adapters: its own, and those granted to it. Reads only."""
        return cls("caller", tenant)

    @classmethod
    def of_organization(cls, organization: str) -> Scope:
        """An organisation: itself, its tenants, their keys, usage and log; no adapter, no version."""
        return cls("organization", organization)

    @classmethod
    def of_node_for(cls, tenant: str) -> Scope:
        """A data plane working on what it does for one tenant."""
        return cls("node", tenant)


OPERATOR: Final = Scope("operator")
"""An operator: tenants, nodes and enrolments; no adapter, no version, no key."""
NODE: Final = Scope("node")
"""A data plane: versions of all tenants, read-only, nodes and enrolments."""
PUBLIC: Final = Scope("public")
"""Nobody in particular: what all may see, the bases."""


class Database:
    """The service's connections. Owned by the process; closed once at its end.

    Attributes:
        app: Engine of `veneer_app`, under row-level security.
        auth: Engine of `veneer_auth`, which may call `identify` and nothing else.
        relay: Engine of `veneer_relay`, which reads the outbox and the change feed.
        pool_size: Connections of a role that stay open. What is asked often keeps to so many: to make a further one takes longer
            than to wait.
        answer_s: How long an answer on a held connection may take: longer than any that a server that lives gives.
    """

    def __init__(self, settings: Settings) -> None:
        self.pool_size = settings.pool_size
        self.answer_s = settings.pool_timeout_s + settings.statement_timeout_s
        self._settings = settings
        self._lines: list[Lines] = []
        self.app = _engine(settings, APP_ROLE, overflow=settings.pool_overflow)
        self.relay = _engine(settings, RELAY_ROLE, overflow=4)  # jobs that one process does keep a session each

    @asynccontextmanager
    async def transaction(
        self, scope: Scope, *, refusals: Mapping[str, VeneerError] | None = None, dry_run: bool = False
    ) -> AsyncIterator[AsyncConnection]:
        """Runs a transaction of the application role in a scope; commits at the end of the block, rolls back on an error.

        Args:
            scope: Whose rows it sees.
            refusals: Error to raise when a constraint of this name is violated, in place of the one that is usual for it.
            dry_run: Rolls back at the end of the block too, so that all was tried and nothing happened.

        Raises:
            UnavailableError: The database is away, or no connection came free in time.
            AbortedError: The transaction lost against another one; it may be tried again.
            InvalidArgumentError: A text or number cannot be stored.
            VeneerError: A constraint is violated; see `controlplane.constraints`.
        """
        with translated(refusals):
            async with self.app.begin() as connection:
                await set_scope(connection, scope)
                yield connection
                if dry_run:
                    await connection.rollback()

    async def open(self, role: str, *statements: Statement) -> Pipeline:
        """Makes a connection of a role with prepared statements, for its caller to keep and close; it comes from no pool.

        Raises:
            UnavailableError: The database is away.
        """
        _, address = self.app.dialect.create_connect_args(self._settings.role_url(role))
        with translated():
            connection = await psycopg.AsyncConnection.connect(autocommit=True, **address, **_connect_args(self._settings, role))
            async with AsyncExitStack() as stack:
                stack.push_async_callback(connection.close)
                pipeline = Pipeline(connection)
                stack.push_async_callback(pipeline.close)
                await pipeline.prepare(*statements)
                stack.pop_all()
        return pipeline

    def lines(self, role: str, *statements: Statement) -> Lines:
        """Held connections of a role for reads that are asked often; closed with the others."""
        lines = Lines(lambda: self.open(role, *statements), size=self.pool_size, timeout_s=self.answer_s)
        self._lines.append(lines)
        return lines

    async def renew(self) -> None:
        """Has what is asked from now on use new connections; those in use are closed when they come back."""
        for engine in (self.app, self.relay):
            await engine.dispose()
        for lines in self._lines:
            await lines.renew()

    async def close(self) -> None:
        """Closes all connections."""
        for lines in self._lines:
            await lines.close()
        for engine in (self.app, self.relay):
            await engine.dispose()


async def set_scope(connection: AsyncConnection, scope: Scope) -> None:
    """Sets the scope, and who the audit log names, for the rest of the transaction: a pooled connection carries none on."""
    await connection.execute(_SET_SCOPE, {"tenant": scope.tenant, "scope": scope.kind, "actor": current_actor()})


class translated:  # noqa: N801  reads as a block: `with translated(): …`
    """Turns errors of the database driver into errors of `veneer.errors`; others pass.

    What the database says, names of its schema among it, is for the log alone.
    """

    def __init__(self, refusals: Mapping[str, VeneerError] | None = None) -> None:
        """Takes the error to raise when a constraint of a name is violated."""
        self._refusals = refusals or {}

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        known = self._translate(error)
        if known is not None:
            raise known from error

    def _translate(self, error: BaseException | None) -> VeneerError | None:
        cause = error.orig if isinstance(error, exc.DBAPIError) else error
        if isinstance(cause, psycopg.IntegrityError):
            return self._refusal(cause)
        if isinstance(cause, psycopg.DataError | pg_errors.ProgramLimitExceeded) or _is_nul(error):
            _LOG.warning(
                "a value could not be stored", extra={"sqlstate": cause.sqlstate if isinstance(cause, psycopg.Error) else None}
            )
            return InvalidArgumentError(
                "a text or number in the request cannot be stored (a NUL character, a number out of range, or too long a text)"
            )
        if isinstance(cause, pg_errors.SerializationFailure | pg_errors.DeadlockDetected):
            return AbortedError("the change lost against another one; try again", retry_after_s=0.1)
        if isinstance(error, _AWAY) or (isinstance(error, exc.DBAPIError) and error.connection_invalidated):
            return UnavailableError("the database is away", retry_after_s=1.0)
        return None

    def _refusal(self, cause: psycopg.Error) -> VeneerError:
        where = cause.diag
        known = self._refusals.get(where.constraint_name or "") or CONSTRAINTS.get(where.constraint_name or "", NEUTRAL)
        if known is NEUTRAL:
            place = {"constraint": where.constraint_name, "table": where.table_name, "column": where.column_name}
            _LOG.error(
                "a constraint was violated for which the control plane has to answer", extra={"sqlstate": cause.sqlstate, **place}
            )
        return copy.copy(known)


def _is_nul(error: BaseException | None) -> bool:
    return isinstance(error, exc.StatementError) and isinstance(error.orig, psycopg.DataError)


def _engine(
    settings: Settings,
    role: str,
    *,
    overflow: int,
    isolation_level: Literal["AUTOCOMMIT", "READ COMMITTED"] = "READ COMMITTED",
) -> AsyncEngine:
    engine = create_async_engine(
        settings.role_url(role),
        pool_size=settings.pool_size,
        max_overflow=overflow,
        pool_timeout=settings.pool_timeout_s,
        pool_recycle=_POOL_RECYCLE_S,
        pool_pre_ping=True,
        isolation_level=isolation_level,
        connect_args=_connect_args(settings, role),
    )
    event.listen(engine.sync_engine, "handle_error", _mark_disconnects)
    return engine


def _connect_args(settings: Settings, role: str) -> dict[str, Any]:
    options = (
        f"-c statement_timeout={int(settings.statement_timeout_s * 1000)}"
        f" -c idle_in_transaction_session_timeout={int(settings.statement_timeout_s * 1000)}"
    )
    return {
        "connect_timeout": settings.connect_timeout_s,
        "options": options,
        "target_session_attrs": "read-write",
        **_LIVENESS,
        "application_name": f"veneer-controlplane/{role}",
    }


def _mark_disconnects(context: ExceptionContext) -> None:
    # A primary that was demoted answers "read-only" and one that shuts down says so: neither connection may go back to the pool.
    state = getattr(context.original_exception, "sqlstate", None)
    if state in (_READ_ONLY, _ADMIN_SHUTDOWN):
        context.is_disconnect = True
