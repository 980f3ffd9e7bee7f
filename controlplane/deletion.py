"""Ending versions: retiring them, and deleting them and adapters: rows at once, files after a grace time, by the collector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, func, insert, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.aliases import move, refuse_frozen
from controlplane.answers import (
    RACED,
    Request,
    alias_from_json,
    alias_to_json,
    answered,
    keep,
    version_from_json,
    version_to_json,
)
from controlplane.blobs import upload_folder
from controlplane.canary_tables import canaries
from controlplane.catalog import RETIRED, Alias, Version, aliases_of, change_state, find_version, lock_adapter, pointing_at
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import Database, Scope
from veneer.errors import FailedPreconditionError


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a deletion did.

    Attributes:
        versions: The version that is gone, as it was; an adapter's are only counted.
        num_versions: Versions that are gone.
        aliases: Aliases that were moved off them, as they are now.
    """

    versions: tuple[Version, ...]
    num_versions: int
    aliases: tuple[Alias, ...]


class Deletion:
    """Use cases that retire and delete. Stateless; any task may call it.

    A deleted version leaves nothing but a row of `uploads`, by which the collector removes its files, and the gap in the
    numbers of its adapter. The generations of aliases that it had a share of are forgotten with it. Its content may be published
    again, as a new version.
    """

    def __init__(self, database: Database, *, grace_s: float) -> None:
        self._database = database
        self._grace_s = grace_s

    async def retire(self, owner: str, adapter: str, digest: str, *, request_id: str = "", dry_run: bool = False) -> Version:
        """Ends a version for new requests; a second time changes nothing.

        Raises:
            NotFoundError: The owner has no such adapter or version.
            FailedPreconditionError: An alias points at it.
        """
        request = Request.of(owner, request_id, "RetireVersion", adapter, digest)
        async with self._database.transaction(Scope.of_tenant(owner), refusals=RACED, dry_run=dry_run) as connection:
            known = await answered(connection, request)
            if known is not None:
                return version_from_json(known)
            await lock_adapter(connection, owner, adapter)
            version = await find_version(connection, owner, adapter, digest)
            if version.state != RETIRED:
                held_by = [alias.name for alias in await pointing_at(connection, version)]
                if held_by:
                    raise FailedPreconditionError(f"version {digest} is served by the alias {', '.join(held_by)}; move it first")
                version = await change_state(connection, version, RETIRED)
            await keep(connection, request, version_to_json(version))
        return version

    async def version(
        self, owner: str, adapter: str, digest: str, *, force: bool = False, request_id: str = "", dry_run: bool = False
    ) -> Deleted:
        """Deletes a version.

        Args:
            owner: Tenant that owns the adapter.
            adapter: Name of the adapter.
            digest: Digest of the version.
            force: Takes it from the aliases that serve it; one that serves nothing else points at nothing then.
            request_id: The caller's own identifier of this deletion.
            dry_run: Does nothing but say what would be done.

        Raises:
            NotFoundError: The owner has no such adapter or version.
            FailedPreconditionError: An alias serves it and `force` is not set, or a frozen one does.
        """
        request = Request.of(owner, request_id, "DeleteVersion", adapter, digest, force)
        async with self._database.transaction(Scope.of_tenant(owner), refusals=RACED, dry_run=dry_run) as connection:
            known = await _answered(connection, request)
            if known is not None:
                return known
            await lock_adapter(connection, owner, adapter)
            version = await find_version(connection, owner, adapter, digest)
            moved = await self._let_go(connection, version, await pointing_at(connection, version), force=force)
            await self._remove(connection, owner, adapter, [digest])
            deleted = Deleted((version,), 1, tuple(moved))
            await _keep(connection, request, deleted)
        return deleted

    async def adapter(
        self, owner: str, adapter: str, *, force: bool = False, request_id: str = "", dry_run: bool = False
    ) -> Deleted:
        """Deletes an adapter with all its versions, aliases and grants; arguments and errors as of `version`.

        Its name may be used again. Numbers and generations go on where they ended, so that nobody takes the old for the new.
        """
        request = Request.of(owner, request_id, "DeleteAdapter", adapter, force)
        async with self._database.transaction(Scope.of_tenant(owner), refusals=RACED, dry_run=dry_run) as connection:
            known = await _answered(connection, request)
            if known is not None:
                return known
            await lock_adapter(connection, owner, adapter)
            present = (await aliases_of(connection, owner, [adapter])).get(adapter, [])
            _refuse_served(present, what=f"adapter {adapter!r}", force=force)
            moved = [await move(connection, owner, adapter, alias.name, arms=[]) for alias in present]
            v, g, a = models.versions.c, models.grants.c, models.adapters.c
            digests = (await connection.execute(select(v.digest).where(v.tenant == owner, v.adapter == adapter))).scalars().all()
            await self._remove(connection, owner, adapter, digests)
            gone = await connection.execute(delete(models.grants).where(g.tenant == owner, g.adapter == adapter))
            if gone.rowcount:
                await record(connection, Change(kind=ChangeKind.GRANT, tenant=owner, adapter=adapter))
            mine = (a.tenant == owner, a.name == adapter)
            await connection.execute(update(models.adapters).where(*mine).values(delete_time=func.now()))
            deleted = Deleted((), len(digests), tuple(moved))
            await _keep(connection, request, deleted)
        return deleted

    async def _let_go(
        self, connection: AsyncConnection, version: Version, serving: Sequence[Alias], *, force: bool
    ) -> list[Alias]:
        _refuse_served(serving, what=f"version {version.digest}", force=force)
        moved = []
        for alias in serving:
            rest = [arm for arm in alias.arms if arm.version != version.digest]
            moved.append(await move(connection, version.owner, version.adapter, alias.name, arms=rest))
        return moved

    async def _remove(self, connection: AsyncConnection, owner: str, adapter: str, digests: Sequence[str]) -> None:
        """Removes rows of versions that no alias serves, and hands their files to the collector."""
        if not digests:
            return
        a, v, r = models.arms.c, models.versions.c, models.reports.c
        of_adapter = (a.tenant == owner, a.adapter == adapter)
        # A split without one of its arms would read as another split, so its generation goes as a whole.
        shared = select(a.alias, a.generation).where(*of_adapter, a.version.in_(digests))
        await connection.execute(delete(models.arms).where(*of_adapter, tuple_(a.alias, a.generation).in_(shared)))
        c = canaries.c
        either = or_(c.version.in_(digests), c.stable.in_(digests))
        await connection.execute(delete(canaries).where(c.tenant == owner, c.adapter == adapter, either))
        await connection.execute(delete(models.reports).where(r.tenant == owner, r.version.in_(digests)))
        gone = delete(models.versions).where(v.tenant == owner, v.digest.in_(digests)).returning(v.digest, v.upload)
        folders = [upload_folder(row.digest, row.upload) for row in (await connection.execute(gone)).all()]
        await note_uploads(connection, owner, folders, grace_s=self._grace_s, are_written=True)
        changes = [Change(kind=ChangeKind.VERSION, tenant=owner, adapter=adapter, version=digest) for digest in digests]
        await record(connection, *changes)


