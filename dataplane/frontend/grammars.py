"""What a text must match, checked before anything is queued: JSON schema, regular expression, grammar."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dataplane.engine.grammar import why_missing
from dataplane.engine.link import child_environment
from dataplane.frontend.grammar_child import PREFIX
from veneer.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    Violation,
)

_MAX_BYTES = {"json": 64 << 10, "regex": 1 << 10, "grammar": 16 << 10}
_NUM_PLACES = 2
_HEAVY_S = 60.0
"""How long a tenant's checks have the lowest priority, and one place with others like it, after one of them was ended."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a text must match; see `veneer.dataplane.v1.StructuredOutputs`."""

    kind: Literal["json", "regex", "grammar"]
    text: str


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Limits of checks.

    Attributes:
        timeout_s: How long one may take, its wait for a turn included.
        max_pending: Constraints that may wait; a quarter of these of one tenant.
        max_bytes: Verdicts that are kept, in bytes; beyond that the tenant that has most loses its oldest.
        max_cpu_s: Processor time of one.
        memory_bytes: Memory of one.
        patience_s: How long the process may say nothing while it checks, on however busy a machine; then another takes its place.
    """

    timeout_s: float = 10.0
    max_pending: int = 64
    max_bytes: int = 32 << 20
    max_cpu_s: float = 1.0
    memory_bytes: int = 256 << 20
    patience_s: float = 120.0


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The grammar as the engine takes it, or what is wrong."""

    grammar: str
    fault: str

    @property
    def num_bytes(self) -> int:
        return len(self.grammar) + len(self.fault) + 512


_Key = tuple[str, Constraint]


