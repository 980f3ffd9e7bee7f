"""Grants: one tenant lets another use, not read, an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Row, delete, select, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.answers import RACED, Request, once
from controlplane.catalog import NO_ADAPTER
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import Database, Scope
from controlplane.paging import page_limit, page_start, page_token
from veneer.errors import InvalidArgumentError, NotFoundError, Violation

_GIVEN, _RECEIVED = 0, 1


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission for `grantee` to use `owner`'s adapter."""

    owner: str
    adapter: str
    grantee: str
    create_time: datetime


@dataclass(frozen=True, slots=True)
class Grants:
    """A page of what a tenant has given and what it has received, and the next page's token."""

    given: tuple[Grant, ...]
    received: tuple[Grant, ...]
    next_token: str


_KEPT_GRANT, _KEPT_NOTHING = TypeAdapter(Grant), TypeAdapter(dict[str, str])


class Sharing:
    """Use cases of grants. Stateless; any task may call it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, owner: str, adapter: str, *, grantee: str, request_id: str = "") -> Grant:
        """Gives a grant; a second time changes nothing. Whether there is such a grantee is not the owner's to know.

        Raises:
            NotFoundError: The owner has no such adapter.
            InvalidArgumentError: The grantee is the owner.
        """
        refusals = {
            "ck_grants_grantee": InvalidArgumentError.of([Violation("grantee", "is the owner, who needs no grant")]),
            **RACED,
        }
        request = Request.of(owner, request_id, "CreateGrant", adapter, grantee)
        async with self._database.transaction(Scope.of_tenant(owner), refusals=refusals) as connection:
            return await once(connection, request, _KEPT_GRANT, lambda: _create(connection, owner, adapter, grantee))

    async def page(self, tenant: str, *, page_size: int, token: str) -> Grants:
        """A page of the grants that the tenant has given, by adapter and grantee, and then has received, by owner and adapter."""
        limit = page_limit(page_size)
        start = page_start("grants", token, kinds=[int, str, str])
        columns = models.grants.c
        given = select(*columns).where(columns.tenant == tenant).order_by(columns.adapter, columns.grantee)
        received = select(*columns).where(columns.grantee == tenant).order_by(columns.tenant, columns.adapter)
        if start is not None and start[0] == _GIVEN:
            given = given.where(tuple_(columns.adapter, columns.grantee) > tuple(start[1:]))
        if start is not None and start[0] == _RECEIVED:
            received = received.where(tuple_(columns.tenant, columns.adapter) > tuple(start[1:]))
        found: list[tuple[int, Grant]] = []
        async with self._database.transaction(Scope.of_tenant(tenant)) as connection:
            for side, query in ((_GIVEN, given), (_RECEIVED, received)):
                if len(found) <= limit and (start is None or side >= start[0]):
                    rows = (await connection.execute(query.limit(limit + 1 - len(found)))).all()
                    found += [(side, _grant(row)) for row in rows]
        shown, next_token = found[:limit], ""
        if len(found) > limit:
            side, last = shown[-1]
            key = (last.adapter, last.grantee) if side == _GIVEN else (last.owner, last.adapter)
            next_token = page_token("grants", [side, *key])
        sides = [tuple(grant for side, grant in shown if side == wanted) for wanted in (_GIVEN, _RECEIVED)]
        return Grants(sides[0], sides[1], next_token)

    async def revoke(self, owner: str, adapter: str, *, grantee: str, request_id: str = "") -> None:
        """Withdraws a grant.

        Raises:
            NotFoundError: There is no such grant.
        """
        request = Request.of(owner, request_id, "RevokeGrant", adapter, grantee)
        async with self._database.transaction(Scope.of_tenant(owner), refusals=RACED) as connection:
            await once(connection, request, _KEPT_NOTHING, lambda: _revoke(connection, owner, adapter, grantee))


async def _create(connection: AsyncConnection, owner: str, adapter: str, grantee: str) -> Grant:
    columns, a = models.grants.c, models.adapters.c
    row = {"tenant": owner, "adapter": adapter, "grantee": grantee}
    is_live = select(a.name).where(a.tenant == owner, a.name == adapter, a.delete_time.is_(None))
    if (await connection.execute(is_live.with_for_update(read=True))).one_or_none() is None:
        raise NotFoundError(NO_ADAPTER)
    query = insert(models.grants).values(row).on_conflict_do_nothing().returning(*columns)
    stored = (await connection.execute(query)).one_or_none()
    if stored is not None:
        await record(connection, Change(kind=ChangeKind.GRANT, tenant=owner, adapter=adapter))
        return _grant(stored)
    mine = (columns.tenant == owner, columns.adapter == adapter, columns.grantee == grantee)
    return _grant((await connection.execute(select(*columns).where(*mine))).one())


async def _revoke(connection: AsyncConnection, owner: str, adapter: str, grantee: str) -> dict[str, str]:
    columns = models.grants.c
    query = delete(models.grants).where(columns.tenant == owner, columns.adapter == adapter, columns.grantee == grantee)
    if (await connection.execute(query)).rowcount == 0:
        raise NotFoundError("there is no such grant")
    await record(connection, Change(kind=ChangeKind.GRANT, tenant=owner, adapter=adapter))
    return {}


def _grant(row: Row[Any]) -> Grant:
    return Grant(row.tenant, row.adapter, row.grantee, row.create_time)
