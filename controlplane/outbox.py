"""The relay: committed events from the outbox to Redis, as hints.

At least once, in commit order: rows leave the outbox only after Redis took them. A hint says what to look at, never what is
true, so one that comes twice, late or not at all costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane.changes import ChangeKind
from controlplane.db import Database, translated
from controlplane.locks import Lock, try_hold
from controlplane.node_versions import NodeVersions
from controlplane.pipeline import Statement
from controlplane.publish_staging import PublishStaging
from controlplane.settings import RELAY_ROLE, Settings
from veneer.controlplane.v1 import hints_pb2
from veneer.errors import UnavailableError

_LOG = logging.getLogger(__name__)

CHANNEL: Final = "veneer:hints:v1"

_BATCH = 500
_STAGED = (ChangeKind.VERSION, ChangeKind.ALIAS)
_MAX_PAUSE_S = 5.0
_TRIM_EVERY_S = 600.0
_SOCKET_TIMEOUT_S = 2.0

# Below the oldest running transaction nothing new can appear, so what is read is a prefix of the commit order. Rows are not
# locked: a lock would give this transaction a number, and the change feed would stand still while Redis makes it wait.
_TAKE = text("""
    SELECT xid::text AS xid, id, kind, tenant, adapter, version, generation FROM outbox
    WHERE xid < pg_snapshot_xmin(pg_current_snapshot()) ORDER BY outbox.xid, outbox.id LIMIT :limit
""")
_REMOVE = text("DELETE FROM outbox WHERE (xid, id) <= (CAST(CAST(:xid AS text) AS xid8), :id)")
_WAITING = Statement(
    "waiting",
    """
    SELECT count(*), coalesce(extract(epoch FROM now() - min(create_time)), 0)::float8,
           current_setting('transaction_read_only') = 'on' AS is_read_only
    FROM outbox
    """,
)
_TRIM = text("""
    WITH gone AS (DELETE FROM changes WHERE create_time < now() - make_interval(secs => :age) RETURNING xid, id)
    UPDATE change_floor f SET xid = last.xid, id = last.id
    FROM (SELECT xid, id FROM gone ORDER BY xid DESC, id DESC LIMIT 1) last WHERE (last.xid, last.id) > (f.xid, f.id)