async def note_uploads(
    connection: AsyncConnection, owner: str, folders: Sequence[str], *, grace_s: float, are_written: bool
) -> None:
    """Puts folders of the store on the collector's list.

    Args:
        connection: In the owner's scope.
        owner: Tenant that owns what is in them.
        folders: Names of the folders.
        grace_s: When they are due.
        are_written: Nobody writes into them any more, so that they are gone once they were removed.
    """
    query = insert(models.uploads).values(tenant=owner, taken=are_written, collect_time=func.now() + timedelta(seconds=grace_s))
    await connection.execute(query, [{"folder": folder} for folder in folders])


def _refuse_served(serving: Sequence[Alias], *, what: str, force: bool) -> None:
    if serving and not force:
        names = ", ".join(alias.name for alias in serving)
        raise FailedPreconditionError(f"{what} is served by the alias {names}; move it first, or force the deletion")
    for alias in serving:
        refuse_frozen(alias)


async def _answered(connection: AsyncConnection, request: Request) -> Deleted | None:
    answer = await answered(connection, request)
    if answer is None:
        return None
    versions = tuple(map(version_from_json, answer["versions"]))
    return Deleted(versions, answer["num_versions"], tuple(map(alias_from_json, answer["aliases"])))


async def _keep(connection: AsyncConnection, request: Request, deleted: Deleted) -> None:
    answer = {
        "versions": [version_to_json(version) for version in deleted.versions],
        "num_versions": deleted.num_versions,
        "aliases": [alias_to_json(alias) for alias in deleted.aliases],
    }
    await keep(connection, request, answer)
