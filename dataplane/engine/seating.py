"""Who runs: seats, the pages of those that have one, and who must give way. Integers only."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np

from dataplane.engine.decoders import Decoders
from dataplane.engine.fairness import Tenants
from dataplane.engine.kv_cache import PagePool
from dataplane.engine.leases import Leases
from dataplane.engine.limits import Limits
from dataplane.engine.plan import Plan
from dataplane.engine.prefix_cache import PrefixCache
from dataplane.engine.relief import Relief
from dataplane.engine.sequence import Phase, Sequence


class Seating:
    """Gives sequences a seat and pages, and takes back what they hold. Owned by the scheduler.

    A sequence that ends or gives way while rows of it are in flight keeps all it has until the last plan with rows of its seat
    is committed.

    Args:
        limits: Limits of the scheduler.
        pool: Its pages.
        tenants: Its tenants.
        leases: Its leases.
        prefix: Its prefix cache.

    Attributes:
        running: Sequences that hold a seat, oldest first; others only read it.
        seats: Free seats; others only read them.
        decoders: Those of `running` that decode.
        relief: Who gives way.
        held: Sequences that are out of the steps until their grammar's mask is there, and since when they are known to be; they
            keep seat and pages, unless others need the pages.
        admitted: When those came that were seated for the first time since somebody took this list.
    """

    def __init__(self, limits: Limits, pool: PagePool, tenants: Tenants, *, leases: Leases, prefix: PrefixCache) -> None:
        self._pool = pool
        self._tenants = tenants
        self._leases = leases
        self._prefix = prefix
        self._num_admitted = 0
        self._num_planned = self._num_committed = 0
        self._last_plan = np.zeros(limits.max_sequences, dtype=np.int64)
        self._leaving: list[Sequence] = []
        self.admitted: list[float] = []
        self.held: dict[Sequence, float | None] = {}
        self.running: list[Sequence] = []
        self.seats = list(range(limits.max_sequences - 1, -1, -1))
        self.decoders = Decoders(limits, tenants.ledger, page_size=pool.page_size)
        self.relief = Relief(limits, pool, tenants, seats=self.seats, running=self.running, leases=leases)

    def make_room(self) -> list[Sequence]:
        """Lets tenants above their shares give way, one after the other; see `Relief.make_room`."""
        if not self._tenants.num_waiting or any(sequence.preempting for sequence in self._leaving):
            return []
        return self.relief.make_room(self.preempt, self.has_pages, self._take_lease)

    @property
    def has_ended_in_flight(self) -> bool:
        """Whether rows of sequences that have ended are in flight."""
        return any(sequence.phase is Phase.ENDED for sequence in self._leaving)

    def has_pages(self, sequence: Sequence) -> bool:
        """Whether all known tokens and one more fit while every running sequence can still get a page."""
        spare = len(self.running)
        num_free = self._pool.num_free
        needed = self._pool.pages_for(len(sequence.tokens) + 1) + spare
        if needed > num_free and sequence.keys:
            shared = self._prefix.find(sequence)
            needed -= len(shared) - self._pool.num_kept_of(shared, sequence.submit.tenant)
        return needed <= num_free or (spare == 0 and self._pool.pages_for(len(sequence.tokens)) <= num_free)

    def num_cached(self, sequence: Sequence) -> int:
        """Returns how many of its first positions would be found in the cache."""
        return len(self._prefix.find(sequence)) * self._pool.page_size

    def seat(self, sequence: Sequence) -> int:
        """Seats a waiting sequence and gives it pages for all its known tokens; returns how many of them others filled."""
        if sequence.order < 0:
            sequence.order = self._num_admitted
            self._num_admitted += 1
        if sequence.came is not None:
            self.admitted.append(sequence.came)
            sequence.came = None
        if sequence.mask is not None:
            sequence.mask.begin()
        self._tenants.start(sequence)
        sequence.phase = Phase.RUNNING
        sequence.is_unfinished = True
        sequence.seat = self.seats.pop()
        bisect.insort(self.running, sequence, key=_order)
        submit, num_tokens = sequence.submit, len(sequence.tokens)
        num_shared = self._prefix.share(sequence)
        sequence.pages += self._pool.take(self._pool.pages_for(num_tokens) - num_shared, submit.tenant, weight=submit.weight)
        return num_shared

    def grow(self, sequence: Sequence) -> int | None:
        """Gets a sequence one page more, and returns it, or None when the sequence must stand back in this step."""
        while not self._pool.num_free:
            if self._leaving:
                return None
            idle = [other for other in self.running if other.paused or other.is_held]
            victim = idle[-1] if idle else self.relief.page_victim(sequence)
            if victim is None:
                return None
            self.preempt(victim)
            if victim is sequence:
                return None
        submit = sequence.submit
        (page,) = self._pool.take(1, submit.tenant, weight=submit.weight)
        sequence.pages.append(page)
        return page

    def take_off(self, plan: Plan, others: Iterable[Sequence]) -> None:
        """Notes that a plan is in flight.

        Args:
            plan: The plan.
            others: The sequences of its rows beside the decodes; who among them gives way does so when it is committed.
        """
        self._num_planned += 1
        self._last_plan[plan.decodes.picks.seats] = self._num_planned
        for sequence in others:
            self._last_plan[sequence.seat] = self._num_planned
            if sequence.preempting:
                self._leaving.append(sequence)

    def land(self) -> None:
        """Notes that the oldest plan in flight is committed: what it brought may be taken, and `clear` called."""
        self._num_committed += 1

    def clear(self) -> None:
        """Lets those go that wanted to and of which nothing is in flight any more."""
        if not self._leaving:
            return
        ready = [sequence for sequence in self._leaving if not self._is_in_flight(sequence)]
        self._leaving = [sequence for sequence in self._leaving if self._is_in_flight(sequence)]
        for sequence in ready:
            if sequence.phase is Phase.ENDED:
                self._give_back(sequence)
            elif sequence.preempting:
                self.requeue(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Lets a sequence decode again that was paused, if it did before."""
        if sequence.phase is Phase.RUNNING and not (sequence.is_unfinished or sequence.preempting or sequence.is_held):
            self.decoders.add(sequence)

    def hold(self, sequence: Sequence, position: int) -> None:
        """Takes a sequence out of the steps until its mask is there; then its row at `position` is computed again."""
        self.decoders.remove(sequence)
        sequence.num_scheduled, sequence.num_charged = position, position + 1
        if sequence.phase is Phase.RUNNING and not sequence.preempting:
            sequence.is_held = True
            index, since = sequence.held_since
            self.held[sequence] = since if index == sequence.num_output else None

    def release(self) -> None:
        """Lets those decode again whose mask has come."""
        for sequence in [one for one in self.held if one.mask is None or one.mask.is_ready]:
            self._drop_held(sequence)
            if not sequence.paused:
                self.decoders.add(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes seat and pages from a running sequence, at once or as soon as nothing of it is in flight."""
        sequence.preempting = True
        self.decoders.remove(sequence)
        sequence.held_since = sequence.num_output, self.held.get(sequence)
        self._drop_held(sequence)
        if self._is_in_flight(sequence):
            self._leaving.append(sequence)
        else:
            self.requeue(sequence)

    def end(self, sequence: Sequence) -> None:
        """Takes back what an ended sequence holds, at once or as soon as nothing of it is in flight."""
        self.decoders.remove(sequence)
        self._drop_held(sequence)
        if sequence.mask is not None:
            sequence.mask.stop()
        if self._is_in_flight(sequence):
            self._leaving.append(sequence)
        else:
            self._give_back(sequence)

    def _drop_held(self, sequence: Sequence) -> None:
        sequence.is_held = False
        self.held.pop(sequence, None)

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return sequence.seat >= 0 and bool(self._last_plan[sequence.seat] > self._num_committed)

    def requeue(self, sequence: Sequence) -> None:
        """Sends a preempted sequence back: it recomputes later what the cache does not have.

        It keeps its lease, unless that is what it was preempted for, or its reader is slow, so that it stands aside. One that ran
        without its adapter waits as if it had not run yet.
        """
        if sequence.is_ahead:
            sequence.is_ahead, sequence.num_ahead, sequence.order = False, 0, -1
        elif not sequence.is_unfinished:
            self._prefix.keep(sequence, len(sequence.tokens) - 1)
        self._leave(sequence, returns=True)
        if sequence.paused:
            self._leases.stand_aside(sequence)
        elif sequence.yields:
            self._leases.withhold(sequence)
        sequence.preempting = sequence.yields = False
        sequence.num_scheduled = 0
        sequence.phase = Phase.WAITING

    def _take_lease(self, sequence: Sequence) -> None:
        """Ends the lease of a sequence, which waits from then on."""
        if sequence.phase is Phase.RUNNING:
            sequence.yields = True
            self.preempt(sequence)
        else:
            self._leases.withhold(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.seat >= 0:
            self._leave(sequence, returns=False)
        self._leases.give_back(sequence)

    def _leave(self, sequence: Sequence, *, returns: bool) -> None:
        """Frees pages and seat."""
        self.running.remove(sequence)
        self._tenants.stop(sequence, returns=returns)
        sequence.is_unfinished = False
        self._pool.give_back(sequence.pages, sequence.submit.tenant)
        self.seats.append(sequence.seat)
        sequence.seat = -1


def _order(sequence: Sequence) -> int:
    return sequence.order
