"""Which nodes bring a version when it is published or an alias moves to it: those that serve its adapter, else two by a hash."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from redis.asyncio import Redis
from sqlalchemy import text

from controlplane.db import NODE, Database
from controlplane.fleet_reports import FleetReports
from controlplane.node_versions import NodeVersion, NodeVersions
from controlplane.rendezvous import favourites, hashes

_NUM_FIRST_HOMES = 2
"""Nodes that bring the first version of an adapter: one may go away before the first request comes."""
_MAX_NODES = 16
"""Nodes that a hint names at most, so that it stays below the 1,024 bytes that data planes read."""

# `use_time` is renewed once a day, so an adapter in use has rows of the last two.
_VERSIONS = text("""
    SELECT v.tenant, v.adapter, v.digest, v.base_digest,
           ARRAY(SELECT DISTINCT u.node::text FROM node_versions u JOIN nodes n ON n.id = u.node
                 WHERE u.tenant = v.tenant AND u.adapter = v.adapter AND u.use_time > now() - interval '2 days'
                   AND n.revoke_time IS NULL AND n.base_digest = v.base_digest) AS nodes
    FROM versions v WHERE v.digest = ANY(:digests) AND v.state = 'READY'
""")
_NODES = text("SELECT id::text FROM nodes WHERE revoke_time IS NULL AND base_digest = :base ORDER BY id")


class PublishStaging:
    """Chooses nodes, and notes that they were told. Owned by one task, the relay's.

    Args:
        database: The catalogue.
        redis: Where nodes report whether they serve.
        node_versions: Notes what nodes are told of.
    """

    def __init__(self, database: Database, redis: Redis, node_versions: NodeVersions) -> None:
        self._database = database
        self._reports = FleetReports(redis)
        self._node_versions = node_versions

    async def tell(self, digests: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Returns the nodes that should bring each version; versions that may not be served are left out.

        Raises:
            UnavailableError: The database is away.
            RedisError: Redis is away.
        """
        if not digests:
            return {}
        async with self._database.transaction(NODE) as connection:
            rows = (await connection.execute(_VERSIONS, {"digests": list(digests)})).all()
            new = {row.base_digest for row in rows if not row.nodes}
            enrolled = {base: list((await connection.execute(_NODES, {"base": base})).scalars()) for base in new}
        serving = {base: await self._serving(nodes) for base, nodes in enrolled.items()}
        told = {
            row.digest: _best(f"{row.tenant}/{row.adapter}", row.nodes, count=_MAX_NODES)
            or _best(f"{row.tenant}/{row.adapter}", serving.get(row.base_digest, ()), count=_NUM_FIRST_HOMES)
            for row in rows
        }
        pairs = [NodeVersion(row.tenant, row.adapter, node, row.digest) for row in rows for node in told[row.digest]]
        await self._node_versions.note(pairs)
        return told

    async def _serving(self, nodes: Sequence[str]) -> list[str]:
        states = await self._reports.read(nodes)
        return [node for node in nodes if node in states and states[node].serving] or list(nodes)  # where nothing reports


def _best(key: str, nodes: Sequence[str], *, count: int) -> tuple[str, ...]:
    if not nodes:
        return ()
    weights = np.ones(len(nodes), np.float32)
    best = favourites(hashes([key]), hashes(nodes), weights, count=count)[0]
    return tuple(nodes[place] for place in best)
