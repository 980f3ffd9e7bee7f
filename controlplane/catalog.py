"""Adapters and versions of a tenant, and reading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Row, and_, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import Database, Scope
from controlplane.paging import page_limit, page_start, page_token
from controlplane.probe_report import ProbeReport
from veneer.artifact import Report
from veneer.errors import NotFoundError
from veneer.signature import SignatureReport

READY = "READY"
RETIRED = "RETIRED"
QUARANTINED = "QUARANTINED"
STABLE = "stable"
"""The default alias."""

NO_ADAPTER = "there is no such adapter"
NO_VERSION = "there is no such version"


@dataclass(frozen=True, slots=True)
class Arm:
    """A share of an alias's traffic.

    Attributes:
        version: Digest of the version that it serves.
        weight: Share relative to the other arms; 1 to 10000.
    """

    version: str
    weight: int


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that points at one version or at a weighted split, or at nothing any more.

    Attributes:
        name: Unique in its adapter.
        generation: Counts its moves.
        arms: What it points at.
        update_time: When it was last moved.
        frozen: It cannot be moved.
    """

    name: str
    generation: int
    arms: tuple[Arm, ...]
    update_time: datetime
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Adapter:
    """A named fine-tune of one tenant, with its aliases by name."""

    owner: str
    name: str
    aliases: tuple[Alias, ...]
    num_versions: int
    create_time: datetime


@dataclass(frozen=True, slots=True)
class Version:
    """An immutable artifact; only its state changes."""

    digest: str
    owner: str
    adapter: str
    number: int
    base_digest: str
    state: str
    size_bytes: int
    report: Report
    label: str
    create_time: datetime
    retire_time: datetime | None
    labels: Mapping[str, str] = field(default_factory=dict)
    training_run: str = ""
    data_digest: str = ""
    probe: ProbeReport | None = None
    signature: SignatureReport | None = None


class Catalog:
    """Reads of adapters and versions, and the end of a version. Stateless; any task may call it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def adapter(self, owner: str, name: str) -> Adapter:
        """One adapter with its aliases.

        Raises:
            NotFoundError: The owner has no such adapter.
        """
        columns = models.adapters.c
        query = select(models.adapters).where(columns.tenant == owner, columns.name == name, columns.delete_time.is_(None))
        async with self._database.transaction(Scope.of_tenant(owner)) as connection:
            found = await _with_aliases(connection, owner, (await connection.execute(query)).all())
        if not found:
            raise NotFoundError(NO_ADAPTER)
        return found[0]

    async def adapters(self, owner: str, *, page_size: int, token: str) -> tuple[list[Adapter], str]:
        """A page of the owner's adapters by name, and the next page's token."""
        limit = page_limit(page_size)
        start = page_start("adapters", token, kinds=[str])
        columns = models.adapters.c
        mine = (columns.tenant == owner, columns.delete_time.is_(None))
        query = select(models.adapters).where(*mine).order_by(columns.name).limit(limit + 1)
        if start is not None:
            query = query.where(columns.name > start[0])
        async with self._database.transaction(Scope.of_tenant(owner)) as connection:
            rows = (await connection.execute(query)).all()
            adapters = await _with_aliases(connection, owner, rows[:limit])
        return adapters, page_token("adapters", [adapters[-1].name]) if len(rows) > limit else ""

    async def versions(self, owner: str, adapter: str, *, page_size: int, token: str) -> tuple[list[Version], str]:
        """A page of an adapter's versions, newest first, and the next page's token.

        Raises:
            NotFoundError: The owner has no such adapter.
        """
        limit = page_limit(page_size)
        start = page_start(f"versions/{adapter}", token, kinds=[int])
        columns = models.versions.c
        query = select(models.versions).where(columns.tenant == owner, columns.adapter == adapter)
        if start is not None:
            query = query.where(columns.number < start[0])
        query = query.order_by(columns.number.desc()).limit(limit + 1)
        a = models.adapters.c
        exists = select(a.name).where(a.tenant == owner, a.name == adapter, a.delete_time.is_(None))
        async with self._database.transaction(Scope.of_tenant(owner)) as connection:
            rows = (await connection.execute(query)).all()
            if not rows and (await connection.execute(exists)).one_or_none() is None:
                raise NotFoundError(NO_ADAPTER)
        versions = [version_of(row) for row in rows[:limit]]
        return versions, page_token(f"versions/{adapter}", [versions[-1].number]) if len(rows) > limit else ""


async def lock_adapter(connection: AsyncConnection, owner: str, adapter: str) -> int:
    """Takes the lock under which an adapter's versions and aliases change; returns its number of versions.

    Raises:
        NotFoundError: The owner has no such adapter.
    """
    columns = models.adapters.c
    mine = (columns.tenant == owner, columns.name == adapter, columns.delete_time.is_(None))
    query = select(columns.num_versions).where(*mine).with_for_update()
    num_versions = (await connection.execute(query)).scalar_one_or_none()
    if num_versions is None:
        raise NotFoundError(NO_ADAPTER)
    return int(num_versions)


async def find_version(connection: AsyncConnection, owner: str, adapter: str, digest: str) -> Version:
    """A version of an adapter.

    Raises:
        NotFoundError: The adapter has no such version.
    """
    columns = models.versions.c
    query = select(models.versions).where(columns.tenant == owner, columns.adapter == adapter, columns.digest == digest)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFoundError(NO_VERSION)
    return version_of(row)


async def change_state(connection: AsyncConnection, version: Version, state: str) -> Version:
    """Writes a version's new state and tells the feed."""
    columns = models.versions.c
    query = models.versions.update().where(columns.tenant == version.owner, columns.digest == version.digest).values(state=state)
    if state == RETIRED:
        query = query.values(retire_time=func.now())
    row = (await connection.execute(query.returning(*columns))).one()
    change = Change(kind=ChangeKind.VERSION, tenant=version.owner, adapter=version.adapter, version=version.digest)
    await record(connection, change)
    return version_of(row)


