"""Who gives way: tenants that hold more than their share, when another waits below its own. Integers and floats only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq

from dataplane.engine.fairness import Account, Tenants
from dataplane.engine.kv_cache import PagePool
from dataplane.engine.limits import Limits
from dataplane.engine.sequence import Phase, Sequence


class Relief:
    """Chooses victims; the scheduler preempts them. Owned by the scheduler.

    Args:
        limits: Limits of the scheduler.
        pool: Its pages.
        tenants: Its tenants.
        seats: Its free seats; read only.
        running: Sequences that hold a seat, oldest first; read only.
    """

    def __init__(self, limits: Limits, pool: PagePool, tenants: Tenants, *, seats: Seq[int], running: Seq[Sequence]) -> None:
        self._limits = limits
        self._pool = pool
        self._tenants = tenants
        self._seats = seats
        self._running = running

    def note_hunger(self) -> None:
        """Counts the steps in which a tenant waits although it holds less than its share of what it lacks."""
        if not self._tenants.num_waiting:
            return
        for account in self._tenants.active:
            if not (account.waiting or account.returning):
                account.num_hungry = 0
            elif (account.lacks_pages and self._excess_of_pages(account) < 0) if self._seats else self._seats_due(account) > 0:
                account.num_hungry += 1
            else:
                account.num_hungry = 0

    def make_room(self, preempt: Callable[[Sequence], None], has_pages: Callable[[Sequence], bool]) -> list[Sequence]:
        """Lets tenants give way that hold more than their share while another has waited below its own for too long.

        Returns the requests for which room was made; they are tried first.
        """
        if not self._tenants.num_waiting:
            return []
        hungry = [account for account in self._tenants.active if account.num_hungry >= self._limits.patience]
        if not hungry or any(sequence.preempting for sequence in self._running):
            return []
        favoured: list[Sequence] = []
        for account in sorted(hungry, key=lambda account: account.service):
            waiting = itertools.chain(account.returning, account.waiting)
            for sequence in tuple(itertools.islice(waiting, max(0, self._seats_due(account)))):
                if not self._make_room_for(sequence, preempt, has_pages, num_before=len(favoured)):
                    break
                favoured.append(sequence)
        return favoured

    def _make_room_for(
        self,
        sequence: Sequence,
        preempt: Callable[[Sequence], None],
        has_pages: Callable[[Sequence], bool],
        *,
        num_before: int,
    ) -> bool:
        """Preempts until a seat and pages are free for a request beside those that others were promised, or none may be."""
        while len(self._seats) <= num_before or not has_pages(sequence):
            by_seats = len(self._seats) <= num_before
            victim = self._most_over(by_seats=by_seats, beneficiary=sequence.account)
            if victim is None:
                return False
            preempt(victim)
            if victim.preempting:
                return False
        return True

    def _most_over(self, *, by_seats: bool, beneficiary: Account) -> Sequence | None:
        """Returns the newest request of the tenant most over its share of seats or pages, but never a tenant's oldest one."""
        most, victim = 0.0, None
        for account in self._tenants.active:
            if len(account.running) < 2 or account is beneficiary:
                continue
            over = -float(self._seats_due(account)) if by_seats else self._excess_of_pages(account)
            newest = account.running[-1]
            if over / account.weight > most and newest.phase is Phase.RUNNING:
                most, victim = over / account.weight, newest
        return victim

    def _seats_due(self, account: Account) -> int:
        """Returns how many seats a tenant may still claim; below 0 it holds more than its share."""
        return max(1, int(self._tenants.share(account) * self._limits.max_sequences)) - len(account.running)

    def _share_of_pages(self, account: Account) -> float:
        return self._tenants.share(account) * self._pool.num_pages

    def _excess_of_pages(self, account: Account) -> float:
        return self._pool.held_by(account.name) - self._share_of_pages(account)

    def page_victim(self, grower: Sequence) -> Sequence:
        """Returns the newest request of the tenant most over its share of pages, the one that grows counted as it will be.

        A tenant's oldest request goes only when nothing else of anybody does, and the oldest of all never.
        """
        ranked = [
            (len(account.running) > 1, (self._excess_of_pages(account) + (account is grower.account)) / account.weight, account)
            for account in self._tenants.active
            if account.running and account.running[-1] is not self._running[0]
        ]
        if not ranked:
            return self._running[-1]
        over = [entry for entry in ranked if entry[1] > 0]
        return max(over or ranked, key=lambda entry: entry[:2])[2].running[-1]
