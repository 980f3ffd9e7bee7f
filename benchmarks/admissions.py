"""How soon a revoked key is refused and a moved alias followed, under load: with Redis, and without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.control_stack import TENANT, base_of, control_stack, say_calibration
from benchmarks.random_adapters import write_adapter
from benchmarks.report import Row
from benchmarks.workload import AdapterKey
from veneer.artifact import BaseDescription
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2
from veneer.errors import UnauthenticatedError, VeneerError
from veneer.local.stack import LocalStack

_ADAPTER = "moving"
_CLIENTS = 4
"""Each with a key of its own, so with an answer of its own in the data plane's cache."""
_SETTLED_S = 0.3
_LONGEST_S = 30.0
_PAUSE_S = 0.005
_SAMPLING = generation_pb2.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Bound:
    """What is asked of one state of Redis."""

    suffix: str
    target: str


WITH_REDIS, WITHOUT_REDIS = Bound("", "<= 1"), Bound("_no_redis", "<= 5")


def measure_admissions(folder: Path, *, moves: int, revokes: int) -> list[Row]:
    """Moves an alias and revokes keys again and again under load, first with Redis and then without."""
    with control_stack(folder) as stack:
        base = base_of(folder)
        files = [write_adapter(folder / "adapters", base, AdapterKey(number, 8, "qv")) for number in range(2)]
        say_calibration()
        rows = asyncio.run(_measure(stack, base, files, WITH_REDIS, moves=moves, revokes=revokes))
        with _without(stack):
            rows += asyncio.run(_measure(stack, base, files, WITHOUT_REDIS, moves=moves, revokes=revokes))
        say_calibration()
    errors = [row for row in rows if row.id == "move_errors"]
    return [
        *(row for row in rows if row.id != "move_errors"),
        Row("move_errors", sum(row.value for row in errors), "requests", "<= 0"),
    ]


@contextmanager
def _without(stack: LocalStack) -> Iterator[None]:
    stack.valkey.kill()
    try:
        yield
    finally:
        stack.valkey.start()


@dataclass(slots=True)
class _Load:
    """Requests for the alias, one after the other from each client, until it is stopped.

    Attributes:
        admitted: When the first message of each request came, and the generation that it states. The request was admitted before.
        errors: Requests that failed.
    """

    clients: list[Client]
    admitted: list[tuple[float, int]] = field(default_factory=list)
    errors: int = 0
    latest: dict[int, int] = field(default_factory=dict)

    async def run(self, client: int) -> None:
        while True:
            try:
                async for event in self.clients[client].generate([5, 6, 7], adapter=_ADAPTER, owner=TENANT, sampling=_SAMPLING):
                    if isinstance(event, generation_pb2.Served):
                        self.admitted.append((time.perf_counter(), event.generation))
                        self.latest[client] = event.generation
            except VeneerError as error:
                self.errors += 1
                print(f"a request failed: {error.status} {error.message}", flush=True)
            await asyncio.sleep(_PAUSE_S)


async def _measure(
    stack: LocalStack, base: BaseDescription, files: list[Path], bound: Bound, *, moves: int, revokes: int
) -> list[Row]:
    owner = _client(stack, stack.state.tenant_key or "")
    clients = []
    try:
        published = [await owner.publish(path, adapter=_ADAPTER, base=base.digest, request_id=path.name) for path in files]
        versions = [one.version.digest for one in published]
        for version in versions:  # both are on the device
            await _ask(owner, version)
        for _ in range(_CLIENTS):
            key = await owner.create_key(roles=["caller"])
            clients.append(_client(stack, key.secret))
        load = _Load(clients)
        tasks = [asyncio.create_task(load.run(number)) for number in range(_CLIENTS)]
        try:
            lags = await _move(owner, versions, load, moves=moves)
            revoked = [await _revoke(stack, owner) for _ in range(revokes)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for client in (owner, *clients):
            await client.close()
    return [
        *_rows(f"revoke{bound.suffix}_s", revoked, bound.target),
        *_rows(f"move{bound.suffix}_s", lags, bound.target),
        Row("move_errors", load.errors),
    ]


def _rows(name: str, seconds: list[float], target: str) -> list[Row]:
    p50, p99, longest = (float(np.percentile(seconds, percent)) for percent in (50, 99, 100))
    print(f"{name}: {len(seconds)} times, p50 {p50:.3f}, p99 {p99:.3f}, max {longest:.3f} s", flush=True)
    return [Row(name, longest, "s", target), Row(f"{name}/p50", p50, "s"), Row(f"{name}/p99", p99, "s")]


async def _move(owner: Client, versions: list[str], load: _Load, *, moves: int) -> list[float]:
    """Moves the alias to and fro; returns the seconds from each call to the last answer from before the move."""
    steps: list[tuple[float, int]] = []
    for number in range(moves):
        start = time.perf_counter()
        alias = await owner.set_alias(_ADAPTER, {versions[number % 2]: 1})
        steps.append((start, alias.generation))
        while len(load.latest) < _CLIENTS or min(load.latest.values()) < alias.generation:
            if time.perf_counter() - start > _LONGEST_S:
                raise RuntimeError(f"a move is not followed within {_LONGEST_S:g} s")
            await asyncio.sleep(_PAUSE_S)
        await asyncio.sleep(_SETTLED_S)  # and whoever should still be admitted on what was before
    return [
        max((when - start for when, generation in load.admitted if generation < moved and when > start), default=0.0)
        for start, moved in steps
    ]


async def _revoke(stack: LocalStack, owner: Client) -> float:
    """Revokes a key in use; returns the seconds from the call to the last answer that it got."""
    key = await owner.create_key(roles=["caller"])
    last = 0.0
    async with _client(stack, key.secret) as client:
        await _ask(client)
        start = time.perf_counter()
        revoking = asyncio.create_task(owner.revoke_key(key.key.id))
        with suppress(UnauthenticatedError):
            while time.perf_counter() - start < _LONGEST_S:
                last = await _ask(client) - start
        await revoking
    return last


async def _ask(client: Client, version: str | None = None) -> float:
    """Runs a request to its end; returns when its first message came."""
    admitted = 0.0
    async for event in client.generate([5, 6, 7], adapter=_ADAPTER, owner=TENANT, version=version, sampling=_SAMPLING):
        if isinstance(event, generation_pb2.Served):
            admitted = time.perf_counter()
    return admitted


def _client(stack: LocalStack, key: str) -> Client:
    return Client(control=stack.state.control, data=stack.state.data, key=key, timeout_s=60.0)
