"""Grants: one tenant lets another use, not read, an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, select
from sqlalchemy.dialects.postgresql import insert

from controlplane import models
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import Database, Scope
from veneer.errors import InvalidArgumentError, NotFoundError, Violation


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission for `grantee` to use `owner`'s adapter."""

    owner: str
    adapter: str
    grantee: str
    create_time: datetime


@dataclass(frozen=True, slots=True)
class Grants:
    """What a tenant has given and what it has received."""

    given: tuple[Grant, ...]
    received: tuple[Grant, ...]


class Sharing:
    """Use cases of grants. Stateless; any task may call it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, owner: str, adapter: str, *, grantee: str) -> Grant:
        """Gives a grant; a second time changes nothing.

        Raises:
            NotFoundError: The owner has no such adapter, or there is no such grantee.
            InvalidArgumentError: The grantee is the owner.
        """
        refusals = {
            "fk_grants_tenant_adapter_adapters": NotFoundError("there is no such adapter"),
            "fk_grants_grantee_tenants": NotFoundError("there is no such tenant"),
            "ck_grants_grantee": InvalidArgumentError.of([Violation("grantee", "is the owner, who needs no grant")]),
        }
        columns = models.grants.c
        row = {"tenant": owner, "adapter": adapter, "grantee": grantee}
        query = insert(models.grants).values(row).on_conflict_do_nothing().returning(*columns)
        mine = (columns.tenant == owner, columns.adapter == adapter, columns.grantee == grantee)
        async with self._database.transaction(Scope.of_tenant(owner), refusals=refusals) as connection:
            stored = (await connection.execute(query)).one_or_none()
            if stored is not None:
                await record(connection, Change(kind=ChangeKind.GRANT, tenant=owner, adapter=adapter))
            else:
                stored = (await connection.execute(select(*columns).where(*mine))).one()
        return _grant(stored)

    async def all(self, tenant: str) -> Grants:
        """Grants that the tenant has given and has received, by owner, adapter and grantee."""
        columns = models.grants.c
        query = select(*columns).order_by(columns.tenant, columns.adapter, columns.grantee)
        async with self._database.transaction(Scope.of_tenant(tenant)) as connection:
            given = (await connection.execute(query.where(columns.tenant == tenant))).all()
            received = (await connection.execute(query.where(columns.grantee == tenant))).all()
        return Grants(tuple(_grant(row) for row in given), tuple(_grant(row) for row in received))

    async def revoke(self, owner: str, adapter: str, *, grantee: str) -> None:
        """Withdraws a grant.

        Raises:
            NotFoundError: There is no such grant.
        """
        columns = models.grants.c
        query = delete(models.grants).where(columns.tenant == owner, columns.adapter == adapter, columns.grantee == grantee)
        async with self._database.transaction(Scope.of_tenant(owner)) as connection:
            if (await connection.execute(query)).rowcount == 0:
                raise NotFoundError("there is no such grant")
            await record(connection, Change(kind=ChangeKind.GRANT, tenant=owner, adapter=adapter))


def _grant(row: Row[Any]) -> Grant:
    return Grant(row.tenant, row.adapter, row.grantee, row.create_time)
