"""What end-to-end tests do to a running system: generate, watch, wait, and signal its processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.fixtures.stack import DATA_SETTINGS
from veneer.client import Client
from veneer.dataplane.v1 import admin_pb2
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import DeadlineExceededError, UnavailableError, VeneerError
from veneer.local.stack import LocalStack
from veneer.messages import RawText
from veneer.operator_client import OperatorClient

T = TypeVar("T")

WAIT_S = 60.0
"""How long a test waits for what must come; far more than it takes, since the machine may be busy."""

_POLL_S = 0.02
_UNIT_BYTES = int(DATA_SETTINGS["arena_unit_bytes"])


@dataclass(slots=True)
class Answer:
    """What came of one stream; `error` when it did not end well."""

    served: pb.Served | None = None
    text: str = ""
    num_tokens: int = 0
    finish: pb.Finish | None = None
    error: VeneerError | None = None


def greedy(max_tokens: int) -> pb.SamplingParams:
    """So many tokens, the likeliest each time."""
    return pb.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


async def generate(client: Client, adapter: str = "", *, max_tokens: int = 8, prompt: str = "hello", **more: Any) -> Answer:
    """A whole answer.

    Raises:
        VeneerError: It did not end well.
    """
    answer = await Stream(client, adapter, max_tokens=max_tokens, prompt=prompt, **more).read()
    if answer.error is not None:
        raise answer.error
    return answer


class Stream:
    """One stream, read piece by piece. Owned by the test's task.

    Attributes:
        answer: What came so far.
    """

    def __init__(self, client: Client, adapter: str = "", *, max_tokens: int, prompt: str = "hello", **more: Any) -> None:
        self.answer = Answer()
        given = RawText(prompt) if isinstance(prompt, str) else prompt
        self._events = client.generate(given, adapter=adapter, sampling=greedy(max_tokens), **more)

    async def first(self) -> Answer:
        """Reads up to the first tokens."""
        while self.answer.num_tokens == 0 and await self._step():
            pass
        return self.answer

    async def read(self) -> Answer:
        """Reads to the end."""
        while await self._step():
            pass
        return self.answer

    async def read_tokens(self, count: int) -> Answer:
        """Reads until so many tokens came."""
        while self.answer.num_tokens < count and await self._step():
            pass
        return self.answer

    async def close(self) -> None:
        """Goes away, as a caller does that has lost its interest."""
        await self._events.aclose()

    async def _step(self) -> bool:
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            return False
        except VeneerError as error:
            self.answer.error = error
            return False
        match event:
            case pb.Served():
                self.answer.served = event
            case pb.Chunk():
                assert event.index == self.answer.num_tokens
                self.answer.text += event.text
                self.answer.num_tokens += len(event.ids)
            case pb.Finish():
                self.answer.finish = event
        return True


async def until(holds: Callable[[], Awaitable[T]], *, within_s: float = WAIT_S) -> T:
    """Asks again and again until the answer is true; returns it.

    A plane that is away for now counts as not yet. What the last answer was is part of the failure.
    """
    end_s = time.monotonic() + within_s
    last: object = None
    while True:
        try:
            last = answer = await holds()
            if answer:
                return answer
        except (UnavailableError, DeadlineExceededError) as error:
            last = error
        assert time.monotonic() < end_s, f"not so within {within_s:g} s; at last: {last!r}"
        await asyncio.sleep(_POLL_S)


async def until_not(admitted: Callable[[], Awaitable[bool]]) -> None:
    """Asks until the answer is no; a plane that is away meanwhile is a failure.

    How soon that must be is the subject of tests with a clock of their own (`test_resolve_cache`, `test_change_feed`) and of
    `benchmarks`: on a busy machine the time that passes here says nothing of the planes.
    """

    async with asyncio.timeout(WAIT_S):
        while await admitted():  # noqa: ASYNC110  what is watched is another process
            await asyncio.sleep(_POLL_S)


async def aside(act: Callable[..., T], *arguments: Any) -> T:
    """Does what blocks, such as starting a process, on another thread."""
    return await asyncio.to_thread(act, *arguments)


@contextlib.asynccontextmanager
async def conserved(operator: OperatorClient) -> AsyncIterator[None]:
    """Checks that everything that requests take is given back: pages, leases, seats, places in the queue, arena bytes, tasks."""
    before = await until(lambda: idle(operator, max_tasks=None))
    yield
    await until(lambda: idle(operator, max_tasks=before.engine.tasks))


async def idle(operator: OperatorClient, *, max_tasks: int | None) -> admin_pb2.GetResidencyResponse | None:
    """What the data plane holds, when no request holds anything and every arena byte belongs to a resident version."""
    found = await operator.residency()
    engine = found.engine
    held = (engine.running, engine.waiting, engine.kv_pages_used, engine.leases, sum(one.leases for one in found.versions))
    on_device = [one for one in found.versions if one.tier in (admin_pb2.TIER_DEVICE, admin_pb2.TIER_LOADING)]
    arena_bytes = sum(-(-one.size_bytes // _UNIT_BYTES) * _UNIT_BYTES for one in on_device)
    if held != (0, 0, 0, 0, 0) or engine.arena_bytes_used != arena_bytes:
        return None
    return found if max_tasks is None or engine.tasks <= max_tasks else None


def engine_pid(stack: LocalStack) -> int:
    """Process id of the engine that the data plane runs now."""
    parent = stack.data_plane.process.pid
    assert parent is not None
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            is_child = int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent
            if is_child and b"dataplane.engine" in (folder / "cmdline").read_bytes():
                return pid
    raise AssertionError("the data plane has no engine")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Holds a process still for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def blobs_of(stack: LocalStack, version: str) -> Path:
    """Where the store keeps a version's files."""
    return stack.folder / "store" / version[:2] / version


def weights_of(stack: LocalStack, version: str) -> Path:
    """Where the store keeps a version's weights."""
    return max(filter(Path.is_file, blobs_of(stack, version).rglob("*")), key=lambda path: path.stat().st_size)


@contextlib.contextmanager
def blobs_unreadable(stack: LocalStack, version: str) -> Iterator[None]:
    """The store cannot read a version's files for a while: links that lead to themselves are in their places.

    Each file is replaced by one rename, so that no reader finds it missing, which is another fault.
    """
    files = [path for path in blobs_of(stack, version).rglob("*") if path.is_file()]
    for file in files:
        file.with_suffix(".away").hardlink_to(file)
        link = file.with_suffix(".link")
        link.symlink_to(file.name)
        link.replace(file)
    try:
        yield
    finally:
        for file in files:
            file.with_suffix(".away").replace(file)
