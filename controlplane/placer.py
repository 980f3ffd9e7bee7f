"""The loop that plans: reads what nodes report, revises the plan, writes it for callers and nodes.

Every control-plane process has one; the process whose turn it is does the work (`controlplane.leader`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import text

from controlplane.advice import Staging, named_homes, staging
from controlplane.db import NODE, Database
from controlplane.fleet_reports import FleetReports, NodeState
from controlplane.homes import Homes
from controlplane.leader import Leadership, Term
from controlplane.node_versions import NodeVersion, NodeVersions
from controlplane.placement import Demand, Demands, Fleet, Plan, Replica
from controlplane.planning import revise
from controlplane.popularity import Popularity
from controlplane.settings import Settings
from veneer.errors import VeneerError

_LOG = logging.getLogger(__name__)
_LOOK_UPS = 5_000  # versions that are looked up in a round; those of forged reports are not there
_MAX_KNOWN = 1_000_000
_MAX_VERSIONS = 4  # of one adapter, that are staged

_NODES = text("SELECT id, base_digest FROM nodes WHERE revoke_time IS NULL ORDER BY id")
_VERSIONS = text("""
    SELECT digest, tenant || '/' || adapter AS key, base_digest, max_rank, config_bytes + weights_bytes AS size_bytes
    FROM versions WHERE digest = ANY(:digests)
