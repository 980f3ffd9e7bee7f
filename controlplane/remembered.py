"""What was read from the catalogue and still holds: forgotten when the change feed tells of a change, and asked before each use.

An answer from memory is as fresh as one from the database. Before it is given, the feed is read by a query that begins after the
question came (one query for all questions that wait, `Coalesced`), and what that tells of is forgotten. Nothing is answered from
memory while the database cannot be reached.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any, Final, Generic, TypeVar

import psycopg

from controlplane.changes import NODE_KEYS, ChangeKind
from controlplane.coalesced import Coalesced
from controlplane.db import Database, translated
from controlplane.pipeline import Pipeline, Rows, Statement
from controlplane.settings import RELAY_ROLE
from veneer.errors import UnavailableError

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")
_N = TypeVar("_N", bound=Hashable)

Subject = tuple[str, str]
"""Tenant and adapter that an entry depends on; the adapter is empty for what is about the tenant alone."""
SOON_S: Final = 60.0
"""Credentials that end within this time are asked about each time: only the database's clock may tell whether they have."""

_PAUSE_S: Final = 0.002
"""From one look to the next: with many calls each look costs a switch to Postgres and back, which more of them may share."""
_MAX_ENTRIES: Final = 100_000
_MAX_ANSWERS: Final = 65_536
_SHARES: Final = 16
"""Of a memory that is full, a tenant with more than one of so many equal parts makes room out of its own."""
_OF_TENANTS: Final = (ChangeKind.KEY, ChangeKind.TRUST)
_OF_ADAPTERS: Final = (ChangeKind.VERSION, ChangeKind.ALIAS, ChangeKind.GRANT, ChangeKind.PROBE)
_MAX_CONNECTION_S: Final = 60.0
# What this snapshot shows and the one before did not has a number from the older one's xmin on.
_NOW = Statement(
    "now",
    "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS xmin, pg_postmaster_start_time()::text AS server",
)
_LOOK = Statement(
    "look",
    """
    SELECT pg_snapshot_xmin(now.snapshot)::text::bigint AS xmin, c.xid::text::bigint AS xid, c.id, c.kind, c.tenant, c.adapter,
           current_setting('transaction_read_only') = 'on' AS is_read_only,
           extract(epoch FROM clock_timestamp())::float8 AS time_s
    FROM (SELECT pg_current_snapshot() AS snapshot) now
    LEFT JOIN changes c ON c.xid >= CAST($1::text AS xid8)
    """,
)


def node_subject(node_id: str) -> Subject:
    """What entries about a node depend on; no tenant has an empty name."""
    return "", node_id


