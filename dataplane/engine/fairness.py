"""The order of waiting requests: tenants by virtual time, each tenant's own requests first come first served."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from dataplane.engine.sequence import Phase, Sequence

_PRUNE_ABOVE = 1024


@dataclass(slots=True)
class _Tenant:
    time: float
    queue: list[Sequence] = field(default_factory=list)


class FairQueue:
    """Waiting sequences. A tenant's virtual time grows by served tokens over its weight; the least goes first.

    A tenant that comes back after a pause starts at the queue's clock (the time of what was admitted last), so that idling
    banks no credit. Of many idle tenants the half that owes least is forgotten. Owned by the scheduler.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._clock = 0.0
        self._num_waiting = 0
        self._prune_above = _PRUNE_ABOVE

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        """Puts a sequence at its tenant's end."""
        tenant = self._tenant(sequence)
        if not tenant.queue:
            tenant.time = max(tenant.time, self._clock)
        tenant.queue.append(sequence)
        self._num_waiting += 1

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        tenant = self._tenants[sequence.submit.tenant]
        tenant.queue.remove(sequence)
        self._num_waiting -= 1
        self._forget_if_idle(sequence.submit.tenant)

    def admit(self, sequence: Sequence) -> None:
        """Takes out a sequence that is admitted and charges its prompt."""
        self._clock = max(self._clock, self._tenants[sequence.submit.tenant].time)
        self.charge(sequence, len(sequence.submit.prompt))
        self.discard(sequence)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Adds served tokens to the virtual time of the sequence's tenant."""
        self._tenant(sequence).time += num_tokens / max(1, sequence.submit.weight)

    def in_order(self) -> Iterator[Sequence]:
        """Yields waiting sequences, fairest first. The queue may be changed only by `admit` of what was just yielded."""
        heap = [(tenant.time, name, 0, tuple(tenant.queue)) for name, tenant in self._tenants.items() if tenant.queue]
        heapq.heapify(heap)
        while heap:
            time, name, index, queue = heap[0]
            sequence = queue[index]
            if index + 1 < len(queue):
                cost = len(sequence.submit.prompt) / max(1, sequence.submit.weight)
                heapq.heapreplace(heap, (time + cost, name, index + 1, queue))
            else:
                heapq.heappop(heap)
            if sequence.phase is Phase.WAITING:
                yield sequence

    def _tenant(self, sequence: Sequence) -> _Tenant:
        name = sequence.submit.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._clock)
        return tenant

    def _forget_if_idle(self, name: str) -> None:
        tenant = self._tenants[name]
        if not tenant.queue and tenant.time <= self._clock:
            del self._tenants[name]
        if len(self._tenants) > self._prune_above:
            idle = sorted((tenant.time, name) for name, tenant in self._tenants.items() if not tenant.queue)
            for _, forgiven in idle[: (len(idle) + 1) // 2]:
                del self._tenants[forgiven]
            self._prune_above = max(_PRUNE_ABOVE, 2 * len(self._tenants))
