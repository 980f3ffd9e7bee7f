"""Which load from the store begins next: those that requests wait for have places of their own. Integers only, no I/O."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import IntEnum

_STALLED_PER_PLACE = 4
_MAX_TURNS = 4096


class Urgency(IntEnum):
    """Who asks for a load, most urgent first."""

    WAITED = 0
    """A request waits for it."""
    EXPECTED = 1
    """Recent traffic says that one will come."""
    HINTED = 2
    """Somebody says so."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A load in line or under way. Its owner says how urgent it is; the rest belongs to the `LoadLine` that it is in.

    Attributes:
        version: What is loaded.
        tenant: Who asked first, or for whom it is ahead; empty for nobody in particular.
        urgency: Of the most urgent that asks.
        number: Its place by time.
        running: Whether it has begun.
        stalled: Whether it gave its place up since nothing came.
    """

    version: str
    tenant: str
    urgency: Urgency
    number: int = 0
    running: bool = False
    stalled: bool = False


class LoadLine:
    """Loads that wait for a place, and those that have one. Owned by the prefetcher.

    Loads that are waited for have `num_places`, loads ahead a quarter as many of their own. Of those that are waited for the one
    goes first whose tenant has fewest under way, then who came first. Loads ahead go by turns of their tenants; of one tenant, or
    of those whose turn it is for the first time, the more urgent, then who came first. A load that stalls gives its place up, up
    to four loads a place; so what hangs keeps nobody else waiting.

    Args:
        num_places: Loads that are waited for and make progress, at the same time.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._num_ahead = max(1, num_places // 4)
        self._waiting: dict[Ticket, None] = {}
        self._running: dict[Ticket, None] = {}
        self._number = 0
        self._turns: OrderedDict[str, int] = OrderedDict()

    def join(self, ticket: Ticket) -> None:
        """Puts a load in line: a new one, or one that waits for its next attempt."""
        if not ticket.number:
            self._number += 1
            ticket.number = self._number
        self._waiting[ticket] = None

    def leave(self, ticket: Ticket) -> None:
        """Takes a load out, wherever it is. Idempotent."""
        self._waiting.pop(ticket, None)
        self._running.pop(ticket, None)
        ticket.running = ticket.stalled = False

    def stall(self, ticket: Ticket) -> bool:
        """Notes that nothing came for a while; returns whether the load gave its place up."""
        full = sum(other.stalled for other in self._running) >= self._num_places * _STALLED_PER_PLACE
        if ticket.running and not full:
            ticket.stalled = True
        return ticket.stalled

    def progress(self, ticket: Ticket) -> None:
        """Notes that something came: it holds a place again."""
        ticket.stalled = False

    def take(self) -> list[Ticket]:
        """Returns the loads that begin now, in order."""
        taken = []
        while (ticket := self._next()) is not None:
            del self._waiting[ticket]
            self._running[ticket] = None
            ticket.running = True
            if ticket.urgency is not Urgency.WAITED:
                self._note_turn(ticket.tenant)
            taken.append(ticket)
        return taken

    def _next(self) -> Ticket | None:
        holding = [ticket for ticket in self._running if not ticket.stalled]
        num_ahead = sum(ticket.urgency > Urgency.WAITED for ticket in holding)
        if len(holding) - num_ahead < self._num_places:
            waited = [ticket for ticket in self._waiting if ticket.urgency is Urgency.WAITED]
            if waited:
                running = Counter(ticket.tenant for ticket in self._running)
                return min(waited, key=lambda ticket: (running[ticket.tenant], ticket.number))
        if num_ahead < self._num_ahead:
            ahead = [ticket for ticket in self._waiting if ticket.urgency is not Urgency.WAITED]
            if ahead:
                return min(ahead, key=lambda ticket: (self._turns.get(ticket.tenant, 0), ticket.urgency, ticket.number))
        return None

    def _note_turn(self, tenant: str) -> None:
        """Puts a tenant behind all others; of very many, those whose turn was longest ago are like new."""
        last = self._turns[next(reversed(self._turns))] if self._turns else 0
        self._turns[tenant] = last + 1
        self._turns.move_to_end(tenant)
        if len(self._turns) > _MAX_TURNS:
            self._turns.popitem(last=False)
