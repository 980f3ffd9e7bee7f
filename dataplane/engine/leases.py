"""Adapters of running requests: their leases, what they take of a step's rank rows, and which versions are waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dataplane.engine.sequence import Sequence
from dataplane.lora.holdings import Lease
from kernels.rows import aligned_rank


class Adapters(Protocol):
    """What the scheduler needs to know of adapters on the device."""

    def acquire(self, version: str, tenant: str = "", *, weight: int = 1) -> Lease | None:
        """Takes a lease, or returns None when the version is not on the device; then it is remembered as wanted."""

    def release(self, lease: Lease, *, served: int = 0) -> None:
        """Gives a lease back, under which so many tokens were computed."""

    def withdraw(self, version: str) -> None:
        """Notes that nobody waits for a version any more."""

    def arrived(self) -> Mapping[str, int]:
        """Returns the versions that may have come to the device since the last call, with the bytes that were copied."""

    def is_starved(self, version: str) -> bool:
        """Whether the version could be loaded but for the slots and bytes that leases hold."""

    def reserve(self, version: str) -> None:
        """Lets a wanted version have the next slot and bytes that come free."""

    def evict(self, version: str) -> None:
        """Gives out no more leases of a version, whose copy goes with the last of them; it may be loaded again."""

    def may_return(self, version: str) -> bool:
        """Whether a version that leaves the device may be loaded again."""

    def excess_of(self, tenant: str) -> float:
        """Returns by how much a tenant's adapters take more of the arena than its share; below 0 it may have more."""

    def yields(self, holder: str, *, version: str, loader: str) -> bool:
        """Whether a tenant holds so much more of the arena than its share that it gives way to another's load of a version."""


class Leases:
    """Takes and gives back leases of sequences. Owned by the scheduler.

    Args:
        adapters: Adapters on the device.
        max_rank_rows: Rank rows that the adapters of all sequences that hold a lease may have together.

    Attributes:
        active: How many sequences hold a lease of a version.
        num_rank_rows: Rank rows that the adapters of all sequences that hold a lease have together; others only read it.
    """

    def __init__(self, adapters: Adapters, *, max_rank_rows: int) -> None:
        self._adapters = adapters
        self._max_rank_rows = max_rank_rows
        self.num_rank_rows = 0
        self._awaited: dict[str, int] = {}
        self.active: dict[str, int] = {}

    def take(self, sequence: Sequence, version: str, missed: set[str]) -> bool:
        """Gives a sequence its lease and returns True; versions that are not on the device are added to `missed`."""
        submit = sequence.submit
        lease = self._adapters.acquire(version, submit.tenant, weight=submit.weight)
        if lease is None:
            missed.add(version)
            return False
        rows = aligned_rank(lease.rank)
        if version not in self.active:
            if self.num_rank_rows + rows > self._max_rank_rows:
                self._adapters.release(lease)
                return False
            self.num_rank_rows += rows
        self.active[version] = self.active.get(version, 0) + 1
        sequence.lease = lease
        sequence.rank_rows = rows
        self.expect_less(version)
        return True

    def give_back(self, sequence: Sequence) -> None:
        """Ends a sequence's lease, if it has one."""
        lease = sequence.lease
        if lease is None:
            return
        sequence.lease = None
        self.active[lease.version] -= 1
        if not self.active[lease.version]:
            del self.active[lease.version]
            self.num_rank_rows -= sequence.rank_rows
        self._adapters.release(lease, served=sequence.num_charged)

    def withhold(self, sequence: Sequence) -> None:
        """Ends the lease of a sequence, which waits for its adapter again; one that it could not have again it keeps."""
        if sequence.lease is not None and self.may_return(sequence.lease.version):
            self.expect(sequence.lease.version)
            self.give_back(sequence)

    def stand_aside(self, sequence: Sequence) -> None:
        """Ends the lease of a sequence that waits, or its wait for one; a lease that it could not have again it keeps."""
        if sequence.lease is None:
            self.expect_less(sequence.submit.version)
        elif self.may_return(sequence.lease.version):
            self.give_back(sequence)

    def expect(self, version: str | None) -> None:
        """Counts one request more that waits for a version; None is the base, which is always there."""
        if version is not None:
            self._awaited[version] = self._awaited.get(version, 0) + 1

    def expect_less(self, version: str | None) -> None:
        """Counts one request less; after the last one nobody waits for the version."""
        if version is None:
            return
        self._awaited[version] -= 1
        if not self._awaited[version]:
            del self._awaited[version]
            self._adapters.withdraw(version)

    def arrived(self) -> Mapping[str, int]:
        """Returns the versions that may have come to the device since the last call, with the bytes that were copied."""
        return self._adapters.arrived()

    def is_starved(self, version: str) -> bool:
        """Whether the version could be loaded but for the slots and bytes that leases hold."""
        return self._adapters.is_starved(version)

    def reserve(self, version: str) -> None:
        """Lets a version that is waited for have the next room on the device."""
        self._adapters.reserve(version)

    def evict(self, version: str) -> None:
        """Lets a version leave the device with the last lease on it."""
        self._adapters.evict(version)

    def may_return(self, version: str) -> bool:
        """Whether a version that leaves the device may be loaded again."""
        return self._adapters.may_return(version)

    def excess_of(self, tenant: str) -> float:
        """Returns by how much a tenant's adapters take more of the arena than its share; below 0 it may have more."""
        return self._adapters.excess_of(tenant)

    def yields(self, holder: str, *, version: str, loader: str) -> bool:
        """Whether a tenant holds so much more of the arena than its share that it gives way to another's load of a version."""
        return self._adapters.yields(holder, version=version, loader=loader)
