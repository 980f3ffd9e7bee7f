"""Whether a data plane holds, after the work, what it held before."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from veneer.dataplane.v1 import admin_pb2
from veneer.operator_client import OperatorClient


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a data plane holds at one time.

    Attributes:
        requests: Requests that run or wait.
        kv_pages: KV pages in use.
        leases: Leases on adapters.
        arena_bytes: Bytes of the adapter arena in use.
        tasks: Asyncio tasks of the serving process.
    """

    requests: int
    kv_pages: int
    leases: int
    arena_bytes: int
    tasks: int

    @classmethod
    def of(cls, residency: admin_pb2.GetResidencyResponse) -> Holdings:
        """What an answer of GetResidency says."""
        engine = residency.engine
        return cls(engine.running + engine.waiting, engine.kv_pages_used, engine.leases, engine.arena_bytes_used, engine.tasks)

    def leaks_since(self, start: Holdings) -> list[str]:
        """Lists what is more than at the start, and arena bytes if they differ at all."""
        pairs = {
            "requests": (self.requests, start.requests),
            "KV pages": (self.kv_pages, start.kv_pages),
            "leases": (self.leases, start.leases),
            "tasks": (self.tasks, start.tasks),
        }
        leaks = [f"{name}: {now} now, {before} at the start" for name, (now, before) in pairs.items() if now > before]
        if self.arena_bytes != start.arena_bytes:
            leaks.append(f"arena bytes: {self.arena_bytes} now, {start.arena_bytes} at the start")
        return leaks


async def settled(operator: OperatorClient, *, timeout_s: float = 15.0) -> Holdings:
    """Waits until no request runs and two looks in a row agree; past the time it returns the last look."""
    deadline_s = time.monotonic() + timeout_s
    before = Holdings.of(await operator.residency())
    while True:
        await asyncio.sleep(0.2)
        now = Holdings.of(await operator.residency())
        if (now == before and not now.requests) or time.monotonic() > deadline_s:
            return now
        before = now


async def returned_to(start: Holdings, operator: OperatorClient, *, timeout_s: float = 15.0) -> Holdings:
    """Waits until nothing is leaked since the start; past the time it returns the last look, for `leaks_since`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        now = Holdings.of(await operator.residency())
        if not now.leaks_since(start) or time.monotonic() > deadline_s:
            return now
        await asyncio.sleep(0.2)
