"""The resolve cache: how long an answer of the control plane may be used, and when it must be asked again.

An answer is fresh for a short soft age, counted from the start of the call that brought it. Past it the control plane is asked,
and the old answer is used only while the control plane is unreachable, up to a hard age. So a revocation is seen within the soft
age plus one call while the control plane is there, and within the hard age whatever happens.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from dataplane.enrollment import NotEnrolledError
from dataplane.resolution import Answer, Resolution, Target
from veneer.access import current_peer
from veneer.errors import DeadlineExceededError, UnauthenticatedError, UnavailableError, VeneerError
from veneer.key_lookups import KeyLookups

_LATELY_S = 600.0
_EXPIRY_LEEWAY_S = 60.0  # clocks of two machines may differ by so much


@dataclass(frozen=True, slots=True)
class Key:
    """Who asks for what."""

    key_digest: bytes
    target: Target


@dataclass(frozen=True, slots=True)
class Subject:
    """What changed in the catalogue: an adapter of a tenant, or with an empty name anything about the tenant."""

    tenant: str
    adapter: str = ""


@dataclass(slots=True)
class _Entry:
    answer: Answer
    started_s: float
    dirty: bool = False


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[Answer]
    started_s: float
    dirty: bool = False


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """What the cache did since start."""

    fresh: int
    asked: int
    stale: int
    regressed: int


class ResolveCache:
    """Answers of the control plane by caller key and target. Owned by the event loop; one call at a time for each key.

    Args:
        ask: Asks the control plane. UnavailableError and DeadlineExceededError mean that it is unreachable, but NotEnrolledError
            that this node has no right to any answer, kept ones included.
        soft_age_s: How long an answer is used without asking.
        hard_age_s: How long it may be used while the control plane is unreachable.
        max_entries: Answers kept; the least recently used go first.
        clock: Monotonic seconds.
        wall_clock: Seconds since 1970, for the expiry of keys while the control plane is unreachable.
        lookups: Bounds questions about keys that were not seen before.
    """

    def __init__(
        self,
        ask: Callable[[Key], Awaitable[Answer]],
        *,
        soft_age_s: float = 2.0,
        hard_age_s: float = 60.0,
        max_entries: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        lookups: KeyLookups | None = None,
    ) -> None:
        self._ask = ask
        self._lookups = lookups or KeyLookups(clock=clock)
        self._soft_age_s = soft_age_s
        self._hard_age_s = hard_age_s
        self._max_entries = max_entries
        self._clock = clock
        self._wall_clock = wall_clock
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._flights: dict[Key, _Flight] = {}
        self._generations: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        self._adapters: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._fresh = self._asked = self._stale = self._regressed = 0

    @property
    def counts(self) -> CacheCounts:
        """What the cache did since start."""
        return CacheCounts(self._fresh, self._asked, self._stale, self._regressed)

    def __len__(self) -> int:
        return len(self._entries)

    async def resolve(self, key: Key) -> Answer:
        """Returns what the control plane says, from memory while that is allowed.

        Raises:
            UnauthenticatedError: No valid key has this digest.
            ResourceExhaustedError: The key was not seen before, and too many of that kind were asked about in vain.
            NotEnrolledError: The control plane refuses this node.
            UnavailableError: The control plane is unreachable and there is no answer young enough.
        """
        if (answer := self._fresh_answer(key)) is not None:
            return answer
        try:
            return await self._lookups.look_up(key.key_digest, lambda: self._shared(key), peer=current_peer())
        except NotEnrolledError:
            raise
        except (UnavailableError, DeadlineExceededError) as error:
            entry = self._entries.get(key)
            if entry is None or self._clock() - entry.started_s >= self._hard_age_s:
                raise UnavailableError("the control plane is unreachable", retry_after_s=1.0) from error
            self._stale += 1
            return self._unexpired(entry.answer)

    def _fresh_answer(self, key: Key) -> Answer | None:
        entry = self._entries.get(key)
        if entry is None or entry.dirty or self._clock() - entry.started_s >= self._soft_age_s:
            return None
        self._fresh += 1
        self._entries.move_to_end(key)
        return entry.answer

    async def _shared(self, key: Key) -> Answer:
        """The answer of a call that all share who ask the same; it may have come while the key waited for its look-up."""
        if (answer := self._fresh_answer(key)) is not None:
            return answer
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = self._start(key)
        return await asyncio.shield(flight.task)

    def was_asked_lately(self, owner: str, adapter: str) -> bool:
        """Whether somebody who may use an adapter asked for one of its aliases in the last ten minutes."""
        asked_s = self._adapters.get((owner, adapter))
        return asked_s is not None and self._clock() - asked_s < _LATELY_S

    def invalidate(self, subjects: Collection[Subject] | None = None) -> None:
        """Has answers asked again before their next use; they stay as a reserve while the control plane is unreachable.

        Args:
            subjects: What changed; None for everything.
        """
        self._lookups.forget_refusals()
        changed = None if subjects is None else frozenset(subjects)
        fresh_from_s = self._clock() - self._soft_age_s
        for key, entry in self._entries.items():
            if entry.dirty or entry.started_s <= fresh_from_s:  # is asked again anyway
                continue
            if changed is None or _concerns(key, entry.answer, changed):
                entry.dirty = True
        # A call that is under way may have read the old state: those who wait for it began before the change and may have its
        # answer; those who come later must not.
        for flight in self._flights.values():
            flight.dirty = True
        self._flights.clear()

    def forget(self) -> None:
        """Drops all answers: this node has no right to them any more. What calls under way bring is asked anew before its use."""
        self._entries.clear()
        self.invalidate()

    def _start(self, key: Key) -> _Flight:
        flight = _Flight(asyncio.create_task(self._ask_once(key)), self._clock())
        flight.task.add_done_callback(lambda task: self._land(key, flight, task))
        return flight

    async def _ask_once(self, key: Key) -> Answer:
        self._asked += 1
        for _ in range(2):
            answer = await self._ask(key)
            if self._is_monotone(answer):
                return answer
            self._regressed += 1
        raise UnavailableError("the control plane answered with an older state than before", retry_after_s=1.0)

    def _land(self, key: Key, flight: _Flight, task: asyncio.Task[Answer]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if task.cancelled():
            return
        error = task.exception()
        known = self._entries.get(key)
        if known is not None and known.started_s > flight.started_s:
            return
        if error is None:
            self._entries[key] = _Entry(task.result(), flight.started_s, flight.dirty)
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        elif isinstance(error, NotEnrolledError):
            self.forget()
        elif isinstance(error, VeneerError) and not isinstance(error, UnavailableError | DeadlineExceededError):
            self._entries.pop(key, None)

    def _is_monotone(self, answer: Answer) -> bool:
        outcome = answer.outcome
        if not isinstance(outcome, Resolution) or not outcome.alias:
            return True
        self._adapters[outcome.owner, outcome.adapter] = self._clock()
        self._adapters.move_to_end((outcome.owner, outcome.adapter))
        if len(self._adapters) > self._max_entries:
            self._adapters.popitem(last=False)
        alias = (outcome.owner, outcome.adapter, outcome.alias)
        if outcome.generation < self._generations.get(alias, 0):
            return False
        self._generations[alias] = outcome.generation
        self._generations.move_to_end(alias)
        while len(self._generations) > self._max_entries:
            self._generations.popitem(last=False)
        return True

    def _unexpired(self, answer: Answer) -> Answer:
        """Returns an answer that was kept, unless its key has ended since. Younger ones the control plane's own clock judged."""
        end = answer.caller.expire_unix_s
        if end is not None and self._wall_clock() > end + _EXPIRY_LEEWAY_S:
            raise UnauthenticatedError("no valid credential")
        return answer


def _concerns(key: Key, answer: Answer, changed: frozenset[Subject]) -> bool:
    caller = answer.caller.tenant
    owner = key.target.owner or caller
    return not changed.isdisjoint({Subject(owner, key.target.adapter), Subject(owner), Subject(caller)})
