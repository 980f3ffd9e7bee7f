"""The ledger of use: what data planes report out of their journals, each record once, and what tenants read of it."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, Final, Literal

from sqlalchemy import Row, func, select, text, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane.db import NODE, Database, Scope, set_scope
from controlplane.members import check_tenant
from controlplane.paging import page_limit, page_start, page_token
from controlplane.tickets import ticket
from controlplane.use_tables import usage, usage_journals
from controlplane.vault import Vault
from veneer.errors import PermissionDeniedError

_COUNTS: Final = ("requests", "failed_requests", "prompt_tokens", "cached_tokens", "output_tokens")
Period = Literal["hour", "day"]

_HOUR = text("""
    SELECT least(date_trunc('hour', CAST(:hour AS timestamptz), 'UTC'), date_trunc('hour', now(), 'UTC'))
""")


@dataclass(frozen=True, slots=True)
class Counts:
    """What requests used."""

    requests: int
    failed_requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What requests of one tenant to one version used in an hour, as a node says."""

    tenant: str
    owner: str
    adapter: str
    version: str
    ticket: bytes
    hour: datetime
    counts: Counts


@dataclass(frozen=True, slots=True)
class Records:
    """Records of a journal, by their numbers."""

    journal: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Used:
    """What a tenant's requests to one adapter used from `start_time` on, for an hour or a day."""

    start_time: datetime
    owner: str
    adapter: str
    counts: Counts


class UsageLedger:
    """Use cases of the ledger. Stateless; any task may call it."""

    def __init__(self, database: Database, vault: Vault) -> None:
        self._database = database
        self._vault = vault

    async def end(self, node_id: str, journal: str) -> int:
        """Takes nothing more of a journal, of which its node kept nothing; returns the number of the last record taken."""
        columns = usage_journals.c
        query = update(usage_journals).where(columns.node == uuid.UUID(node_id), columns.journal == journal)
        ended = query.values(end_time=func.coalesce(columns.end_time, func.now())).returning(columns.last_sequence)
        async with self._database.transaction(NODE) as connection:
            return (await connection.execute(ended)).scalar_one_or_none() or 0

    async def take(self, node_id: str, records: Records, entries: Sequence[Entry]) -> int:
        """Adds what the next records of a journal say; returns the number of the last one that was added, now or before.

        What does not begin right after that changes nothing, nor does what comes after the journal's end, so that a report which
        comes twice, late, or whose answer was lost, is added once.

        Raises:
            PermissionDeniedError: The node was not told of a version for a tenant; nothing was added then.
        """
        for one in entries:
            known = ticket(self._vault, node_id, one.tenant, one.owner, one.adapter, one.version)
            if not hmac.compare_digest(one.ticket, known):
                raise PermissionDeniedError("the node was not told of this version for this tenant")
        columns = usage_journals.c
        mine = (columns.node == uuid.UUID(node_id), columns.journal == records.journal)
        begun = insert(usage_journals).values(node=uuid.UUID(node_id), journal=records.journal, last_sequence=0)
        async with self._database.transaction(NODE) as connection:
            await connection.execute(begun.on_conflict_do_nothing())
            locked = select(columns.last_sequence, columns.end_time).where(*mine).with_for_update()
            last, end_time = (await connection.execute(locked)).one()
            if end_time is not None or records.first != last + 1 or records.last < records.first:
                return int(last)
            moved = update(usage_journals).where(*mine).values(last_sequence=records.last, update_time=func.now())
            await connection.execute(moved)
            await self._add(connection, entries)
        return records.last

    async def _add(self, connection: AsyncConnection, entries: Sequence[Entry]) -> None:
        # In one order everywhere: two nodes that add to the same rows wait for each other and never both.
        ordered = sorted(entries, key=lambda one: (one.tenant, one.hour, one.owner, one.adapter))
        for tenant, group in groupby(ordered, key=lambda one: one.tenant):
            await set_scope(connection, Scope.of_node_for(tenant))
            for one in group:
                hour = (await connection.execute(_HOUR, {"hour": one.hour})).scalar_one()
                row = {"tenant": tenant, "hour": hour, "owner": one.owner, "adapter": one.adapter}
                query = insert(usage).values(row | {name: getattr(one.counts, name) for name in _COUNTS})
                sums = {name: usage.c[name] + query.excluded[name] for name in _COUNTS}
                await connection.execute(query.on_conflict_do_update(constraint="pk_usage", set_=sums))

    async def page(
        self,
        tenant: str,
        period: Period,
        *,
        start: datetime | None,
        page_size: int,
        token: str,
        scope: Scope | None = None,
    ) -> tuple[list[Used], str]:
        """A page of what a tenant used, latest first, and the next page's token; in the tenant's own scope unless one is given.

        Raises:
            NotFoundError: There is no such tenant.
        """
        limit, listing = page_limit(page_size), f"usage/{period}"
        after = page_start(listing, token, kinds=[datetime, str, str])
        columns = usage.c
        begin = func.date_trunc(period, columns.hour, "UTC").label("begin")
        keys = (begin, columns.owner, columns.adapter)
        query = select(*keys, *(func.sum(columns[name]).label(name) for name in _COUNTS)).where(columns.tenant == tenant)
        if start is not None:
            query = query.where(columns.hour >= start)
        if after is not None:
            rest = (begin < after[0]) | ((begin == after[0]) & (tuple_(columns.owner, columns.adapter) > tuple(after[1:])))
            query = query.where(columns.hour < after[0] + func.make_interval(0, 0, 0, 1), rest)
        query = query.group_by(*keys).order_by(begin.desc(), columns.owner, columns.adapter).limit(limit + 1)
        async with self._database.transaction(scope or Scope.of_tenant(tenant)) as connection:
            await check_tenant(connection, tenant)
            used = [_used(row) for row in (await connection.execute(query)).all()]
        shown = used[:limit]
        if len(used) <= limit:
            return shown, ""
        return shown, page_token(listing, [shown[-1].start_time, shown[-1].owner, shown[-1].adapter])


def _used(row: Row[Any]) -> Used:
    return Used(row.begin, row.owner, row.adapter, Counts(*(int(getattr(row, name)) for name in _COUNTS)))
