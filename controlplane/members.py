"""Whether there is a tenant, as far as a scope shows."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane.models import tenants
from veneer.errors import NotFoundError


async def check_tenant(connection: AsyncConnection, name: str) -> None:
    """Checks that the transaction's scope shows a tenant: one of somebody else is as one that does not exist.

    Raises:
        NotFoundError: There is none.
    """
    if (await connection.execute(select(tenants.c.name).where(tenants.c.name == name))).one_or_none() is None:
        raise NotFoundError("there is no such tenant")
