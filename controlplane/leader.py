"""Jobs that one control-plane process at a time does: an advisory lock says which, an epoch keeps out who had it before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane.db import Database, translated
from controlplane.locks import Lock, let_go, try_take
from veneer.errors import AbortedError

_BEGIN = text("""
    INSERT INTO leaders (name, epoch) VALUES (:name, 1) ON CONFLICT (name) DO UPDATE SET epoch = leaders.epoch + 1 RETURNING epoch
""")
_FENCE = text("SELECT epoch FROM leaders WHERE name = :name FOR SHARE")


@dataclass(frozen=True, slots=True)
class Term:
    """A process's turn at a job; the next turn, here or elsewhere, has a higher epoch."""

    name: str
    epoch: int

    async def fence(self, connection: AsyncConnection) -> None:
        """Refuses the transaction when another turn has begun, and lets none begin before it ends.

        Every write of a job calls it first: a process that lost its connection, or was stopped for a while, learns here that the
        lock is another's by now.

        Raises:
            AbortedError: Another turn has begun.
        """
        epoch = (await connection.execute(_FENCE, {"name": self.name})).scalar_one()
        if epoch != self.epoch:
            raise AbortedError(f"another process does {self.name} now")


class Leadership:
    """Lets one process at a time do a job. Any task may call it."""

    def __init__(self, database: Database, name: str) -> None:
        self._engine = database.relay
        self._name = name

    @asynccontextmanager
    async def term(self) -> AsyncIterator[Term | None]:
        """A turn for the length of the block; None while another process has it.

        Raises:
            UnavailableError: The database is away.
        """
        with translated():
            async with self._engine.connect() as connection:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
                # By the session, not by a transaction: one that stays open would hold the change feed back.
                if not await try_take(connection, Lock.LEADER, self._name):
                    yield None
                    return
                try:
                    yield Term(self._name, (await connection.execute(_BEGIN, {"name": self._name})).scalar_one())
                finally:
                    try:
                        await let_go(connection, Lock.LEADER, self._name)
                    except BaseException:
                        await connection.invalidate()  # the lock ends with the session, which must not go back to the pool
                        raise
