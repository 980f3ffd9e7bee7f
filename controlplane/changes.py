"""The catalogue's change feed: what was committed, in an order that no reader can skip over.

A row carries the number of its transaction. A reader stops below `pg_snapshot_xmin`, the oldest transaction still running, so a
row that commits late is never behind a cursor. The feed is therefore as late as the longest writing transaction of the database
cluster.

A cursor is the place of a change, never of the horizon: a crash of the server forgets the numbers of transactions that had
committed nothing, and gives them again. What was committed outlives it, and only numbers after that are given from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.db import Database, translated
from veneer.errors import InvalidArgumentError, Violation


class ChangeKind(IntEnum):
    """Kinds of change, numbered as in the API."""

    VERSION = 1
    ALIAS = 2
    GRANT = 3
    KEY = 4
    PROBE = 5
    TRUST = 6


_KINDS = frozenset(ChangeKind)
NODE_KEYS: Final = 1000
"""Kind of a change to a node's keys, with the node's identifier as the adapter. A trigger writes it; no data plane is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A committed change; identifiers only.

    Attributes:
        kind: Kind of change.
        tenant: Tenant that owns what changed.
        adapter: Adapter, if it is about one.
        version: Version digest, if it is about one.
        generation: Generation of the alias after the change, for aliases.
    """

    kind: ChangeKind
    tenant: str
    adapter: str = ""
    version: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class ChangePage:
    """Changes after a cursor.

    Attributes:
        changes: In commit order.
        next_cursor: Where to go on.
        reset: True when the cursor could not be followed: forget what was cached and go on from next_cursor.
    """

    changes: tuple[Change, ...]
    next_cursor: str
    reset: bool = False


_HORIZON = text("""
    SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS xmax, xid::text::bigint AS floor_xid, id AS floor_id
    FROM change_floor
""")
_END = text("""
    SELECT coalesce(l.xid, f.xid)::text::bigint AS xid, coalesce(l.id, f.id) AS id
    FROM change_floor f LEFT JOIN LATERAL (
        SELECT xid, id FROM changes WHERE xid < pg_snapshot_xmin(pg_current_snapshot())
        ORDER BY changes.xid DESC, changes.id DESC LIMIT 1
    ) l ON true
""")
_PAGE = text("""
    SELECT xid::text::bigint AS xid, id, kind, tenant, adapter, version, generation FROM changes
    WHERE (xid, id) > (CAST(CAST(:xid AS text) AS xid8), :id) AND xid < pg_snapshot_xmin(pg_current_snapshot())
    ORDER BY changes.xid, changes.id LIMIT :limit
""")


async def record(connection: AsyncConnection, *changes: Change) -> None:
    """Writes changes to the feed and to the outbox; they appear when the transaction commits, and only then."""
    rows = [
        {
            "kind": int(one.kind),
            "tenant": one.tenant,
            "adapter": one.adapter,
            "version": one.version,
            "generation": one.generation,
        }
        for one in changes
    ]
    await connection.execute(insert(models.changes), rows)
    await connection.execute(insert(models.outbox), rows)


class ChangeFeed:
    """Reads the feed. Stateless; any task may call it."""

    def __init__(self, database: Database) -> None:
        self._engine = database.relay

    async def read(self, cursor: str, *, max_changes: int) -> ChangePage:
        """Lists changes after a cursor; an empty cursor means from now on.

        Raises:
            InvalidArgumentError: The cursor is none of ours.
            UnavailableError: The database is away.
        """
        start = _parse(cursor)
        with translated():
            async with self._engine.begin() as connection:
                horizon = (await connection.execute(_HORIZON)).one()
                is_lost = start is not None and (start < (horizon.floor_xid, horizon.floor_id) or start[0] > horizon.xmax)
                if start is None or is_lost:
                    end = (await connection.execute(_END)).one()
                    return ChangePage((), _cursor(end.xid, end.id), reset=is_lost)
                parameters = {"xid": str(start[0]), "id": start[1], "limit": max_changes}
                rows = (await connection.execute(_PAGE, parameters)).all()
        changes = tuple(
            Change(
                kind=ChangeKind(row.kind), tenant=row.tenant, adapter=row.adapter, version=row.version, generation=row.generation
            )
            for row in rows
            if row.kind in _KINDS  # not `NODE_KEYS`, nor what a newer process beside this one writes for readers of its own
        )
        last = (rows[-1].xid, rows[-1].id) if rows else start
        return ChangePage(changes, _cursor(*last))


def _cursor(xid: int, number: int) -> str:
    return f"{xid}-{number}"


def _parse(cursor: str) -> tuple[int, int] | None:
    if not cursor:
        return None
    xid, _, number = cursor.partition("-")
    if not (xid.isascii() and xid.isdigit() and number.isascii() and number.isdigit() and max(len(xid), len(number)) < 19):
        raise InvalidArgumentError.of([Violation("cursor", "is not a cursor of this feed")])
    return int(xid), int(number)
