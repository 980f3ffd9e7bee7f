"""Which prompts go on, and which waiting requests start, in the order of fair shares. Integers only."""

from __future__ import annotations

import enum
import itertools

from dataplane.engine.draft import Draft
from dataplane.engine.fairness import Tenants
from dataplane.engine.leases import Leases
from dataplane.engine.limits import Limits
from dataplane.engine.seating import Seating
from dataplane.engine.sequence import Phase, Sequence

_MIB = 1 << 20
_MAX_STARVED = 8


class _Lack(enum.Enum):
    """What a waiting sequence lacks: pages; rank rows or a slot; its image on the device; or only its turn."""

    PAGES = "pages"
    ROOM = "room"
    IMAGE = "image"
    TURN = "turn"


class Prefill:
    """Fills what a step has left with prompts. Owned by the scheduler.

    Who lacks something is passed over, but not for ever: past `max_passes` it becomes the barrier, which is tried first and
    behind which nobody takes what it lacks (pages: nobody at all; rank rows or a slot: no other adapter). Who lacks its image is
    put aside until that has come; where its adapter starts later in the prompt, the pages before are computed first, by the base,
    and kept in the cache. Meanwhile it holds neither seat nor pages, so that no load is ever waited for with them.
    """

    def __init__(self, limits: Limits, tenants: Tenants, seating: Seating, *, leases: Leases) -> None:
        self._limits = limits
        self._tenants = tenants
        self._seating = seating
        self._leases = leases
        self._barrier: Sequence | None = None

    def wake(self) -> None:
        """Lets requests be tried again whose adapter came, or cannot come while others hold leases."""
        for version, num_bytes in self._leases.arrived().items():
            account = self._tenants.unpark(version)
            if account is not None:
                account.service += num_bytes / _MIB * self._limits.prices.load_mib / account.weight
        starved = [
            version
            for version in itertools.islice(self._tenants.parked_versions, _MAX_STARVED)
            if self._leases.is_starved(version)
        ]
        for version in starved:
            self._tenants.unpark(version)

    def fill(self, draft: Draft, favoured: list[Sequence]) -> None:
        """Goes on with prompts and starts waiting ones, `favoured` first, while budget, seats, pages and adapters allow."""
        passed: list[Sequence] = []
        has_admitted = False
        seats = self._seating.seats
        barrier = self._barrier if self._barrier is not None and self._barrier.phase is Phase.WAITING else None
        self._barrier = None
        first = [barrier, *favoured] if barrier is not None and barrier not in favoured else favoured
        for sequence in itertools.chain(first, self._tenants.in_order(seats, max_scan=self._limits.max_scan)):
            if not draft.budget:
                break
            if sequence.phase is Phase.RUNNING:
                if sequence.is_unfinished and not sequence.preempting and (count := draft.room_for(sequence)):
                    draft.add(sequence, count)
                continue
            if sequence.phase is Phase.ENDED or sequence.paused or not seats:
                continue
            lack = self._lack(sequence, draft)
            if lack is None:
                has_admitted |= sequence.order < 0
                self._start(sequence, draft)
            elif lack is _Lack.IMAGE:
                if self._start_ahead(sequence, draft):
                    has_admitted = True
                else:
                    self._tenants.park(sequence)
            elif lack is not _Lack.TURN:
                sequence.account.lacks_pages = lack is _Lack.PAGES
                passed.append(sequence)
                if sequence.passes >= self._limits.max_passes:
                    self._barrier = sequence
                    if lack is _Lack.PAGES:
                        break
        if has_admitted:
            for sequence in passed:
                sequence.passes += 1

    def _lack(self, sequence: Sequence, draft: Draft) -> _Lack | None:
        """Says what keeps a waiting sequence from starting; when nothing does, it holds its lease."""
        version = None if sequence.lease is not None else sequence.submit.version
        missed = draft.missed
        if version is not None:
            if version in missed:
                return _Lack.TURN if self._leases.is_starved(version) else _Lack.IMAGE
            if self._barrier is not None:
                return _Lack.TURN
        if sequence.is_scored and not draft.may_score:
            return _Lack.TURN
        if not self._seating.has_pages(sequence):
            return _Lack.PAGES
        if version is None or self._leases.take(sequence, version, missed):
            return None
        if version in missed and not self._leases.is_starved(version):
            return _Lack.IMAGE
        return _Lack.ROOM

    def _start(self, sequence: Sequence, draft: Draft) -> None:
        """Seats a sequence that lacks nothing and plans its first rows."""
        if sequence.order < 0:
            self._leases.expect_less(sequence.submit.version, withdraw=False)
        self._seat(sequence, draft)

    def _start_ahead(self, sequence: Sequence, draft: Draft) -> bool:
        """Starts a sequence without its adapter where pages of the base's are to be computed; returns whether it did."""
        if not sequence.num_ahead or self._barrier is not None or not self._seating.has_pages(sequence):
            return False
        if sequence.num_ahead <= self._seating.num_cached(sequence):
            return False
        sequence.is_ahead = True
        self._seat(sequence, draft)
        return True

    def _seat(self, sequence: Sequence, draft: Draft) -> None:
        num_shared = self._seating.seat(sequence)
        draft.add(sequence, draft.room_for(sequence), new_pages=sequence.pages, num_shared=num_shared)
