"""Bytes that loads take while they are under way, before their images are in the host cache: a budget, and who waits for whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from dataplane.load_line import Ticket, Urgency
from veneer.errors import ResourceExhaustedError


class NoRoomError(ResourceExhaustedError):
    """A load cannot go on for want of room, or had to give way to one that is waited for; nothing is wrong with the version."""

    def __init__(self) -> None:
        super().__init__("the node has no room for more loads under way", retry_after_s=1.0)


class Amount(NamedTuple):
    """Bytes by where they lie.

    Attributes:
        memory: Files in this process's memory, and what was read of any and is not kept yet.
        disk: Files without a name.
        image: Images that are being made.
    """

    memory: int = 0
    disk: int = 0
    image: int = 0

    def plus(self, other: Amount) -> Amount:
        """Returns the sum."""
        return Amount(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, other: Amount) -> Amount:
        """Returns the difference, which may be below 0."""
        return Amount(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    def within(self, other: Amount) -> Amount:
        """Returns the less of both, each."""
        return Amount(*map(min, self, other))

    def fits(self, free: Amount) -> bool:
        """Whether there is as much free of all that this needs."""
        return all(mine <= theirs for mine, theirs in zip(self, free, strict=True) if mine)

    def helps(self, lacks: Amount) -> bool:
        """Whether this is of any use to who lacks that."""
        return any(mine > 0 and lack > 0 for mine, lack in zip(self, lacks, strict=True))


_NOTHING = Amount()


@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt of a load.

    Attributes:
        ticket: Whose it is.
        limit: Ends it.
        came_s: When something came last.
        held: What it has.
        wanted: What it waits for; nothing when it does not wait.
        entered: Set when it has that.
        is_firm: All has come; it ends by itself.
        is_going: It was told to give way.
    """

    ticket: Ticket
    limit: asyncio.Timeout
    came_s: float
    held: Amount = _NOTHING
    wanted: Amount = _NOTHING
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    is_firm: bool = False
    is_going: bool = False

    @property
    def is_ahead(self) -> bool:
        """Whether nobody waits for it."""
        return self.ticket.urgency is not Urgency.WAITED


class LoadRoom:
    """Room for loads under way. Owned by the event loop.

    A load says once what its files take, before the first byte is read, and has all of it until its attempt ends: so none that
    has begun waits for room that another one has which waits too. What an image takes while it is made is another amount, and who
    has some of that waits for no more than a thread. What alone is larger than all room has all of it.

    Those that are waited for go first, of these the tenant's that has least, then who came first; what the first lacks is kept
    for it. Loads ahead give way to it at once. So does one that brought nothing for `patience_s`, longer than any read may take;
    it is tried again.

    Args:
        capacity: Bytes that there are.
        patience_s: How long who has room may bring nothing while others wait for it.
        max_wait_s: How long to wait for room.
        clock: Monotonic seconds.
    """

    def __init__(
        self, capacity: Amount, *, patience_s: float, max_wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity = capacity
        self._patience_s = patience_s
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._attempts: dict[Ticket, _Attempt] = {}
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def held(self) -> Amount:
        """What all have together."""
        total = _NOTHING
        for attempt in self._attempts.values():
            total = total.plus(attempt.held)
        return total

    def is_waiting(self, ticket: Ticket) -> bool:
        """Whether a load waits for room."""
        attempt = self._attempts.get(ticket)
        return attempt is not None and attempt.wanted != _NOTHING

    @asynccontextmanager
    async def attempt(self, ticket: Ticket) -> AsyncIterator[None]:
        """Has a load run that may `enter`; at its end it leaves.

        Raises:
            NoRoomError: It had to give way.
        """
        limit = asyncio.timeout(None)
        self._attempts[ticket] = _Attempt(ticket, limit, self._clock())
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise NoRoomError from None
            raise
        finally:
            del self._attempts[ticket]
            self.settle()

    async def enter(self, ticket: Ticket, amount: Amount, *, on_wait: Callable[[], None]) -> None:
        """Waits until there is room. Who reads its files again gives back first what it had for them.

        Args:
            ticket: Whose attempt it is.
            amount: What it needs: for its files, or beside them for its image, once these are there.
            on_wait: Called when there is none yet.

        Raises:
            NoRoomError: There was none in time, or the load had to give way.
        """
        attempt = self._attempts[ticket]
        if attempt.is_going:
            raise NoRoomError
        attempt.is_firm = amount.image > 0
        if not attempt.is_firm:
            attempt.held = _NOTHING
        attempt.wanted = amount.within(self._capacity)
        attempt.entered.clear()
        self.settle()
        if attempt.wanted == _NOTHING:
            return
        on_wait()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await attempt.entered.wait()
        except TimeoutError:
            raise NoRoomError from None
        finally:
            attempt.wanted = _NOTHING
            attempt.came_s = self._clock()

    def came(self, ticket: Ticket) -> None:
        """Notes that bytes came."""
        self._attempts[ticket].came_s = self._clock()

    def ends(self, ticket: Ticket) -> None:
        """Notes that a load was cancelled: nobody else has to give way for what it will leave."""
        if (attempt := self._attempts.get(ticket)) is not None:
            attempt.is_going = True

    def settle(self) -> None:
        """Lets in whom there is room for, and has others give way, as things are now: call it when a load's urgency changes."""
        free = self._capacity.minus(self.held)
        waiting = [attempt for attempt in self._attempts.values() if attempt.wanted != _NOTHING]
        first: _Attempt | None = None
        while waiting:
            attempt = min(waiting, key=self._turn)
            waiting.remove(attempt)
            if attempt.wanted.fits(free):
                attempt.held = attempt.held.plus(attempt.wanted)
                free = free.minus(attempt.wanted)
                attempt.wanted = _NOTHING
                attempt.entered.set()
                continue
            first = first or attempt
            free = free.minus(attempt.wanted)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if first is not None and not first.is_ahead:
            self._make_way(first)

    def _turn(self, attempt: _Attempt) -> tuple[bool, int, int]:
        return attempt.is_ahead, self._bytes_of(attempt.ticket.tenant), attempt.ticket.number

    def _bytes_of(self, tenant: str) -> int:
        return sum(sum(one.held) for one in self._attempts.values() if one.ticket.tenant == tenant)

    def _make_way(self, first: _Attempt) -> None:
        """Ends attempts so that the first that is waited for gets room, unless they would end in vain."""
        holding = [one for one in self._attempts.values() if one.held != _NOTHING and one is not first]
        lacks = first.wanted.minus(self._capacity.minus(self.held))
        for going in (one for one in holding if one.is_going):
            lacks = lacks.minus(going.held)
        rest = [one for one in holding if not one.is_going and not one.is_firm and one.held.helps(lacks)]
        now_s = self._clock()
        chosen = []
        for one in sorted(rest, key=lambda one: (not one.is_ahead, -self._bytes_of(one.ticket.tenant), -one.ticket.number)):
            if one.held.helps(lacks) and (one.is_ahead or now_s - one.came_s >= self._patience_s):
                chosen.append(one)
                lacks = lacks.minus(one.held)
        loop = asyncio.get_running_loop()
        if max(lacks) <= 0:
            for one in chosen:
                one.is_going = True
                one.limit.reschedule(loop.time())
        elif rest:
            wait_s = min(one.came_s for one in rest) + self._patience_s - now_s
            self._alarm = loop.call_later(max(wait_s, 0.1), self.settle)
