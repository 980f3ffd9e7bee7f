"""Who gives way: tenants that hold more than their share, when another waits below its own. Integers and floats only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import numpy as np

from dataplane.engine.accounts import Account
from dataplane.engine.fairness import Tenants
from dataplane.engine.kv_cache import PagePool
from dataplane.engine.leases import Leases
from dataplane.engine.limits import Limits
from dataplane.engine.plan import Integers
from dataplane.engine.sequence import Lack, Phase, Sequence


class Relief:
    """Chooses victims; the scheduler preempts them. Owned by the scheduler.

    Args:
        limits: Limits of the scheduler.
        pool: Its pages.
        tenants: Its tenants.
        seats: Its free seats; read only.
        running: Sequences that hold a seat, oldest first; read only.
        leases: Its leases; asked who holds how much of the arena.
    """

    def __init__(
        self, limits: Limits, pool: PagePool, tenants: Tenants, *, seats: Seq[int], running: Seq[Sequence], leases: Leases
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._tenants = tenants
        self._seats = seats
        self._running = running
        self._leases = leases

    def note_hunger(self, lacking: Iterable[Account]) -> None:
        """Counts the steps in which a tenant waits although it holds less than its share of what it lacks.

        Args:
            lacking: Tenants of which something was passed over in this step.
        """
        if not self._tenants.num_waiting:
            return
        ledger = self._tenants.ledger
        if self._seats:
            is_short = np.zeros_like(ledger.is_backlogged)
        else:
            is_short = ledger.is_backlogged & (ledger.num_running < self._claim(ledger.weight))
        for account in lacking:
            if account.is_backlogged and (self._seats or account.lacks in (Lack.ARENA, Lack.BUDGET)):
                is_short[account.row] = self._is_short(account)
        ledger.num_hungry += 1
        ledger.num_hungry *= is_short

    def _is_short(self, account: Account) -> bool:
        """Whether a tenant whose requests wait holds less than its share of what they lack."""
        if account.lacks is Lack.ARENA:
            return self._leases.excess_of(account.name) < 0
        return account.lacks is Lack.PAGES and self._excess_of_pages(account) < 0

    def make_room(
        self,
        preempt: Callable[[Sequence], None],
        has_pages: Callable[[Sequence], bool],
        take_lease: Callable[[Sequence], None],
    ) -> list[Sequence]:
        """Lets tenants give way that hold more than their share while another has waited below its own for too long.

        Args:
            preempt: Takes seat and pages from a sequence.
            has_pages: Says whether a sequence could have its pages.
            take_lease: Takes its lease too.

        Returns:
            The requests for which room was made; they are tried first.
        """
        ledger = self._tenants.ledger
        hungry = ledger.where((ledger.num_hungry >= self._limits.patience) & ledger.is_backlogged)
        favoured: list[Sequence] = []
        for account in sorted(hungry, key=lambda account: account.service):
            if account.lacks is Lack.ARENA:
                ledger.num_hungry[account.row] = 0  # the load takes a while; only then may another have to go
                self._make_room_in_arena(account, take_lease)
                continue
            waiting = itertools.chain(account.returning, account.waiting)
            for sequence in tuple(itertools.islice(waiting, max(0, self._seats_due(account)))):
                if sequence.lease is None and self._leases.is_over_budget(sequence):
                    continue
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
        ledger = self._tenants.ledger
        may_give = ledger.num_running > (self._claim(ledger.weight) if by_seats else 1)
        may_give[beneficiary.row] = False
        most, victim = 0.0, None
        for account in ledger.where(may_give):
            over = -float(self._seats_due(account)) if by_seats else self._excess_of_pages(account)
            newest = account.running[-1]
            if over / account.weight > most and newest.phase is Phase.RUNNING:
                most, victim = over / account.weight, newest
        return victim

    def _make_room_in_arena(self, account: Account, take_lease: Callable[[Sequence], None]) -> None:
        """Takes one adapter off the device, with the leases on it, and keeps its room for what a tenant waits for."""
        waiting = (
            one.submit.version
            for one in itertools.chain(account.returning, account.waiting)
            if one.lease is None and not self._leases.is_over_budget(one)
        )
        starved = next((version for version in waiting if version is not None and self._leases.is_starved(version)), None)
        if starved is None:
            return
        victims = self._arena_victims(account, starved)
        if not victims or victims[0].lease is None:
            return
        self._leases.reserve(starved)
        self._leases.evict(victims[0].lease.version)
        for sequence in victims:
            take_lease(sequence)

    def _arena_victims(self, beneficiary: Account, version: str) -> list[Sequence]:
        """Returns who must give leases back so that a version of the tenant most above its share can go for another.

        They are all that use the version of its newest request. The version of its oldest one stays; so do one that another
        tenant uses too, since taking that would free nothing, and one that was taken away and could not come back.
        """
        above = [
            (excess / account.weight, account)
            for account in self._tenants.active
            if (excess := self._leases.excess_of(account.name)) > 0
            and self._leases.yields(account.name, version=version, loader=beneficiary.name)
        ]
        for _, account in sorted(above, key=lambda entry: -entry[0]):
            holders = [one for one in (*account.running, *account.returning) if one.phase is not Phase.ENDED]
            holders.sort(key=lambda sequence: -sequence.order)
            users: dict[str, list[Sequence]] = {}
            for sequence in holders:
                if sequence.lease is not None:
                    users.setdefault(sequence.lease.version, []).append(sequence)
            for used, sequences in users.items():
                is_its_alone = len(sequences) == self._leases.active[used]
                frees = is_its_alone and self._leases.may_return(used) and not self._leases.is_pinned(used)
                if sequences[-1] is not holders[-1] and frees:
                    return sequences
        return []

    def _seats_due(self, account: Account) -> int:
        """Returns how many seats a tenant may still claim; below 0 it holds more than its share."""
        return int(self._claim(account.weight)) - len(account.running)

    def _claim(self, weight: Integers | int) -> Integers:
        """Returns how many seats an eligible tenant of a weight is entitled to, or several; never less than one."""
        return np.maximum(1, weight * self._limits.max_sequences // self._tenants.weights)

    def _share_of_pages(self, account: Account) -> float:
        return self._tenants.share(account) * self._pool.num_pages

    def _excess_of_pages(self, account: Account) -> float:
        return self._pool.held_by(account.name) - self._share_of_pages(account)

    def page_victim(self, grower: Sequence) -> Sequence | None:
        """Returns who gives its pages up where none is left for one that grows, or None when that one waits for a page.

        It is the newest request of a tenant above its share, the one that grows counted as it will be: of the one most above
        it, but a tenant's oldest request goes only when nothing else does, and the oldest of all last. So the oldest request
        of a tenant within its share goes on, come what may; one that alone takes more than that waits for the others' ends.
        """
        above = [
            (account.running[-1] is not self._running[0], len(account.running) > 1, excess / account.weight, account)
            for account in self._tenants.active
            if account.running and (excess := self._excess_of_pages(account) + (account is grower.account)) > 0
        ]
        victim = max(above, key=lambda entry: entry[:3])[3].running[-1]
        return None if victim is grower is self._running[0] else victim
