"""A node's shares of what a tenant may use at most in all.

Each lease has a reserve: the largest of the share given, the share that the node said it still held, and what it said it had used
in the last minute. A new share is never more than the quota less the reserves of the others; so while all nodes renew, what they
admit together never exceeds the quota in any minute, whichever answers were lost.
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Row, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.db import Database, Scope
from controlplane.locks import Lock, hold
from controlplane.shares import share_of
from controlplane.tickets import ticket
from controlplane.use_tables import quota_leases
from controlplane.vault import Vault
from veneer.errors import PermissionDeniedError

_LIMITS: Final = {"requests": "max_requests_per_minute", "tokens": "max_tokens_per_minute", "streams": "max_streams"}

_NO_LIMIT: Final = 10**12


@dataclass(frozen=True, slots=True)
class Amounts:
    """So much of each of what is leased."""

    requests: int = 0
    tokens: int = 0
    streams: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a node says of a tenant.

    Attributes:
        tenant: Name of the tenant.
        ticket: Shows that the node was told of it.
        held: Shares that the node goes by.
        used: What it has used of them.
        wanted: What it would use.
    """

    tenant: str
    ticket: bytes
    held: Amounts
    used: Amounts
    wanted: Amounts


class QuotaLeases:
    """Use case of leases. Stateless; any task may call it.

    Args:
        database: Where they are kept.
        vault: Knows tickets.
        lifetime_s: How long a lease lasts.
    """

    def __init__(self, database: Database, vault: Vault, *, lifetime_s: float) -> None:
        self._database = database
        self._vault = vault
        self.lifetime = timedelta(seconds=lifetime_s)

    async def lease(self, node_id: str, demands: Sequence[Demand]) -> list[Amounts]:
        """Gives a node its shares, in the order of the demands.

        Raises:
            PermissionDeniedError: The node was not told of one of the tenants; nothing was leased then.
        """
        for demand in demands:
            if not hmac.compare_digest(demand.ticket, ticket(self._vault, node_id, demand.tenant)):
                raise PermissionDeniedError("the node was not told of this tenant")
        return [await self._lease(node_id, demand) for demand in demands]

    async def _lease(self, node_id: str, demand: Demand) -> Amounts:
        tenants = models.tenants.c
        limits = select(*(tenants[name] for name in _LIMITS.values())).where(tenants.name == demand.tenant)
        async with self._database.transaction(Scope.of_node_for(demand.tenant)) as connection:
            await hold(connection, Lock.QUOTA, demand.tenant)
            limited = (await connection.execute(limits)).one()
            others = await _others(connection, demand.tenant, node_id)
            shares = {
                kind: _share(kind, node_id, demand, limit=getattr(limited, name), others=others) for kind, name in _LIMITS.items()
            }
            await self._keep(connection, node_id, demand, shares)
        return Amounts(**shares)

    async def _keep(self, connection: AsyncConnection, node_id: str, demand: Demand, shares: Mapping[str, int]) -> None:
        row: dict[str, Any] = {"tenant": demand.tenant, "node": uuid.UUID(node_id), "end_time": func.now() + self.lifetime}
        for kind, share in shares.items():
            held = [amount for amount in (share, getattr(demand.held, kind)) if amount < _NO_LIMIT]
            row[f"{kind}_reserved"] = max(*held, getattr(demand.used, kind), 0)
            row[f"{kind}_wanted"] = getattr(demand.wanted, kind)
        query = insert(quota_leases).values(row)
        changed = {name: query.excluded[name] for name in row if name not in ("tenant", "node")}
        await connection.execute(query.on_conflict_do_update(constraint="pk_quota_leases", set_=changed))


async def _others(connection: AsyncConnection, tenant: str, node_id: str) -> Sequence[Row[Any]]:
    """The leases of the other nodes; those that have ended are let go."""
    columns = quota_leases.c
    theirs = (columns.tenant == tenant, columns.node != uuid.UUID(node_id))
    await connection.execute(delete(quota_leases).where(*theirs, columns.end_time <= func.now()))
    return (await connection.execute(select(quota_leases).where(*theirs))).all()


def _share(kind: str, node_id: str, demand: Demand, *, limit: int, others: Sequence[Row[Any]]) -> int:
    if not limit:
        return _NO_LIMIT
    wants = {str(row.node): getattr(row, f"{kind}_wanted") for row in others}
    wants[node_id] = getattr(demand.wanted, kind)
    return share_of(node_id, wants, limit=limit, reserved=sum(getattr(row, f"{kind}_reserved") for row in others))
