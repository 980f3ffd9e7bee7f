"""Where a caller's requests for an adapter go best."""

from __future__ import annotations

from dataclasses import dataclass

from redis.exceptions import RedisError
from sqlalchemy import text

from controlplane.catalog import READY
from controlplane.db import Database, Scope
from controlplane.homes import Homes
from veneer.errors import NotFoundError

_BASE = text("""
    SELECT base_digest FROM versions
    WHERE (:owner = :tenant OR EXISTS (SELECT FROM grants WHERE tenant = :owner AND adapter = :adapter AND grantee = :tenant))
      AND tenant = :owner AND adapter = :adapter AND state = :ready
    ORDER BY number DESC LIMIT 1
""")
"""Row-level security alone would look at each version of a foreign adapter before it hides it, and so tell by time how many there
are; that the caller may use the adapter is asked once, before any.
"""


@dataclass(frozen=True, slots=True)
class Location:
    """Where an adapter is.

    Attributes:
        key: `owner/adapter`.
        addresses: Where data planes say that callers reach them; none where nothing is known.
    """

    key: str
    addresses: tuple[str, ...]


class Locator:
    """Finds data planes for callers. Stateless; any task may call it.

    Args:
        database: Says whether a caller may use an adapter.
        homes: The plan; None where there is none.
    """

    def __init__(self, database: Database, homes: Homes | None) -> None:
        self._database = database
        self._homes = homes

    async def locate(self, tenant: str, adapter: str, *, owner: str) -> Location:
        """Tells where an adapter is; a foreign one and one that does not exist take the same query and give the same answer.

        Raises:
            NotFoundError: The tenant may not use such an adapter, or there is none.
            UnavailableError: The database is away.
        """
        owner = owner or tenant
        wanted = {"tenant": tenant, "owner": owner, "adapter": adapter, "ready": READY}
        async with self._database.transaction(Scope.of_caller(tenant)) as connection:
            base = (await connection.execute(_BASE, wanted)).scalar_one_or_none()
        if base is None:
            raise NotFoundError("no such adapter, alias or version")
        key = f"{owner}/{adapter}"
        if self._homes is None:
            return Location(key, ())
        try:
            return Location(key, await self._homes.addresses(base, key))
        except (RedisError, OSError):
            return Location(key, ())  # advice: the caller hashes by itself
