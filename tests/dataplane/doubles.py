"""Stand-ins for parts of the data plane, and records to test with."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from dataplane.blob_grants import Blob, Grant
from dataplane.engine.messages import Delta, FinishReason, Holding, State, Submit
from dataplane.metrics import Metrics
from dataplane.resolution import Answer, Arm, Caller, Refusal, Resolution
from veneer.artifact import version_digest
from veneer.errors import NotFoundError, VeneerError

BASE = "b" * 64
VERSION = "a" * 64
OTHER = "c" * 64


def make_metrics() -> Metrics:
    """Metrics in a registry of their own."""
    return Metrics(CollectorRegistry(), base_name="tiny")


def make_state(*holdings: Holding, **changes: Any) -> State:
    """A state of an engine that holds this and does nothing."""
    counters = dict.fromkeys(
        (
            "token", "running", "waiting", "kv_pages_used", "kv_pages_total", "arena_bytes_used", "arena_bytes_total", "leases",
            "steps", "max_adapters_in_step", "max_rows_in_step", "mixed_steps", "generated_tokens", "device_hits", "host_hits",
            "store_loads", "evictions",
        ),
        0,
    )  # fmt: skip
    return State(holdings=holdings, **(counters | changes))


def caller(*, tenant: str = "acme", fallback_allowed: bool = True, expire_unix_s: float | None = None, **more: Any) -> Caller:
    """A caller as the control plane tells of it."""
    return Caller(tenant, "key-1", fallback_allowed, 1, b"s" * 32, expire_unix_s, **more)


def resolution(
    *weights: int,
    state: str = "READY",
    generation: int = 1,
    alias: str = "stable",
    invocation: tuple[int, ...] = (),
    previous: Arm | None = None,
    ticket: bytes = b"",
) -> Resolution:
    """A resolution with an arm for each weight; none is the base."""
    versions = (VERSION, OTHER, "d" * 64, "e" * 64)
    arms = tuple(
        Arm(versions[place], place + 1, weight, 8, 1000, state, invocation, previous, ticket)
        for place, weight in enumerate(weights)
    )
    if not arms:
        return Resolution("", "", "", 0, (), b"")
    return Resolution("acme", "bot", alias, generation, arms, b"salt" if len(arms) > 1 else b"")


def answer(outcome: Resolution | Refusal, *, fallback_allowed: bool = True, **more: Any) -> Answer:
    """An answer for the usual caller."""
    return Answer(caller(fallback_allowed=fallback_allowed, **more), outcome)


def delta(*ids: int, index: int = 0, finish: FinishReason | None = None) -> Delta:
    """Tokens of some request."""
    return Delta("r", index, ids, finish, 3)


class ScriptedEngine:
    """An engine whose requests do what the test says.

    Attributes:
        submits: What was submitted.
        aborted: Identifiers of requests whose iterator was closed before the end.
        calls: What was told about images, in order.
        script: What each request yields; errors are raised. When it is over without a finish, the request hangs.
        gates: Event that a request of this version (None is the base) waits for first.
    """

    def __init__(self, script: Iterable[Delta | VeneerError] = ()) -> None:
        self.script: Sequence[Delta | VeneerError] = tuple(script)
        self.submits: list[Submit] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[str, ...]] = []
        self.gates: dict[str | None, asyncio.Event] = {}
        self.taken = asyncio.Condition()
        self.num_taken = 0

    async def submit(self, submit: Submit, /) -> AsyncIterator[Delta]:
        self.submits.append(submit)
        ended = False
        try:
            if (gate := self.gates.get(submit.version)) is not None:
                await gate.wait()
            for item in self.script:
                if isinstance(item, VeneerError):
                    ended = True
                    raise item
                ended = item.finish is not None
                self.num_taken += 1
                yield item
                async with self.taken:
                    self.taken.notify_all()
            if not ended:
                await asyncio.Event().wait()
        finally:
            if not ended:
                self.aborted.append(submit.request_id)

    async def until_taken(self, count: int) -> None:
        """Waits until so many deltas were read, all requests together."""
        async with self.taken:
            await self.taken.wait_for(lambda: self.num_taken >= count)

    def stage(self, version: str, path: str, /) -> None:
        self.calls.append(("stage", version, path))

    def unstage(self, version: str, /, *, drop_device: bool = False) -> None:
        self.calls.append(("unstage", version, "drop" if drop_device else ""))

    def fail(self, version: str, status: str, message: str, /) -> None:
        self.calls.append(("fail", version, status))


class FolderSource:
    """A store that holds one PEFT folder as a version, and can be told to lie.

    Attributes:
        version: Digest of the version.
        faults: By file, what to do with it in each of its next transfers: called with the bytes, returns what is sent. An error
            is raised after the first half.
        offsets: By file, the offset of every transfer that was asked for.
        reported: Versions reported as corrupt.
        open: While it is cleared no transfer goes on.
    """

    def __init__(self, folder: Path, *, base_digest: str, owner: str = "acme", part_bytes: int = 1000) -> None:
        self.files = {name: (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}
        self.version = version_digest(owner, base_digest, digests)
        blobs = tuple(Blob(name, digests[name], len(data), "") for name, data in self.files.items())
        self.grant = Grant("grant", blobs, base_digest, owner)
        self.faults: dict[str, list[object]] = {name: [] for name in self.files}
        self.offsets: dict[str, list[int]] = {name: [] for name in self.files}
        self.reported: list[str] = []
        self.num_grants = 0
        self.num_running = self.max_running = 0
        self.open = asyncio.Event()
        self.open.set()
        self._part_bytes = part_bytes

    @property
    def num_transfers(self) -> int:
        """Transfers that were asked for."""
        return sum(map(len, self.offsets.values()))

    async def grant_blobs(self, version: str, *, operator_key_digest: bytes = b"") -> Grant:
        self.num_grants += 1
        if version != self.version:
            raise NotFoundError("no such adapter, alias or version")
        return self.grant

    async def read_blob(self, grant: Grant, blob: Blob, *, offset: int, idle_s: float) -> AsyncIterator[bytes]:
        self.offsets[blob.name].append(offset)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await self.open.wait()
            data = self.files[blob.name]
            faults = self.faults[blob.name]
            fault = faults.pop(0) if faults else None
            if callable(fault):
                data = fault(data)
            parts = [data[place : place + self._part_bytes] for place in range(offset, len(data), self._part_bytes)]
            for place, part in enumerate(parts):
                if isinstance(fault, VeneerError) and place >= len(parts) // 2:
                    raise fault
                await asyncio.sleep(0)
                yield part
        finally:
            self.num_running -= 1

    async def report_corrupt(self, version: str) -> None:
        self.reported.append(version)


async def until(holds: Callable[[], object], *, limit_s: float = 30.0) -> None:
    """Lets other tasks run until something holds."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110  what is watched belongs to the code under test, which has no event for it
            await asyncio.sleep(0)
