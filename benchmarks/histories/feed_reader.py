"""A reader of the change feed, as a data plane is one, that keeps what it saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc

from benchmarks.histories.calls import Connection
from benchmarks.histories.history import Change, Feed
from veneer.controlplane.v1 import nodes_pb2

_PAUSE_S = 0.01
_KINDS = {
    nodes_pb2.CHANGE_KIND_VERSION: "VERSION",
    nodes_pb2.CHANGE_KIND_ALIAS: "ALIAS",
    nodes_pb2.CHANGE_KIND_GRANT: "GRANT",
    nodes_pb2.CHANGE_KIND_KEY: "KEY",
}


class FeedReader:
    """Follows the feed over all control planes in turn. Owned by one task."""

    def __init__(self, connections: Sequence[Connection], tenant: str) -> None:
        self._connections = connections
        self._tenant = tenant
        self._cursor = ""
        self._changes: list[Change] = []
        self._resets: list[int] = []
        self._turn = 0

    @property
    def feed(self) -> Feed:
        """What was seen so far."""
        return Feed(tuple(self._changes), tuple(self._resets))

    async def start(self) -> None:
        """Begins at the present end of the feed."""
        while not self._cursor:
            await self._poll()

    async def run(self) -> None:
        """Follows the feed until cancelled."""
        while True:
            await self._poll()
            await asyncio.sleep(_PAUSE_S)

    async def wait_for(self, changes: Sequence[Change], *, timeout_s: float) -> None:
        """Waits until these came, or the time is up: the checker says then what is missing."""
        deadline = time.monotonic() + timeout_s
        while not set(changes) <= set(self._changes) and time.monotonic() < deadline:  # noqa: ASYNC110  another task reads
            await asyncio.sleep(_PAUSE_S)

    async def _poll(self) -> None:
        self._turn += 1
        try:
            page = await self._connections[self._turn % len(self._connections)].changes(self._cursor)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(_PAUSE_S)
            return
        if page.reset:
            self._resets.append(len(self._changes))
        for one in page.changes:
            if one.tenant == self._tenant:
                self._changes.append(Change(_KINDS[one.kind], one.adapter, one.version, one.generation))
        self._cursor = page.next_cursor
