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

    async def page(self, tenant: str, *, page_size: int, token: str) -> tuple[list[Entry], str]:
        """A page of a tenant's entries, newest first, and the next page's token; without a tenant those of nobody's rows."""
        limit = page_limit(page_size)
        start = page_start("audit", token, kinds=[int])
        columns = models.audit.c
        wanted = (columns.id, columns.actor, columns.action, columns.object, columns.before, columns.after, columns.create_time)
        query = select(*wanted).where(columns.tenant == tenant).order_by(columns.id.desc()).limit(limit + 1)
        if start is not None:
            query = query.where(columns.id < start[0])
        async with self._database.transaction(Scope.of_tenant(tenant) if tenant else OPERATOR) as connection:
            entries = [Entry(*row) for row in (await connection.execute(query)).all()]
        return entries[:limit], page_token("audit", [entries[limit - 1].id]) if len(entries) > limit else ""
