"""Loads to the device: which wanted version is loaded next, and how each load ends. Integers only."""

from __future__ import annotations

from dataplane.lora.copies import Copies
from dataplane.lora.entries import Entry
from dataplane.lora.holdings import LoadPlan
from dataplane.lora.shares import Shares
from dataplane.lora.wants import Wants


class DeviceLoads:
    """What is loaded, in turn. Owned by one `Residency`, called under its lock.

    Args:
        copies: Where images go.
        wants: What requests wait for.
        shares: Limits of those that wait.

    Attributes:
        num_done: Loads that are visible, or were.
        num_failed: Loads that did not work.
    """

    def __init__(self, copies: Copies, wants: Wants, shares: Shares) -> None:
        self._copies = copies
        self._wants = wants
        self._shares = shares
        self._epoch = 0
        self.num_done = self.num_failed = 0

    def next(self) -> LoadPlan | None:
        """See `Residency.next_load`."""
        no_room: set[tuple[str, tuple[int, ...]]] = set()  # hundreds may wait, and most are alike
        for version in self._wants.in_turn(self._is_loadable):
            entry, tenant = self._copies.entries[version], self._wants[version].tenant
            if (tenant, entry.blocks) in no_room:
                continue
            plan = self._copies.take(entry, tenant, limit=self.limit_on(version), is_due=self._wants.is_due(version))
            if plan is not None:
                self._wants.pass_over(version, self._is_loadable)
                return plan
            no_room.add((tenant, entry.blocks))
        return None

    def commit(self, plan: LoadPlan) -> int | None:
        """See `Residency.commit`."""
        entry = self._loading(plan)
        self._epoch += 1
        self.num_done += 1
        entry.place, entry.epoch, entry.served = "device", self._epoch, 0
        self._copies.charges.touch(entry)
        entry.awaited = self._wants.drop(plan.version)
        self._copies.offer(entry)
        self._copies.touch(entry)
        return None if self._copies.settle(entry) else entry.epoch

    def fail(self, plan: LoadPlan, *, retry: bool) -> None:
        """See `Residency.fail`."""
        entry = self._loading(plan)
        self.num_failed += 1
        self._copies.free(entry)
        if plan.version in self._wants and retry:
            self._wants.put_last(plan.version)
        else:
            self._wants.drop(plan.version)
        entry.in_host = entry.in_host and retry
        self._copies.settle(entry)

    def missing(self) -> tuple[str, ...]:
        """See `Residency.missing`."""
        return tuple(version for version in self._wants if self._is_missing(version))

    def limit_on(self, version: str) -> int | None:
        """Returns the limit in units that a load of a wanted version meets: a pin meets none."""
        return None if version in self._copies.pins else self._shares.limit(self._wants[version].tenant)

    def _is_loadable(self, version: str) -> bool:
        """Whether a version could be loaded if there was room."""
        entry = self._copies.entries.get(version)
        if entry is None or not entry.in_host or entry.place != "host" or entry.dropped:
            return False
        return self._copies.charges.admits(entry, self._wants[version].tenant, self.limit_on(version))

    def _is_missing(self, version: str) -> bool:
        entry = self._copies.entries.get(version)
        return entry is None or entry.dropped or (entry.place == "host" and not entry.in_host)

    def _loading(self, plan: LoadPlan) -> Entry:
        entry = self._copies.entries[plan.version]
        assert (entry.place, entry.slot) == ("loading", plan.slot), "a load ends once"
        return entry
