"""Versions that a node may read: those that it was asked to serve or told to stage, for as long as they are in use.

A row says that a node was told of a version: by an answer of Resolve, by placement, by the hint of a publish, by a probe that it
took on, or by a pin of an operator. The row is committed before the node hears of the version, so every control-plane process
grants what any of them told. The collector removes a row 30 days after its last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane.coalesced import Coalesced
from controlplane.db import NODE, Database
from controlplane.remembered import Freshness, Memory

_MAX_ROWS = 1000

# A pair that was noted within the last day is only read: it costs no write and no transaction number.
_NOTE = text("""
    INSERT INTO node_versions (tenant, adapter, node, version)
    SELECT p.tenant, p.adapter, p.node, p.version
    FROM unnest(CAST(:tenants AS text[]), CAST(:adapters AS text[]), CAST(:nodes AS uuid[]), CAST(:versions AS text[]))
        AS p (tenant, adapter, node, version)
    WHERE NOT EXISTS (
        SELECT FROM node_versions k WHERE k.tenant = p.tenant AND k.adapter = p.adapter AND k.node = p.node
            AND k.version = p.version AND k.use_time > now() - interval '1 day')
    ORDER BY 1, 2, 3, 4
    ON CONFLICT ON CONSTRAINT pk_node_versions DO UPDATE SET use_time = now()
""")
_RIGHTS = text("""
    SELECT EXISTS (
               SELECT FROM node_versions
               WHERE tenant = :tenant AND adapter = :adapter AND node = CAST(:node AS uuid) AND version = :version
           ) AS version,
           EXISTS (
               SELECT FROM node_versions WHERE tenant = :tenant AND adapter = :adapter AND node = CAST(:node AS uuid)
           ) AS adapter,
           coalesce((SELECT reads_all_until > now() FROM nodes WHERE id = CAST(:node AS uuid)), false) AS everything
""")


class NodeVersion(NamedTuple):
    """A version that a node was told of.

    Attributes:
        tenant: Owner of the version.
        adapter: Name of its adapter.
        node: Identifier of the node.
        version: Digest of the version.
    """

    tenant: str
    adapter: str
    node: str
    version: str


@dataclass(frozen=True, slots=True)
class Rights:
    """What a node was told of.

    Attributes:
        version: The version itself.
        adapter: Some version of the same adapter.
        everything: The node was enrolled before rows were kept, less than a day ago.
    """

    version: bool
    adapter: bool
    everything: bool


class NodeVersions:
    """Notes what nodes are told of. Owned by one event loop.

    Pairs that were noted are remembered as long as other answers of the catalogue, so a database that lost rows gets them again.
    """

    def __init__(self, database: Database, freshness: Freshness) -> None:
        self._database = database
        self._memory: Memory[NodeVersion, NodeVersion] = freshness.node_versions
        self._waiting: dict[NodeVersion, None] = {}
        self._writes = Coalesced[None, None](self._write)

    async def note(self, pairs: Iterable[NodeVersion]) -> None:
        """Returns when the pairs are committed; those that are noted at the same time share a transaction.

        Raises:
            UnavailableError: The database is away.
        """
        new = [pair for pair in pairs if self._memory.get(pair) is None]
        if new:
            self._waiting.update(dict.fromkeys(new))
            await self._writes.get(None)

    async def _write(self, _: None) -> None:
        pairs, self._waiting = sorted(self._waiting), {}
        epoch = self._memory.epoch
        for start in range(0, len(pairs), _MAX_ROWS):
            part = pairs[start : start + _MAX_ROWS]
            async with self._database.transaction(NODE) as connection:
                await write_down(connection, part)
            for pair in part:
                self._memory.put(pair, pair, about=(), epoch=epoch)


async def write_down(connection: AsyncConnection, pairs: Sequence[NodeVersion]) -> None:
    """Notes pairs in a transaction of the scope `node`."""
    tenants, adapters, nodes, versions = map(list, zip(*pairs, strict=True))
    await connection.execute(_NOTE, {"tenants": tenants, "adapters": adapters, "nodes": nodes, "versions": versions})


async def rights_of(connection: AsyncConnection, pair: NodeVersion) -> Rights:
    """Returns what a node was told of, in a transaction of the scope `node`."""
    return Rights(*(await connection.execute(_RIGHTS, pair._asdict())).one())
