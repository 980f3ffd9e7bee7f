"""Requests that have not ended, and their deadlines. Integers and clock readings that callers bring."""

from __future__ import annotations

import heapq

from dataplane.engine.fairness import Tenants
from dataplane.engine.leases import Leases
from dataplane.engine.seating import Seating
from dataplane.engine.sequence import Phase, Sequence


class Requests:
    """All sequences that have not ended, by the id of their request, oldest first. Owned by the scheduler.

    Args:
        tenants: Where they queue.
        seating: Where they run.
        leases: What they wait for.
    """

    def __init__(self, tenants: Tenants, seating: Seating, *, leases: Leases) -> None:
        self._tenants = tenants
        self._seating = seating
        self._leases = leases
        self._sequences: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._count = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """Their ids."""
        return tuple(self._sequences)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of one that has not ended."""
        while self._deadlines and self._deadlines[0][2].phase is Phase.ENDED:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def get(self, request_id: str) -> Sequence | None:
        """Returns a sequence, or None when it has ended or never was."""
        return self._sequences.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Takes in a new one."""
        self._sequences[sequence.submit.request_id] = sequence
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, self._count, sequence))
            self._forget_ended_deadlines()
        self._count += 1

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it stands; what it holds goes back at once, or when its last rows are committed."""
        del self._sequences[sequence.submit.request_id]
        if sequence.phase is Phase.WAITING:
            self._tenants.discard(sequence)
        if sequence.lease is None and not sequence.stands_aside:
            self._leases.expect_less(sequence.submit.version)
        sequence.phase = Phase.ENDED
        self._seating.end(sequence)

    def waiting_for(self, version: str) -> list[Sequence]:
        """Returns those that wait for an adapter."""
        return [
            sequence for sequence in self._sequences.values() if sequence.submit.version == version and sequence.lease is None
        ]

    def pop_expired(self, now: float) -> Sequence | None:
        """Returns one whose deadline has passed, or None; the caller ends it before the next call."""
        deadline = self.next_deadline
        return None if deadline is None or deadline > now else heapq.heappop(self._deadlines)[2]

    def _forget_ended_deadlines(self) -> None:
        """Keeps no more ended requests than live ones: a distant deadline outlives its request by hours."""
        if len(self._deadlines) > 2 * len(self._sequences) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].phase is not Phase.ENDED]
            heapq.heapify(self._deadlines)