async def aliases_of(
    connection: AsyncConnection, owner: str, adapters: Sequence[str], *, alias: str | None = None
) -> dict[str, list[Alias]]:
    """Present aliases of adapters by the adapter's name, each list by alias name; all of them, or the one with a name.

    An alias that points at nothing any more is none.
    """
    a, b = models.aliases.c, models.arms.c
    same = and_(b.tenant == a.tenant, b.adapter == a.adapter, b.alias == a.name, b.generation == a.generation)
    query = (
        select(a.adapter, a.name, a.generation, a.update_time, a.frozen, b.version, b.weight)
        .join(models.arms, same)
        .where(a.tenant == owner, a.adapter.in_(adapters))
        .order_by(a.adapter, a.name, b.position)
    )
    if alias is not None:
        query = query.where(a.name == alias)
    found: dict[str, list[Alias]] = {}
    for row in (await connection.execute(query)).all():
        aliases = found.setdefault(row.adapter, [])
        arm = Arm(row.version, row.weight)
        if aliases and aliases[-1].name == row.name:
            aliases[-1] = replace(aliases[-1], arms=(*aliases[-1].arms, arm))
        else:
            aliases.append(Alias(row.name, row.generation, (arm,), row.update_time, row.frozen))
    return found


def version_of(row: Row[Any]) -> Version:
    """A version from its row."""
    return Version(
        digest=row.digest,
        owner=row.tenant,
        adapter=row.adapter,
        number=row.number,
        base_digest=row.base_digest,
        state=row.state,
        size_bytes=row.config_bytes + row.weights_bytes,
        report=Report.from_fields(row.report),
        label=row.label,
        create_time=row.create_time,
        retire_time=row.retire_time,
        labels=row.labels,
        training_run=row.training_run,
        data_digest=row.data_digest,
        probe=ProbeReport.from_fields(row.probe),
        signature=SignatureReport.from_fields(row.signature),
    )


async def _with_aliases(connection: AsyncConnection, owner: str, rows: Sequence[Row[Any]]) -> list[Adapter]:
    aliases = await aliases_of(connection, owner, [row.name for row in rows]) if rows else {}
    return [Adapter(owner, row.name, tuple(aliases.get(row.name, ())), row.num_versions, row.create_time) for row in rows]


async def pointing_at(connection: AsyncConnection, version: Version) -> list[Alias]:
    """Aliases that serve a version."""
    present = (await aliases_of(connection, version.owner, [version.adapter])).get(version.adapter, [])
    return [alias for alias in present if any(arm.version == version.digest for arm in alias.arms)]