""")
_TRIM_OUTBOX = text("DELETE FROM outbox WHERE create_time < now() - make_interval(secs => :age)")
_TRIM_REQUESTS = tuple(
    text(f"DELETE FROM {table} WHERE create_time < now() - make_interval(secs => :age)")  # noqa: S608  the names are ours
    for table in ("requests", "organization_requests")
)

_TRIM_AUDIT = text("SELECT audit_trim(make_interval(days => :days))")


class Relay:
    """Moves events from the outbox to Redis until it is stopped. Owned by the process; runs as one task.

    It outlives both servers' absence: whatever fails, it pauses, longer each time up to 5 s, and tries again. Hints that find no
    Redis wait for as long as changes are kept, so that the outbox stays bounded.
    """

    def __init__(
        self, database: Database, settings: Settings, *, node_versions: NodeVersions, registry: CollectorRegistry
    ) -> None:
        self._engine = database.relay
        self._lines = database.lines(RELAY_ROLE, _WAITING)
        self._interval_s = settings.relay_interval_s
        self._retention_s = settings.change_retention_s
        self._audit_days = settings.audit_retention_days
        url = None if settings.redis_url is None else settings.redis_url.get_secret_value()
        self._redis = None if url is None else connect(url)
        self._staging = None if self._redis is None else PublishStaging(database, self._redis, node_versions)
        self._relayed = Counter("veneer_controlplane_hints_relayed", "Hints handed to Redis.", registry=registry)
        self._failed = Counter("veneer_controlplane_relay_failures", "Rounds of the relay that failed.", registry=registry)
        self._waiting = Gauge("veneer_controlplane_outbox_events", "Events in the outbox.", registry=registry)
        self._oldest = Gauge(
            "veneer_controlplane_outbox_oldest_seconds", "Age of the oldest event in the outbox.", registry=registry
        )

    async def run(self) -> None:
        """Relays until cancelled."""
        pause = self._interval_s
        loop = asyncio.get_running_loop()
        trim_at = loop.time()
        while True:
            relayed = await self._try("relay", self._relay_all)
            pause = self._interval_s if relayed else min(pause * 2, _MAX_PAUSE_S)
            if loop.time() >= trim_at and await self._try("trim", self.trim):
                trim_at = loop.time() + _TRIM_EVERY_S
            await asyncio.sleep(pause)

    async def relay_batch(self) -> int:
        """Hands the oldest events to Redis and removes them; returns how many.

        Raises:
            RedisError: Redis is away; the events stay.
            UnavailableError: The database is away.
        """
        with translated():
            async with self._engine.begin() as connection:
                if not await self._is_ours(connection):
                    return 0
                rows = (await connection.execute(_TAKE, {"limit": _BATCH})).all()
                if not rows:
                    return 0
                if self._redis is not None and self._staging is not None:
                    staged = [row.version for row in rows if row.kind in _STAGED and row.version]
                    await self._publish(self._redis, rows, await self._staging.tell(staged))
                await connection.execute(_REMOVE, {"xid": rows[-1].xid, "id": rows[-1].id})
        self._relayed.inc(len(rows))
        return len(rows)

    async def trim(self) -> None:
        """Removes changes, stored answers and entries of the audit log past their retention, and hints of no use any more."""
        with translated():
            async with self._engine.begin() as connection:
                await connection.execute(_TRIM, {"age": self._retention_s})
                await connection.execute(_TRIM_OUTBOX, {"age": self._retention_s})
                for trim in _TRIM_REQUESTS:
                    await connection.execute(trim, {"age": self._retention_s})
            if self._audit_days:
                await self._trim_audit()

    async def _trim_audit(self) -> None:
        trimmed = 1
        while trimmed:
            async with self._engine.begin() as connection:
                trimmed = (await connection.execute(_TRIM_AUDIT, {"days": self._audit_days})).scalar_one()

    async def measure(self) -> int:
        """Returns how many events wait, and shows that and for how long the oldest has, above all while Redis is away.

        One statement on a held connection: it is all that an idle server does here.

        Raises:
            UnavailableError: The database is away.
        """
        with translated():
            [[(count, age_s, is_read_only)]] = await self._lines.ask((_WAITING, []))
        if is_read_only:  # a primary of old: what is written now, is written elsewhere
            await self._lines.renew()
            raise UnavailableError("the server takes no writes any more", retry_after_s=1.0)
        self._waiting.set(count)
        self._oldest.set(age_s)
        return int(count)

    async def close(self) -> None:
        """Closes the connection to Redis."""
        if self._redis is not None:
            with contextlib.suppress(RedisError, OSError):
                await self._redis.aclose()

    async def _relay_all(self) -> None:
        if not await self.measure():
            return
        while await self.relay_batch() == _BATCH:
            pass
        await self.measure()

    async def _try(self, work: str, run: Callable[[], Awaitable[None]]) -> bool:
        """Says whether it went well. No failure may end the relay, since nobody would start it again."""
        try:
            await run()
        except Exception as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from error  # cleaning up failed and took the cancellation's place
            self._failed.inc()
            _LOG.warning("the relay failed; what it had to do waits", extra={"work": work, "cause": type(error).__name__})
            return False
        return True

    async def _publish(self, redis: Redis, rows: Sequence[Row[Any]], told: Mapping[str, Sequence[str]]) -> None:
        async with redis.pipeline(transaction=False) as pipeline:
            for row in rows:
                nodes = told.get(row.version, ()) if row.kind in _STAGED else ()
                hint = hints_pb2.Hint(
                    kind=row.kind,
                    tenant=row.tenant,
                    adapter=row.adapter,
                    version=row.version if nodes else "",  # without nodes, data planes of before would all bring it
                    generation=row.generation,
                    nodes=nodes,
                )
                pipeline.publish(CHANNEL, hint.SerializeToString())
            await pipeline.execute()

    async def _is_ours(self, connection: AsyncConnection) -> bool:
        return await try_hold(connection, Lock.RELAY)


def connect(url: str) -> Redis:
    """Opens connections to Redis, which fail fast."""
    return Redis.from_url(
        url,
        socket_timeout=_SOCKET_TIMEOUT_S,
        socket_connect_timeout=_SOCKET_TIMEOUT_S,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 1),  # a connection that a restart broke is made again once; then the relay pauses
        health_check_interval=10,
    )
