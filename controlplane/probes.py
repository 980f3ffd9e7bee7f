"""Probes of versions: asked for by a publish, taken on by one node of the version's base, judged here.

A probe is a state of the version's row, so that any process may hear of its end. Nodes hear of it through the change feed and act
with their own credential: nothing here ever calls a node, and nothing that Redis says decides what passes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields

from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.catalog import READY, Version, version_of
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import NODE, Database, Scope, set_scope
from controlplane.limits import TenantLimits
from controlplane.node_versions import NodeVersion, write_down
from controlplane.probe_report import ProbeMeasures, ProbeReport, judge
from controlplane.settings import Settings
from veneer.errors import NotFoundError, ResourceExhaustedError, UnavailableError

_NONE = "there is no probe to take on"
_NOW = text("SELECT extract(epoch FROM clock_timestamp())::float8")
_RETRY_S = 5.0
_MIN_LOOK_S = 0.05
_MAX_LOOK_S = 1.0
_LOOK_PART = 0.25  # of what was waited already: so much later than it could have, a publish may end


@dataclass(frozen=True, slots=True)
class TakenProbe:
    """A probe that a node took on: whose version it is of, which tokens activate it, and what the owner may use at most."""

    owner: str
    invocation_tokens: tuple[int, ...]
    limits: TenantLimits


class Probes:
    """Use cases of probes. Owned by one event loop: it counts the publishes that may wait for one."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._places = Counter[str]()

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Holds a place for a publish with a probe.

        Raises:
            ResourceExhaustedError: This process has too many of the tenant, or in all.
        """
        for name, held in (("max_probes_per_tenant", self._places[tenant]), ("max_probes", self._places.total())):
            limit = getattr(self._settings, name)
            if held >= limit:
                refusal = (
                    f"{name}: {held} publishes with a probe are on their way, and {limit} are allowed at a time; try again later"
                )
                raise ResourceExhaustedError(refusal, retry_after_s=_RETRY_S)
        self._places[tenant] += 1
        try:
            yield
        finally:
            self._places[tenant] -= 1
            if not self._places[tenant]:
                del self._places[tenant]

    async def take(self, node_id: str, digest: str) -> TakenProbe:
        """Gives a probe to a node.

        Raises:
            NotFoundError: None is asked for of such a version of the node's base, or another node has it.
        """
        async with self._database.transaction(NODE) as connection:
            version = await _lock(connection, node_id, digest)
            if version.probe is None or version.probe.state != "ASKED" or version.probe.node or version.state != READY:
                raise NotFoundError(_NONE)
            now_s = (await connection.execute(_NOW)).scalar_one()
            await _write(connection, version, ProbeReport(state="ASKED", node=node_id, take_time_s=now_s))
            limits = await _limits(connection, version.owner)
            await set_scope(connection, NODE)
            await write_down(connection, [NodeVersion(version.owner, version.adapter, node_id, digest)])
        return TakenProbe(version.owner, version.report.invocation_tokens, limits)

    async def report(self, node_id: str, digest: str, measures: ProbeMeasures) -> ProbeReport:
        """Judges what a node measured.

        Raises:
            NotFoundError: The node did not take such a probe on, or was too slow and it was asked for anew.
        """
        async with self._database.transaction(NODE) as connection:
            version = await _lock(connection, node_id, digest)
            if version.probe is None or version.probe.state != "ASKED" or version.probe.node != node_id:
                raise NotFoundError("this node has no probe of such a version")
            norms = [one.max_norm for one in version.report.by_module if one.max_norm is not None]
            judged = judge(measures, node=node_id, max_norm=max(norms, default=None))
            await _write(connection, version, judged)
        return judged

    async def again(self, version: Version) -> None:
        """Asks for a probe anew, unless it ended meanwhile, or a node is busy with it and still has time."""
        columns = models.versions.c
        mine = (columns.tenant == version.owner, columns.digest == version.digest)
        async with self._database.transaction(Scope.of_tenant(version.owner)) as connection:
            row = (await connection.execute(select(models.versions).where(*mine).with_for_update())).one_or_none()
            if row is None:
                raise NotFoundError("the version was deleted")
            found = version_of(row)
            if found.probe is None or found.probe.state != "ASKED":
                return
            now_s = (await connection.execute(_NOW)).scalar_one()
            least_s = self._settings.probe_timeout_s - self._settings.probe_take_s  # so old it is once its publish has given up
            if not found.probe.node or now_s - found.probe.take_time_s > least_s:
                await ask(connection, found)

    async def wait(self, version: Version, *, base: str) -> ProbeReport:
        """Waits until a probe has ended.

        Args:
            version: Of which one was asked for.
            base: Name of its base, for refusals.

        Raises:
            UnavailableError: No data plane took it on in time, or the one that did gave no answer.
            NotFoundError: The version was deleted meanwhile.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        published = f"version {version.digest} is published, and no alias was moved"
        while True:
            probe = await self._read(version)
            if probe.state != "ASKED":
                return probe
            settings, waited_s = self._settings, clock() - started
            if not probe.node and waited_s > min(settings.probe_take_s, settings.probe_timeout_s):
                within = f"no data plane of base {base!r} took on the probe within {settings.probe_take_s:g} s"
                raise UnavailableError(f"{within}; {published}")
            if waited_s > settings.probe_timeout_s:
                within = f"data plane {probe.node} gave no answer to the probe within {settings.probe_timeout_s:g} s"
                raise UnavailableError(f"{within}; {published}")
            await asyncio.sleep(min(_MAX_LOOK_S, max(_MIN_LOOK_S, waited_s * _LOOK_PART)))

    async def _read(self, version: Version) -> ProbeReport:
        columns = models.versions.c
        query = select(columns.probe).where(columns.tenant == version.owner, columns.digest == version.digest)
        async with self._database.transaction(Scope.of_tenant(version.owner)) as connection:
            probe = ProbeReport.from_fields((await connection.execute(query)).scalar_one_or_none())
        if probe is None:
            raise NotFoundError("the version was deleted")
        return probe


