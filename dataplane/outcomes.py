"""How requests for arms of splits ended, counted and told to the control plane, which decides by it about canaries.

What counts is in docs/adr/0044-canaries.md: what the caller did, or was refused for quota or overload, does not.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dataplane.attempts import NotLoadedYetError
from dataplane.binding import Served
from dataplane.lora.holdings import TenantLimitError
from dataplane.report_client import ArmOutcomes
from dataplane.resolution import Answer, Resolution
from dataplane.transfer import DeletedVersionError, WithdrawnVersionError
from veneer.errors import VeneerError

_log = logging.getLogger(__name__)
_FAILURES = frozenset({"INTERNAL", "UNAVAILABLE", "FAILED_PRECONDITION", "DATA_LOSS"})
_MAX_ARMS = 10_000
_MAX_COUNT = 10_000_000
_MAX_BATCH = 1000
_MAX_PAUSE_S = 5.0
_GIVE_UP_S = 12 * 3600.0
"""After so long a batch is not told any more; the control plane remembers it twice as long."""


class _Part(Protocol):
    @property
    def served(self) -> Served | None: ...


_P = TypeVar("_P", bound=_Part)


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm of an alias at one generation."""

    owner: str
    adapter: str
    alias: str
    generation: int
    version: str


def is_failure(error: BaseException) -> bool:
    """Whether a request that ended so was failed by the service or the version, and not by its caller or a limit."""
    if isinstance(error, NotLoadedYetError | WithdrawnVersionError | DeletedVersionError | TenantLimitError):
        return False
    if isinstance(error, VeneerError):
        return error.status in _FAILURES
    return isinstance(error, Exception)


class Ending:
    """How one request ends. Owned by its handler.

    Args:
        outcomes: Where it is counted, once.
        arm: To which it was bound; None for what belongs to no arm of a split.
    """

    def __init__(self, outcomes: Outcomes, arm: Arm | None) -> None:
        self._outcomes = outcomes
        self._arm = arm

    def watch(self, parts: AsyncGenerator[_P]) -> AsyncGenerator[_P]:
        """Returns the parts of the answer, and counts how they end; what nobody counts takes no step more."""
        return parts if self._arm is None else self._watched(parts)

    async def _watched(self, parts: AsyncGenerator[_P]) -> AsyncGenerator[_P]:
        try:
            async with aclosing(parts):
                async for part in parts:
                    if part.served is not None and part.served.fallback is not None:
                        self._arm = None  # it is not the arm's version that answers
                    yield part
        except Exception as error:
            if is_failure(error):
                self._count(is_ok=False)
            raise
        self._count(is_ok=True)

    def could_not_load(self, cause: VeneerError) -> None:
        """Something else is to answer, since the version could not be had."""
        if is_failure(cause):
            self._count(is_ok=False)
        self._arm = None

    def _count(self, *, is_ok: bool) -> None:
        if self._arm is not None:
            self._outcomes.count(self._arm, is_ok=is_ok)
            self._arm = None


class Outcomes:
    """Counts that were not told yet. Owned by the event loop.

    Attributes:
        num_lost: Requests that were not counted, since too many arms waited to be told, or too long.
    """

    def __init__(self) -> None:
        self._counts: dict[Arm, list[int]] = {}
        self.num_lost = 0

    def of(self, answer: Answer, served: Served) -> Ending:
        """Returns what watches a request that was bound so."""
        outcome = answer.outcome
        is_split = isinstance(outcome, Resolution) and len(outcome.arms) > 1
        if not is_split or served.version is None or not served.alias:
            return Ending(self, None)
        return Ending(self, Arm(served.owner, served.adapter, served.alias, served.generation, served.version))

    def count(self, arm: Arm, *, is_ok: bool) -> None:
        """Counts a request that ended."""
        if arm not in self._counts and len(self._counts) >= _MAX_ARMS:
            if not self.num_lost:
                _log.warning("outcomes of too many arms wait to be told; more are lost", extra={"max_arms": _MAX_ARMS})
            self.num_lost += 1
            return
        self._counts.setdefault(arm, [0, 0])[0 if is_ok else 1] += 1

    def take(self) -> list[ArmOutcomes]:
        """Returns the counts of a bounded number of arms, and forgets them."""
        taken = []
        for arm in list(self._counts)[:_MAX_BATCH]:
            ok, failed = self._counts.pop(arm)
            told = min(ok, _MAX_COUNT), min(failed, _MAX_COUNT)
            if (ok, failed) != told:
                self._counts[arm] = [ok - told[0], failed - told[1]]
            taken.append(
                ArmOutcomes(
                    owner=arm.owner,
                    adapter=arm.adapter,
                    alias=arm.alias,
                    generation=arm.generation,
                    version=arm.version,
                    ok=told[0],
                    failed=told[1],
                )
            )
        return taken


class OutcomeReporter:
    """Tells the counts, each batch until it is answered. Owned by the event loop; `run` is its one task.

    One batch is on the way at a time, with a number that only it has, so that the control plane adds it once however often it
    comes. What a process that is killed did not get an answer to is lost, or was counted; never twice. So is a batch that has
    waited for an answer for longer than the control plane may remember it.

    Args:
        outcomes: The counts.
        send: Tells a batch: start of this process, number, counts.
        interval_s: Time between batches.
        clock: Seconds that also pass while the machine sleeps.
    """

    def __init__(
        self,
        outcomes: Outcomes,
        send: Callable[[str, int, Sequence[ArmOutcomes]], Awaitable[None]],
        *,
        interval_s: float = 1.0,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._outcomes = outcomes
        self._clock = clock
        self._since_s = 0.0
        self._send = send
        self._interval_s = interval_s
        self._epoch = str(uuid.uuid4())
        self._sequence = 0
        self._batch: list[ArmOutcomes] = []

    async def run(self) -> None:
        """Tells until cancelled."""
        pause_s = self._interval_s
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.flush()
                pause_s = self._interval_s
            except VeneerError as error:
                if pause_s == self._interval_s:
                    _log.warning("outcomes could not be told; they wait", extra={"status": error.status})
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def flush(self) -> None:
        """Tells everything that was counted.

        Raises:
            VeneerError: The control plane did not take it; the batch is kept as it is.
        """
        self._give_up()
        while self._batch or self._next_batch():
            await self._send(self._epoch, self._sequence, self._batch)
            self._batch = []

    def _give_up(self) -> None:
        if not self._batch or self._clock() - self._since_s < _GIVE_UP_S:
            return
        num_lost = sum(one.ok + one.failed for one in self._batch)
        _log.error("outcomes could not be told for too long, and are lost", extra={"num_requests": num_lost})
        self._outcomes.num_lost += num_lost
        self._batch = []

    def _next_batch(self) -> bool:
        self._batch = self._outcomes.take()
        if self._batch:
            self._sequence += 1
            self._since_s = self._clock()
        return bool(self._batch)