class Memory(Generic[_K, _V]):
    """Entries by key, each about some subjects, no subject twice; the least recently used go first. Owned by one event loop.

    A tenant alone may fill it; but one that asks for very many things takes the room of others up to a share and no more.
    """

    def __init__(self, *, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[_K, tuple[_V, Sequence[Subject], str]] = OrderedDict()
        self._of: dict[str, OrderedDict[_K, None]] = {}
        self._about: dict[Subject, dict[_K, None]] = {}
        self.epoch = 0
        """Moves on with everything that is forgotten: what was read before is then kept by nobody."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: _K) -> _V | None:
        """The entry, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        self._of[entry[2]].move_to_end(key)
        return entry[0]

    def put(self, key: _K, value: _V, *, about: Sequence[Subject], epoch: int, tenant: str = "") -> None:
        """Keeps what a tenant asked for and was read since the epoch was this, unless something was forgotten meanwhile."""
        if epoch != self.epoch:
            return
        self.drop(key)
        self._entries[key] = value, about, tenant
        own = self._of.setdefault(tenant, OrderedDict())
        own[key] = None
        for subject in about:
            self._about.setdefault(subject, {})[key] = None
        if len(self._entries) > self._max_entries:
            self.drop(next(iter(own if len(own) > self._max_entries // _SHARES else self._entries)))

    def drop(self, key: _K) -> None:
        """Takes one entry out."""
        if key not in self._entries:
            return
        _, about, tenant = self._entries.pop(key)
        _take_out(self._of, tenant, key)
        for subject in about:
            _take_out(self._about, subject, key)

    def forget(self, about: Subject) -> None:
        """Takes out what is about a subject."""
        self.epoch += 1
        for key in tuple(self._about.get(about, ())):
            self.drop(key)

    def clear(self) -> None:
        """Takes everything out."""
        self.epoch += 1
        self._entries.clear()
        self._of.clear()
        self._about.clear()


def _take_out(index: MutableMapping[_N, Any], name: _N, key: Hashable) -> None:
    keys = index[name]
    del keys[key]
    if not keys:
        del index[name]


class Freshness:
    """Has memories forget what changed before they are used. Owned by one event loop; closed at its end.

    Attributes:
        tenants: What is about a tenant and its keys, by subjects without an adapter.
        adapters: What is about an adapter.
        nodes: What is about a node and its keys; see `node_subject`.
        answers: What is about a node, a tenant and, for most, an adapter: whole answers.
        node_versions: Pairs that were noted; see `controlplane.node_versions`.
    """

    def __init__(self, database: Database) -> None:
        self.tenants = Memory[Any, Any]()
        self.adapters = Memory[Any, Any]()
        self.nodes = Memory[Any, Any]()
        self.answers = Memory[Any, Any](max_entries=_MAX_ANSWERS)
        self.node_versions = Memory[Any, Any]()
        self._database = database
        self._looks = Coalesced[None, None](self._look, pause_s=_PAUSE_S)
        self._connection: Pipeline | None = None
        self._opened_s = 0.0
        self._server: str | None = None
        self._ahead_s = 0.0
        self._since = 0
        self._seen: frozenset[tuple[int, int]] = frozenset()

    async def check(self) -> None:
        """Returns when all that was committed before this call is forgotten.

        Raises:
            UnavailableError: The database is away; everything is forgotten.
        """
        await self._looks.get(None)

    @property
    def now_s(self) -> float:
        """The database's time since the epoch, by its last look and what went by since; never less.

        This machine's clock may be set otherwise.
        """
        return time.monotonic() + self._ahead_s

    async def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    async def _look(self, _: None) -> None:
        is_held = self._connection is not None
        try:
            async with asyncio.timeout(self._database.answer_s):  # a server that hangs ends no connection by itself
                rows = await self._read()
        except (psycopg.Error, TimeoutError) as error:
            await self._give_up()
            if not is_held:
                raise UnavailableError("the database is away", retry_after_s=1.0) from error
            await self._look(None)  # the connection may have been older than the database's last start, or to a server that hangs
            return
        except BaseException:
            await self._give_up()
            raise
        changes = [row for row in rows if row[2] is not None]
        for _xmin, xid, number, kind, tenant, adapter, *_more in changes:
            if (xid, number) not in self._seen:
                self._forget(kind, tenant, adapter)
        self._since = rows[0][0]
        self._seen = frozenset((row[1], row[2]) for row in changes if row[1] >= self._since)

    async def _read(self) -> Rows:
        if self._connection is not None and time.monotonic() - self._opened_s > _MAX_CONNECTION_S:
            await self._give_up()  # the database may have moved to another server
        connection = self._connection or await self._open()
        asked_s = time.monotonic()
        [rows] = await connection.ask((_LOOK, [str(self._since).encode()]))
        if rows[0][6]:  # a primary of old: what is written now, is written elsewhere
            raise psycopg.errors.ReadOnlySqlTransaction("the server takes no writes any more")
        self._ahead_s = rows[0][7] - asked_s
        return rows

    async def _open(self) -> Pipeline:
        connection = await self._database.open(RELAY_ROLE, _NOW, _LOOK)
        try:
            with translated():
                [[(xmin, server)]] = await connection.ask((_NOW, []))
            if self._server not in (None, server):
                await self._database.renew()  # what is remembered may not be read from the server of before
        except BaseException:
            await connection.close()
            raise
        self._since, self._seen, self._server = xmin, frozenset(), server
        self.forget_all()  # what was read before this may be of another server
        self._connection = connection
        self._opened_s = time.monotonic()
        return connection

    async def _give_up(self) -> None:
        self.forget_all()
        broken, self._connection = self._connection, None
        if broken is not None:
            await broken.close()

    def _forget(self, kind: int, tenant: str, adapter: str) -> None:
        if kind in _OF_TENANTS:
            memory, subject = self.tenants, (tenant, "")
        elif kind in _OF_ADAPTERS:
            memory, subject = self.adapters, (tenant, adapter)
        elif kind == NODE_KEYS:
            memory, subject = self.nodes, node_subject(adapter)  # where other changes name an adapter
        else:
            self.forget_all()
            return
        memory.forget(subject)
        self.answers.forget(subject)

    def forget_all(self) -> None:
        """Forgets everything."""
        for memory in (self.tenants, self.adapters, self.nodes, self.answers, self.node_versions):
            memory.clear()