async def ask(connection: AsyncConnection, version: Version) -> None:
    """Asks for a probe of a version, in the owner's transaction."""
    await _write(connection, version, ProbeReport(state="ASKED"))
    change = Change(kind=ChangeKind.PROBE, tenant=version.owner, adapter=version.adapter, version=version.digest)
    await record(connection, change)


async def _lock(connection: AsyncConnection, node_id: str, digest: str) -> Version:
    """Locks the row of a version of a node's base; from here on the transaction acts for the version's owner."""
    v, n = models.versions.c, models.nodes.c
    mine = (n.id == uuid.UUID(node_id)) & (n.base_digest == v.base_digest)
    query = select(v.tenant).join(models.nodes, mine).where(v.digest == digest)
    owner = (await connection.execute(query)).scalar_one_or_none()
    if owner is None:
        raise NotFoundError(_NONE)
    await set_scope(connection, Scope.of_tenant(owner))
    held = select(models.versions).where(v.tenant == owner, v.digest == digest).with_for_update()
    row = (await connection.execute(held)).one_or_none()
    if row is None:
        raise NotFoundError(_NONE)
    return version_of(row)


async def _limits(connection: AsyncConnection, tenant: str) -> TenantLimits:
    names = [one.name for one in fields(TenantLimits)]
    columns = models.tenants.c
    query = select(*(columns[name] for name in names)).where(columns.name == tenant)
    return TenantLimits(**(await connection.execute(query)).mappings().one())


async def _write(connection: AsyncConnection, version: Version, probe: ProbeReport) -> None:
    columns = models.versions.c
    mine = (columns.tenant == version.owner, columns.digest == version.digest)
    await connection.execute(update(models.versions).where(*mine).values(probe=asdict(probe)))
