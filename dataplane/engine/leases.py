"""Adapters of running requests: their leases, what they take of a step's rank rows, and which versions are waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dataplane.engine.messages import Submit
from dataplane.engine.rank_budget import RankBudget
from dataplane.engine.sequence import Lack, Sequence
from dataplane.lora.holdings import Budget, Lease, TenantLimitError
from kernels.rows import aligned_rank


class Adapters(Protocol):
    """What the scheduler needs to know of adapters on the device."""

    def acquire(self, version: str, tenant: str = "", *, weight: int = 1, max_bytes: int = 0) -> Lease | None:
        """Takes a lease, or returns None when the version is not on the device; then it is remembered as wanted.

        None is also the answer where the tenant's limit of bytes does not admit the copy; see `budget`.
        """

    def release(self, lease: Lease, *, served: int = 0) -> None:
        """Gives a lease back, under which so many tokens were computed."""

    def withdraw(self, version: str) -> None:
        """Notes that nobody waits for a version any more."""

    def arrived(self) -> Mapping[str, int]:
        """Returns the versions that may have come to the device since the last call, with the bytes that were copied."""

    def is_starved(self, version: str) -> bool:
        """Whether the version could be loaded but for the slots and bytes that leases hold."""

    def budget(self, version: str, tenant: str, *, max_bytes: int) -> Budget | None:
        """Returns what a tenant's limit of bytes leaves for a version; None where that does not matter."""

    def is_pinned(self, version: str) -> bool:
        """Whether a version's copy stays whoever needs its room."""

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
        self._budget = RankBudget()
        self.num_rank_rows = 0
        self._awaited: dict[str, int] = {}
        self.active: dict[str, int] = {}

    def check(self, submit: Submit) -> None:
        """Refuses a request whose adapter alone exceeds a limit of its tenant, as far as its size is known.

        Raises:
            TenantLimitError: It could never run; says what it needs, what is allowed and what is used.
        """
        fault = self._fault(submit, max_rank_rows=submit.max_rank_rows, max_arena_bytes=submit.max_arena_bytes)
        if fault is not None:
            raise TenantLimitError(fault)

    def fault_of(self, sequence: Sequence) -> str | None:
        """Returns why a sequence can never run within its tenant's limits as they are now; None when it can."""
        account = sequence.account
        return self._fault(sequence.submit, max_rank_rows=account.max_rank_rows, max_arena_bytes=account.max_arena_bytes)

    def is_over_budget(self, sequence: Sequence) -> bool:
        """Whether a sequence without a lease has to wait until its tenant uses less."""
        submit, account = sequence.submit, sequence.account
        if submit.version is None:
            return False
        if not self._budget.admits(submit, allowed=account.max_rank_rows):
            return True
        budget = self._arena_budget(submit, max_bytes=account.max_arena_bytes)
        return budget is not None and budget.is_spent

    def take(self, sequence: Sequence, version: str, missed: set[str]) -> Lack | None:
        """Gives a sequence its lease, or says what it lacks; versions that are not on the device are added to `missed`."""
        submit = sequence.submit
        lease = self._adapters.acquire(version, submit.tenant, weight=submit.weight, max_bytes=sequence.account.max_arena_bytes)
        if lease is None:
            if self.is_over_budget(sequence):
                return Lack.BUDGET
            missed.add(version)
            return Lack.ARENA if self.is_starved(version) else Lack.IMAGE
        rows = aligned_rank(lease.rank)
        if version not in self.active:
            if self.num_rank_rows + rows > self._max_rank_rows:
                self._adapters.release(lease)
                return Lack.RANK_ROWS
            self.num_rank_rows += rows
        self.active[version] = self.active.get(version, 0) + 1
        self._budget.add(submit)
        sequence.lease = lease
        sequence.rank_rows = rows
        self.expect_less(version)
        return None

    def give_back(self, sequence: Sequence) -> None:
        """Ends a sequence's lease, if it has one."""
        lease = sequence.lease
        if lease is None:
            return
        sequence.lease = None
        self._budget.remove(sequence.submit)
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

    def is_pinned(self, version: str) -> bool:
        """Whether a version's copy stays whoever needs its room."""
        return self._adapters.is_pinned(version)

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

    def _fault(self, submit: Submit, *, max_rank_rows: int, max_arena_bytes: int) -> str | None:
        fault = self._budget.fault(submit, allowed=max_rank_rows)
        budget = self._arena_budget(submit, max_bytes=max_arena_bytes)
        if fault is None and budget is not None and budget.is_hopeless:
            return (
                f"the adapter takes {budget.needed} bytes on the device; "
                f"its tenant may have {budget.allowed} and uses {budget.used}"
            )
        return fault

    def _arena_budget(self, submit: Submit, *, max_bytes: int) -> Budget | None:
        if not max_bytes or submit.version is None:
            return None
        return self._adapters.budget(submit.version, submit.tenant, max_bytes=max_bytes)
