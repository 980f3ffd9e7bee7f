"""Which prompts go on, and which waiting requests start, in the order of fair shares. Integers only."""

from __future__ import annotations

import itertools
from collections import Counter

from dataplane.engine.accounts import Account
from dataplane.engine.draft import Draft
from dataplane.engine.fairness import Tenants
from dataplane.engine.leases import Leases
from dataplane.engine.limits import Limits
from dataplane.engine.seating import Seating
from dataplane.engine.sequence import Lack, Phase, Sequence

_MIB = 1 << 20
_MAX_STARVED = 512
_MAX_OVER_BUDGET = 16
"""Requests beyond their tenant's budget that are looked at in a step, before the tenant starts nothing more in it."""


class Prefill:
    """Fills what a step has left with prompts. Owned by the scheduler.

    Who lacks something is passed over, but not for ever: past `max_passes` it becomes the barrier, which is tried first and
    behind which nobody takes what it lacks (pages: nobody starts at all; rank rows or room in the arena: no other adapter, and
    the next room in the arena is reserved for it). Who lacks budget holds up nobody but its own tenant, which past `max_passes`
    starts nothing before it, and banks no credit meanwhile; what no budget could admit is refused.

    Prompts that have begun go on in any case: they hold their pages, and free them at their end only. Who lacks its image is put
    aside until that has come; where its adapter starts later in the prompt, the pages before are computed first, by the base, and
    kept in the cache. Meanwhile it holds neither seat nor pages, so that no load is ever waited for with them.
    """

    def __init__(self, limits: Limits, tenants: Tenants, seating: Seating, *, leases: Leases) -> None:
        self._limits = limits
        self._tenants = tenants
        self._seating = seating
        self._leases = leases
        self._barrier: Sequence | None = None
        self._reserved: Sequence | None = None  # the one for which room in the arena is kept, until it starts or is paused
        self._passed: dict[Sequence, Lack] = {}
        self._spent: Counter[Account] = Counter()
        self._refused: list[tuple[Sequence, str]] = []

    def wake(self) -> None:
        """Lets requests be tried again whose adapter came, or of each tenant the first that cannot come for lack of room."""
        for version, num_bytes in self._leases.arrived().items():
            account = self._tenants.unpark(version)
            if account is not None:
                account.service += num_bytes / _MIB * self._limits.prices.load_mib / account.weight
        starved: dict[str, str] = {}
        for version, tenant in itertools.islice(self._tenants.parked_versions, _MAX_STARVED):
            if tenant not in starved and self._leases.is_starved(version):
                starved[tenant] = version
        for version in starved.values():
            self._tenants.unpark(version)

    def fill(self, draft: Draft, favoured: list[Sequence]) -> None:
        """Goes on with prompts and starts waiting ones, `favoured` first, while budget, seats, pages and adapters allow."""
        first = self._begin(favoured)
        has_admitted = is_shut = False
        seats = self._seating.seats
        for sequence in itertools.chain(first, self._tenants.in_order(seats, max_scan=self._limits.max_scan)):
            if not draft.budget:
                break
            if sequence.phase is Phase.RUNNING:
                if sequence.is_unfinished and not sequence.preempting and (count := draft.room_for(sequence)):
                    draft.add(sequence, count)
                continue
            if sequence.phase is Phase.ENDED or sequence.paused or is_shut or not seats:
                continue
            lack = self._lack(sequence, draft)
            if lack is None:
                has_admitted |= sequence.order < 0
                self._start(sequence, draft)
            elif lack is Lack.IMAGE:
                if self._start_ahead(sequence, draft):
                    has_admitted = True
                else:
                    self._tenants.park(sequence)
            elif lack is not Lack.TURN:
                self._pass_over(sequence, lack)
                is_shut = self._barrier is sequence and lack is Lack.PAGES
        if spent := [account for account in self._spent if account.lacks is Lack.BUDGET]:
            self._tenants.ledger.lift(spent)
        if has_admitted:
            for sequence in self._passed:
                sequence.passes += 1

    def take_refused(self) -> list[tuple[Sequence, str]]:
        """Returns the requests that were found to exceed a limit for good since the last call, and why."""
        refused, self._refused = self._refused, []
        return refused

    @property
    def lacking(self) -> set[Account]:
        """Tenants of which the last step passed something over."""
        return {sequence.account for sequence in self._passed}

    def count_lacking(self) -> dict[str, int]:
        """Returns how many of those that the last step passed over lack what."""
        counts = {lack.value: 0 for lack in (Lack.PAGES, Lack.RANK_ROWS, Lack.ARENA, Lack.BUDGET)}
        for sequence, lack in self._passed.items():
            counts[lack.value] += sequence.phase is Phase.WAITING and not sequence.is_parked and not sequence.paused
        return counts

    def _begin(self, favoured: list[Sequence]) -> list[Sequence]:
        """Forgets what the last step found; returns who is tried first."""
        for sequence in self._passed:
            sequence.account.lacks = None
            sequence.account.is_shut = False
        self._passed = {}
        self._spent.clear()
        barrier, self._barrier = self._barrier, None
        if self._reserved is not None and (self._reserved.phase is not Phase.WAITING or self._reserved.paused):
            self._reserved = None
        first = (one for one in (self._reserved, barrier) if one is not None and one.phase is Phase.WAITING and not one.is_parked)
        return list(dict.fromkeys([*first, *favoured]))

    def _pass_over(self, sequence: Sequence, lack: Lack) -> None:
        account = sequence.account
        if account.lacks in (None, Lack.BUDGET):
            account.lacks = lack
        self._passed[sequence] = lack
        if lack is Lack.BUDGET:
            self._spent[account] += 1
            account.is_shut |= sequence.passes >= self._limits.max_passes or self._spent[account] >= _MAX_OVER_BUDGET
            if (fault := self._leases.fault_of(sequence)) is not None:
                self._refused.append((sequence, fault))
        elif sequence.passes >= self._limits.max_passes:
            self._barrier = sequence
            if lack is Lack.ARENA and sequence.submit.version is not None and self._reserved in (None, sequence):
                self._reserved = sequence  # one at a time: two would take each other's room before they start
                self._leases.reserve(sequence.submit.version)

    def _lack(self, sequence: Sequence, draft: Draft) -> Lack | None:
        """Says what keeps a waiting sequence from starting; when nothing does, it holds its lease."""
        version = None if sequence.lease is not None else sequence.submit.version
        missed = draft.missed
        if version is not None:
            if self._leases.is_over_budget(sequence):
                return Lack.BUDGET
            if version in missed:
                return Lack.TURN if self._leases.is_starved(version) else Lack.IMAGE
            if self._barrier is not None:
                return Lack.TURN
        if sequence.is_scored and not draft.may_score:
            return Lack.TURN
        if not self._seating.has_pages(sequence):
            return Lack.PAGES
        return None if version is None else self._leases.take(sequence, version, missed)

    def _start_ahead(self, sequence: Sequence, draft: Draft) -> bool:
        """Starts a sequence without its adapter where pages of the base's are to be computed; returns whether it did."""
        if not sequence.num_ahead or sequence.order >= 0 or self._barrier is not None or not self._seating.has_pages(sequence):
            return False
        if sequence.num_ahead <= self._seating.num_cached(sequence):
            return False
        sequence.is_ahead = True
        self._start(sequence, draft)
        return True

    def _start(self, sequence: Sequence, draft: Draft) -> None:
        """Seats a sequence and plans its first rows."""
        num_shared = self._seating.seat(sequence)
        draft.add(sequence, draft.room_for(sequence), new_pages=sequence.pages, num_shared=num_shared)
