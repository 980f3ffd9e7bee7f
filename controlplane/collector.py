"""The collector: removes from the object store what no version owns.

Every folder of the store has a row: in `versions` once it is published, in `uploads` before that and after its version was
deleted. A row of `uploads` is written before the first byte, so that whatever a crash leaves behind is known; and no folder is
ever used twice, so that a removal that comes late can only meet what was to be removed.

It also drops rows that nothing can ask for any more: leases of files that ended, versions that no node was told of for 30 days,
and what was taken of journals of use that are over.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge
from sqlalchemy import text

from controlplane.blobs import Blobs
from controlplane.db import Database, translated
from controlplane.leader import Leadership, Term
from controlplane.settings import Settings
from veneer.errors import UnavailableError, VeneerError

_LOG = logging.getLogger(__name__)
_BATCH = 100

# A folder that was never published is taken twice, a whole grace apart: a writer that was stopped in the middle cannot publish
# any more once it is taken, but may still have a file to write.
_TAKE = text("""
    WITH due AS (
        SELECT tenant, folder, taken FROM uploads u WHERE collect_time <= now()
            AND NOT EXISTS (SELECT FROM blob_leases l WHERE l.tenant = u.tenant AND l.folder = u.folder AND l.end_time > now())
        ORDER BY collect_time LIMIT :limit FOR UPDATE SKIP LOCKED)
    UPDATE uploads u SET taken = true, collect_time = now() + make_interval(secs => :grace)
    FROM due WHERE u.tenant = due.tenant AND u.folder = due.folder
    RETURNING u.tenant, u.folder, due.taken AS taken_before
""")
_LET_GO = text("DELETE FROM uploads WHERE tenant = :tenant AND folder = :folder AND taken")
_TRIM_LEASES = text("DELETE FROM blob_leases WHERE end_time < now()")
_TRIM_NODE_VERSIONS = text("DELETE FROM node_versions WHERE use_time < now() - interval '30 days'")
_OLD_JOURNAL = """
    j.end_time < now() - make_interval(secs => :journal_grace) OR EXISTS (
        SELECT FROM nodes n WHERE n.id = j.node AND n.revoke_time < now() - make_interval(secs => :journal_grace))
"""
_TRIM_JOURNALS = text(f"DELETE FROM usage_journals j WHERE {_OLD_JOURNAL}")  # noqa: S608  constants
_LOOK = text(f"""
    SELECT (SELECT count(*) FROM uploads WHERE collect_time <= now()) AS due,
           EXISTS (SELECT FROM blob_leases WHERE end_time < now() - interval '1 hour') AS old_leases,
           EXISTS (SELECT FROM node_versions WHERE use_time < now() - interval '30 days') AS old_versions,
           EXISTS (SELECT FROM usage_journals j WHERE {_OLD_JOURNAL}) AS old_journals
""")  # noqa: S608  constants


@dataclass(frozen=True, slots=True)
class _Folder:
    tenant: str
    name: str
    taken_before: bool


class Collector:
    """Removes folders that are due, in one control-plane process at a time. Owned by the process; `run` is its one task."""

    def __init__(self, database: Database, blobs: Blobs, settings: Settings, *, registry: CollectorRegistry) -> None:
        self._engine = database.relay
        self._blobs = blobs
        self._leadership = Leadership(database, "collector")
        self._interval_s = settings.collect_interval_s
        self._grace_s = settings.upload_grace_s
        self._journal_grace = {"journal_grace": settings.usage_journal_grace_s}
        self._removed = Counter("veneer_controlplane_blobs_removed", "Files removed from the store.", registry=registry)
        self._failed = Counter("veneer_controlplane_collector_failures", "Rounds that failed.", registry=registry)
        self._due = Gauge("veneer_controlplane_uploads_due", "Folders that are due to be removed.", registry=registry)

    async def run(self) -> None:
        """Collects until cancelled."""
        while True:
            try:
                await self.collect()
            except VeneerError as error:
                self._failed.inc()
                _LOG.warning("the collector failed; what it had to do waits", extra={"cause": type(error).__name__})
            await asyncio.sleep(self._interval_s)

    async def collect(self) -> int:
        """Removes every folder that is due; returns how many were let go; none while another process is at it.

        Raises:
            UnavailableError: The database is away.
            AbortedError: Another process has begun in the meantime.
        """
        if not await self._has_work():
            return 0
        num_gone = 0
        async with self._leadership.term() as term:
            if term is None:
                return 0
            while folders := await self._take(term):
                gone = [folder for folder in folders if await self._remove(folder) and folder.taken_before]
                await self._let_go(term, gone)
                num_gone += len(gone)
        return num_gone

    async def _has_work(self) -> bool:
        with translated():
            async with self._engine.begin() as connection:
                row = (await connection.execute(_LOOK, self._journal_grace)).one()
        self._due.set(row.due)
        return bool(row.due or row.old_leases or row.old_versions or row.old_journals)

    async def _take(self, term: Term) -> list[_Folder]:
        with translated():
            async with self._engine.begin() as connection:
                await term.fence(connection)
                rows = (await connection.execute(_TAKE, {"limit": _BATCH, "grace": self._grace_s})).all()
                if not rows:
                    await connection.execute(_TRIM_LEASES)
                    await connection.execute(_TRIM_NODE_VERSIONS)
                    await connection.execute(_TRIM_JOURNALS, self._journal_grace)
        return [_Folder(row.tenant, row.folder, row.taken_before) for row in rows]

    async def _remove(self, folder: _Folder) -> bool:
        try:
            self._removed.inc(await self._blobs.remove(folder.name))
        except UnavailableError:
            self._failed.inc()
            _LOG.warning("a folder of the store could not be removed; it waits", extra={"folder": folder.name})
            return False
        return True

    async def _let_go(self, term: Term, folders: list[_Folder]) -> None:
        if not folders:
            return
        with translated():
            async with self._engine.begin() as connection:
                await term.fence(connection)
                await connection.execute(_LET_GO, [{"tenant": one.tenant, "folder": one.name} for one in folders])