class Grammars:
    """Has constraints checked by a process (`grammar_child`) and remembers the verdicts, by tenant. Owned by the event loop.

    Two are checked at the same time, one of a tenant, and tenants go by turns: no tenant's constraints hold up another's. Tenants
    of whom one was ended lately have one place together, since their checks yield to everything else and may take long.

    Args:
        folder: Model folder with tokenizer.json.
        vocab_size: Rows of the model's embedding.
        eos_ids: Ids that end a sequence.
        limits: Limits.
    """

    def __init__(self, folder: Path, *, vocab_size: int, eos_ids: Sequence[int], limits: CheckLimits | None = None) -> None:
        self._limits = limits or CheckLimits()
        ids = tuple(id_ for id_ in eos_ids if id_ < vocab_size)
        self._missing = why_missing(folder, ids)
        self._order = {
            "folder": str(folder), "vocab_size": vocab_size, "eos_ids": ids,
            "max_cpu_s": self._limits.max_cpu_s, "memory_bytes": self._limits.memory_bytes,
        }  # fmt: skip
        self._verdicts: OrderedDict[_Key, _Verdict] = OrderedDict()
        self._num_bytes: Counter[str] = Counter()
        self._pending: dict[_Key, asyncio.Future[_Verdict]] = {}
        self._lines: OrderedDict[str, deque[_Key]] = OrderedDict()
        self._running: dict[int, _Key] = {}
        self._numbers = itertools.count()
        self._heavy: dict[str, float] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._is_closed = False
        self._heard_s = 0.0
        self._sending = asyncio.Lock()
        self._work: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Ends the process; constraints that are being checked fail."""
        self._is_closed = True
        self._end(UnavailableError("the node stops"))

    async def check(self, constraint: Constraint, *, tenant: str = "") -> str:
        """Returns the grammar as the engine takes it.

        Raises:
            InvalidArgumentError: It is wrong, too large, takes too much work, or asks for what cannot be enforced.
            FailedPreconditionError: This base cannot have structured outputs.
            ResourceExhaustedError: It takes too long, or too many wait.
            UnavailableError: The process that checks cannot be started, or ended.
        """
        size, most = len(constraint.text.encode()), _MAX_BYTES[constraint.kind]
        field = f"sampling.structured_outputs.{constraint.kind}"
        if not 1 <= size <= most:
            raise InvalidArgumentError.of([Violation(field, f"must have 1 to {most} bytes, has {size}")])
        if self._missing:
            raise FailedPreconditionError(self._missing)
        if self._is_closed:
            raise UnavailableError("the node stops")
        verdict = self._verdicts.get((tenant, constraint))
        if verdict is None:
            verdict = await self._wait((tenant, constraint))
        else:
            self._verdicts.move_to_end((tenant, constraint))
        if verdict.fault:
            raise InvalidArgumentError.of([Violation(field, verdict.fault)])
        return verdict.grammar

    async def _wait(self, key: _Key) -> _Verdict:
        """Waits for a check; equal constraints of a tenant that come meanwhile wait for the same one."""
        future = self._pending.get(key)
        if future is None:
            line = self._lines.get(key[0], ())
            if len(self._pending) >= self._limits.max_pending or len(line) >= max(1, self._limits.max_pending // 4):
                raise ResourceExhaustedError("too many structured outputs wait to be checked", retry_after_s=1.0)
            future = self._pending[key] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also when its callers left
            self._lines.setdefault(key[0], deque()).append(key)
            self._start_next()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await asyncio.shield(future)
        except TimeoutError:
            if self._running and time.monotonic() - self._heard_s > self._limits.patience_s:
                self._end(UnavailableError("the process that checks structured outputs hangs", retry_after_s=1.0))
            message = f"structured_outputs: it was not checked within {self._limits.timeout_s:g} s"
            raise ResourceExhaustedError(message, retry_after_s=1.0) from None

    def _start_next(self) -> None:
        """Sends constraints to the process while there are places."""
        busy = {tenant for tenant, _ in self._running.values()}

        def may_start(tenant: str) -> bool:
            return tenant not in busy and not (self._is_heavy(tenant) and any(map(self._is_heavy, busy)))

        while len(self._running) < _NUM_PLACES and (tenant := next(filter(may_start, self._lines), None)) is not None:
            line = self._lines.pop(tenant)
            key = line.popleft()
            if line:
                self._lines[tenant] = line  # at the end: tenants go by turns
            busy.add(tenant)
            number = next(self._numbers)
            if not self._running:
                self._heard_s = time.monotonic()
            self._running[number] = key
            self._spawn(self._send([number, key[1].kind, key[1].text, self._is_heavy(tenant)]))

    def _is_heavy(self, tenant: str) -> bool:
        return self._heavy.get(tenant, 0.0) > time.monotonic()

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _send(self, message: object) -> None:
        link = self._link
        try:
            async with self._sending:  # messages are not to be mixed
                if self._is_closed:
                    return
                link = self._link = self._link or self._start()
                data = json.dumps(message).encode()
                await asyncio.get_running_loop().sock_sendall(link, PREFIX.pack(len(data)) + data)
        except OSError as error:
            if self._link is link:
                cause = f"the process that checks structured outputs failed: {type(error).__name__}"
                self._end(UnavailableError(cause, retry_after_s=1.0))

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "dataplane.frontend.grammar_child"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, env=_environment(),
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        data = json.dumps(self._order).encode()
        ours.sendall(PREFIX.pack(len(data)) + data)
        ours.settimeout(0)
        self._spawn(self._read(ours))
        return ours

    async def _read(self, link: socket.socket) -> None:
        loop = asyncio.get_running_loop()

        async def take(size: int) -> bytes:
            data = bytearray()
            while len(data) < size:
                part = await loop.sock_recv(link, min(size - len(data), 1 << 20))
                if not part:
                    raise ConnectionResetError("the process ended")
                data += part
            return bytes(data)

        try:
            while True:
                number, status, words = json.loads(await take(PREFIX.unpack(await take(PREFIX.size))[0]))
                self._answer(number, status, words)
        except (OSError, ValueError):
            if self._link is link:
                self._end(UnavailableError("the process that checks structured outputs ended", retry_after_s=1.0))
        finally:
            link.close()

    def _answer(self, number: int, status: str | int, words: str) -> None:
        self._heard_s = time.monotonic()
        if (key := self._running.pop(number, None)) is None:
            return  # it was on its way when the process before this one ended, and has failed with that
        future = self._pending.pop(key)
        match status:
            case "grammar":
                self._keep(key, future, _Verdict(words, ""))
            case "invalid":
                self._keep(key, future, _Verdict("", words))
            case "missing":
                future.set_exception(FailedPreconditionError(words))
            case int():
                self._heavy = {name: until for name, until in self._heavy.items() if until > time.monotonic()}
                self._heavy[key[0]] = time.monotonic() + _HEAVY_S
                self._keep(key, future, _Verdict("", self._describe(status)))
            case _:
                future.set_exception(InternalError("the process that checks structured outputs answers what is none"))
        self._start_next()

    def _describe(self, status: int) -> str:
        limits = self._limits
        if status == -signal.SIGPROF:
            return f"takes more than {limits.max_cpu_s:g} s of processor time to compile"
        return f"takes more than {limits.memory_bytes >> 20} MiB of memory to compile, or ends the compiler (status {status})"

    def _keep(self, key: _Key, future: asyncio.Future[_Verdict], verdict: _Verdict) -> None:
        future.set_result(verdict)
        self._verdicts[key] = verdict
        self._num_bytes[key[0]] += _size(key, verdict)
        while sum(self._num_bytes.values()) > self._limits.max_bytes:
            heaviest = self._num_bytes.most_common(1)[0][0]
            oldest = next(other for other in self._verdicts if other[0] == heaviest)
            self._num_bytes[heaviest] -= _size(oldest, self._verdicts.pop(oldest))
            if not self._num_bytes[heaviest]:
                del self._num_bytes[heaviest]

    def _end(self, error: UnavailableError) -> None:
        """Ends the process; the task that reads from it closes the link."""
        self._link = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        self._lines.clear()
        self._running.clear()
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)


def _size(key: _Key, verdict: _Verdict) -> int:
    return len(key[1].text) + verdict.num_bytes


def _environment() -> dict[str, str]:
    """Returns what the process needs to find this package, and nothing else of this process."""
    known = child_environment()
    names = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH")
    return {"TOKENIZERS_PARALLELISM": "false"} | {name: known[name] for name in names if name in known}