""")


@dataclass(frozen=True, slots=True)
class _Version:
    key: str
    base_digest: str
    max_rank: int
    size_bytes: int


@dataclass(slots=True)
class _Base:
    """What was planned for a base, and what of it was written."""

    plan: Plan
    written: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_whole: bool = False


class Placer:
    """Plans until it is stopped. Owned by the process; runs as one task.

    Args:
        database: The catalogue, for nodes and versions.
        redis: Where reports are and plans go.
        settings: Settings of the process.
        node_versions: Notes which versions nodes are told to stage.
        registry: Where its figures go.
    """

    def __init__(
        self, database: Database, redis: Redis, settings: Settings, *, node_versions: NodeVersions, registry: CollectorRegistry
    ) -> None:
        self._database = database
        self._node_versions = node_versions
        self._leadership = Leadership(database, "placement")
        self._reports = FleetReports(redis)
        self._homes = Homes(redis)
        self._interval_s = settings.placement_interval_s
        self._versions: dict[str, _Version | None] = {}
        self._begin()
        self._nodes = Gauge("veneer_controlplane_placed_nodes", "Nodes in the plan.", registry=registry)
        self._adapters = Gauge("veneer_controlplane_placed_adapters", "Adapters in the plan.", registry=registry)
        self._balance = Gauge(
            "veneer_controlplane_placement_balance", "Planned traffic of the busiest node over its share.", registry=registry
        )
        self._seconds = Gauge("veneer_controlplane_placement_seconds", "Duration of the last round.", registry=registry)
        self._failed = Counter("veneer_controlplane_placement_failures", "Rounds that failed.", registry=registry)

    async def run(self) -> None:
        """Plans until cancelled. What fails is tried again after the interval, by whoever's turn it is then."""
        while True:
            try:
                async with self._leadership.term() as term:
                    if term is not None:
                        await self._lead(term)
            except Exception as error:  # nobody would start it again
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError from error  # cleaning up failed and took the cancellation's place
                self._failed.inc()
                known = isinstance(error, VeneerError | RedisError | OSError)
                _LOG.warning("planning failed", extra={"cause": type(error).__name__}, exc_info=not known)
            await asyncio.sleep(self._interval_s)

    async def _lead(self, term: Term) -> None:
        self._begin()
        while True:
            await self.round(term)
            await asyncio.sleep(self._interval_s)

    def _begin(self) -> None:
        """Forgets what an earlier term knew: others have planned since."""
        self._bases: dict[str, _Base] = {}
        self._popularity = Popularity()

    async def round(self, term: Term) -> None:
        """Reads, plans and writes once.

        Raises:
            AbortedError: Another process's term has begun.
            UnavailableError: The database is away.
            RedisError: Redis is away.
        """
        begun_s = time.monotonic()
        bases = await self._nodes_by_base()
        states = await self._reports.read([node for nodes in bases.values() for node in nodes])
        self._popularity.note(states, begun_s)
        sizes = {version: held.size_bytes for state in states.values() for version, held in state.holdings.items()}
        await self._look_up(sizes)
        balance, num_adapters = 0.0, 0
        for base, nodes in bases.items():
            serving = [states[node] for node in nodes if node in states and states[node].serving]
            plan = await self._plan(base, serving, sizes, term)
            num_adapters += len(plan.keys)
            if len(plan.rows):
                balance = max(balance, float((plan.loads() / plan.loads().mean()).max()))
        for known in self._bases.keys() - bases.keys():
            del self._bases[known]
        self._nodes.set(sum(state.serving for state in states.values()))
        self._adapters.set(num_adapters)
        self._balance.set(balance)
        self._seconds.set(time.monotonic() - begun_s)

    async def _plan(self, base: str, serving: Sequence[NodeState], sizes: Mapping[str, int], term: Term) -> Plan:
        demands, versions = self._demand(base, sizes)
        if base not in self._bases:
            self._bases[base] = _Base(_plan_of(await self._homes.read_all(base)))
        mine = self._bases[base]
        fleet = Fleet.of([_replica(state) for state in serving])
        mine.plan = plan = await asyncio.to_thread(revise, mine.plan, fleet, Demands.of(demands))
        held = {state.node: self._held(base, state) for state in serving}
        await self._write(base, named_homes(plan, held), term)
        told = staging(plan, held, versions)
        await self._node_versions.note(self._told(told))
        await self._homes.publish_staging(told, term=term.epoch)
        return plan

    def _told(self, told: Mapping[str, Staging]) -> list[NodeVersion]:
        pairs = []
        for node, advice in told.items():
            for digest in advice.stage:
                version = self._versions[digest]
                assert version is not None, "a plan is made of versions that the catalogue has"
                owner, _, adapter = version.key.partition("/")
                pairs.append(NodeVersion(owner, adapter, node, digest))
        return pairs

    async def _write(self, base: str, homes: Mapping[str, tuple[str, ...]], term: Term) -> None:
        """Writes what changed; everything where the last write failed, as when Redis was away and may have forgotten."""
        mine = self._bases[base]
        changed = {key: nodes for key, nodes in homes.items() if mine.written.get(key) != nodes}
        gone = [key for key in mine.written if key not in homes]
        whole = not mine.is_whole
        mine.is_whole = False  # unless all is taken
        mine.is_whole = await self._homes.publish(base, homes if whole else changed, gone=gone, whole=whole, term=term.epoch)
        mine.written = dict(homes)

    def _demand(self, base: str, sizes: Mapping[str, int]) -> tuple[list[Demand], dict[str, tuple[str, ...]]]:
        """What is asked for of a base: adapters, and the versions of each, the most asked first.

        A version takes what its image does where one is, else about what its files do.
        """
        by_key = dict[str, list[tuple[float, str, _Version]]]()
        for digest, count in self._popularity.counts.items():
            version = self._versions.get(digest)
            if version is not None and version.base_digest == base:
                by_key.setdefault(version.key, []).append((count, digest, version))
        demands, versions = [], dict[str, tuple[str, ...]]()
        for key, found in by_key.items():
            used = sorted(found, key=lambda one: (-one[0], one[1]))[:_MAX_VERSIONS]
            versions[key] = tuple(digest for _, digest, _ in used)
            demands.append(
                Demand(
                    key=key,
                    rate=sum(count for count, _, _ in found),
                    size_bytes=sum(sizes.get(digest) or version.size_bytes for _, digest, version in used),
                    rank_rows=sum(version.max_rank for _, _, version in used),
                    slots=len(used),
                )
            )
        return demands, versions

    def _held(self, base: str, state: NodeState) -> dict[str, set[str]]:
        held = dict[str, set[str]]()
        for digest in state.holdings:
            version = self._versions.get(digest)
            if version is not None and version.base_digest == base:
                held.setdefault(version.key, set()).add(digest)
        return held

    async def _nodes_by_base(self) -> dict[str, list[str]]:
        bases = dict[str, list[str]]()
        async with self._database.transaction(NODE) as connection:
            for row in (await connection.execute(_NODES)).all():
                bases.setdefault(row.base_digest, []).append(str(row.id))
        return bases

    async def _look_up(self, digests: Iterable[str]) -> None:
        """Finds out whose versions are; what the catalogue does not have counts for nobody."""
        if len(self._versions) > _MAX_KNOWN:
            self._versions.clear()
        unknown = [digest for digest in digests if digest not in self._versions][:_LOOK_UPS]
        if not unknown:
            return
        async with self._database.transaction(NODE) as connection:
            rows = (await connection.execute(_VERSIONS, {"digests": unknown})).all()
        self._versions.update(dict.fromkeys(unknown))
        self._versions.update({row.digest: _Version(row.key, row.base_digest, row.max_rank, row.size_bytes) for row in rows})


def _replica(state: NodeState) -> Replica:
    return Replica(id=state.node, slots=state.slots, size_bytes=state.device_bytes, weight=state.max_running)


def _plan_of(homes: Mapping[str, Sequence[str]]) -> Plan:
    """The plan that was written, as far as it says where adapters are."""
    return Plan.of_pairs([(key, node) for key, nodes in homes.items() for node in nodes])
