"""The audit log: who wrote what, and how it was before and after.

Triggers of the database write it, in the transaction of the write itself, so that none can be left out; and no role of the
service may change or remove what is there. Secrets are in it as little as their hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select

from controlplane import models
from controlplane.db import OPERATOR, Database, Scope
from controlplane.members import check_tenant
from controlplane.paging import page_limit, page_start, page_token


@dataclass(frozen=True, slots=True)
class Entry:
    """A write of one row.

    Attributes:
        id: Grows with time.
        actor: Kind and identifier of the key by which it was written.
        action: `INSERT`, `UPDATE` or `DELETE`.
        object: Table of the row.
        before: The row as it was; None when it was made.
        after: The row as it became; None when it was removed.
        create_time: When.
    """

    id: int
    actor: str
    action: str
    object: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    create_time: datetime


class Audit:
    """Reads the log. Stateless; any task may call it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, tenant: str, *, page_size: int, token: str, organization: str = "") -> tuple[list[Entry], str]:
        """A page of a tenant's entries, newest first, and the next page's token.

        Args:
            tenant: Whose; empty: those of rows that are no tenant's, or of the organisation's own.
            page_size: Entries.
            token: Where the page before ended.
            organization: On whose behalf, where it is not the tenant's own or an operator's.

        Raises:
            NotFoundError: The organisation has no such tenant.
        """
        limit = page_limit(page_size)
        start = page_start("audit", token, kinds=[int])
        columns = models.audit.c
        wanted = (columns.id, columns.actor, columns.action, columns.object, columns.before, columns.after, columns.create_time)
        whose = columns.organization == organization if organization and not tenant else columns.tenant == tenant
        query = select(*wanted).where(whose).order_by(columns.id.desc()).limit(limit + 1)
        if start is not None:
            query = query.where(columns.id < start[0])
        own = Scope.of_tenant(tenant) if tenant else OPERATOR
        async with self._database.transaction(Scope.of_organization(organization) if organization else own) as connection:
            if organization and tenant:
                await check_tenant(connection, tenant)
            entries = [Entry(*row) for row in (await connection.execute(query)).all()]
        return entries[:limit], page_token("audit", [entries[limit - 1].id]) if len(entries) > limit else ""
