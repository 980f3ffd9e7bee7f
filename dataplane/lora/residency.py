"""Which adapter versions the device holds, for whom, and which comes next. Integers only, one lock, no I/O under it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dataplane.lora.copies import Copies
from dataplane.lora.device_loads import DeviceLoads
from dataplane.lora.entries import Entry
from dataplane.lora.eviction import Policy, Usage
from dataplane.lora.holdings import Budget, Counters, Evicted, Holding, Lease, LoadPlan, Loss
from dataplane.lora.shares import Shares
from dataplane.lora.wants import Wants

_HALF_LIFE_PER_SLOT = 64
"""Uses after which a use counts half, in uses a slot: long enough to tell the 40th of 3,000 adapters from the 80th."""


class Residency:
    """States of all versions: absent → host → loading → device → host → absent.

    A version on the device keeps its slot and units while a lease is held; which of the others make room is said by `Copies`,
    which are wanted and whose turn it is by `Wants`, and what is loaded by `DeviceLoads`.

    Above shares stand limits: what the copies charged to a tenant take together never exceeds its own. Its idle copies make room
    for its loads then, and where they do not suffice it waits, and holds nobody up. A pinned copy makes room for nothing.

    Any thread may call any method: scheduler and prefetcher meet here.

    Args:
        max_slots: Slots of the descriptor table.
        num_units: Units of the arena.
        unit_bytes: Bytes of a unit.
        max_passed_over: How often others may go first.
        quantum_tokens: Tokens that a loaded version serves before it gives way while requests wait for it.
        policy: Says what a copy is worth; None is `Usage`.
    """

    def __init__(
        self,
        max_slots: int,
        *,
        num_units: int,
        unit_bytes: int,
        max_passed_over: int = 16,
        quantum_tokens: int = 256,
        policy: Policy | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._shares = Shares(num_units, num_slots=max_slots)
        self._wants = Wants(self._shares, max_passed_over=max_passed_over)
        self._copies = Copies(
            self._shares,
            max_slots=max_slots,
            num_units=num_units,
            unit_bytes=unit_bytes,
            quantum_tokens=quantum_tokens,
            policy=policy or Usage(half_life=_HALF_LIFE_PER_SLOT * max_slots),
        )
        self._loads = DeviceLoads(self._copies, self._wants, self._shares)
        self._entries, self._charges, self._pins = self._copies.entries, self._copies.charges, self._copies.pins
        self._unit_bytes = unit_bytes
        self._lease_id = self._hits = self._misses = 0
        self._freed: list[Evicted] = []

    def stage(self, version: str, *, rank: int, blocks: Sequence[int], loss: Loss | None = None) -> None:
        """Notes that a version's image lies in host memory; doing it again changes nothing.

        Args:
            version: Digest of the version.
            rank: Its largest rank.
            blocks: Bytes of each block of its image, in order.
            loss: What it loses in fp8, for `holdings`.

        Raises:
            DoesNotFitError: The image is larger than the arena.
        """
        with self._lock:
            needed = self._copies.needed(blocks)
            entry = self._entries.setdefault(version, Entry(version))
            entry.in_host, entry.dropped = True, False
            if entry.place == "host":
                entry.rank, entry.blocks, entry.needed, entry.loss = rank, tuple(blocks), needed, loss
                if version in self._pins:
                    self._wants.add(version, self._pins[version], weight=1, is_requested=False)
            elif entry.place == "device":
                self._copies.offer(entry)

    def unstage(self, version: str, *, drop_device: bool = False) -> Evicted | None:
        """Notes that a version's image is no longer in host memory; unknown versions are ignored.

        Args:
            version: Digest of the version.
            drop_device: Also free its device copy as soon as no lease is held, and give out no more leases.

        Returns:
            The device copy that was freed now; None: there is none, or leases are held.
        """
        with self._lock:
            if drop_device:
                self._end_pin(version)
            entry = self._entries.get(version)
            if entry is None:
                return None
            entry.in_host = False
            entry.dropped = entry.dropped or drop_device
            if entry.place == "device":
                self._copies.offer(entry)
            return self._copies.settle(entry)

    def want(self, version: str, tenant: str = "", *, weight: int = 1, max_bytes: int = 0) -> bool:
        """Notes that a request of a tenant waits for a version, until `withdraw`; returns whether the device has it."""
        with self._lock:
            entry = self._find(version, tenant, weight, self._limit_of(max_bytes))
            if entry is not None:
                entry.awaited = True
            return entry is not None

    def acquire(self, version: str, tenant: str = "", *, weight: int = 1, max_bytes: int = 0) -> Lease | None:
        """Takes a lease on a version's device copy, or returns None and remembers it as wanted where the device does not have it.

        Whoever got None calls again later. Once nobody waits for the version any more, `withdraw` says so.

        Args:
            version: Digest of the version.
            tenant: Who uses it, and pays for the copy.
            weight: That tenant's share relative to others.
            max_bytes: What copies charged to the tenant may take, in whole units; 0 for no limit.
        """
        with self._lock:
            limit = self._limit_of(max_bytes)
            entry = self._find(version, tenant, weight, limit)
            if entry is None or not self._charge(entry, tenant, limit):
                return None
            self._lease_id += 1
            entry.leases[self._lease_id] = tenant
            self._charges.touch(entry)
            entry.owed = False
            self._shares.claim(tenant, weight=weight, max_units=limit)
            entry.uses += 1
            self._copies.touch(entry, uses=1)
            self._hits += 1
            return Lease(self._lease_id, version, entry.slot, entry.rank, entry.epoch)

    def release(self, lease: Lease, *, served: int = 0) -> Evicted | None:
        """Gives a lease back, once.

        Args:
            lease: The lease.
            served: Tokens that were computed under it.

        Returns:
            The device copy, if it was to go and was freed now.
        """
        with self._lock:
            entry = self._entries[lease.version]
            assert lease.lease_id in entry.leases, "a lease is released once"
            self._shares.disclaim(entry.leases.pop(lease.lease_id))
            self._charges.touch(entry)
            entry.served += served
            self._copies.touch(entry)
            return self._copies.settle(entry)

    def withdraw(self, version: str) -> None:
        """Notes that no request waits for a version any more: it is neither loaded nor kept for a lease to come."""
        with self._lock:
            self._wants.end_requests(version, is_pinned=version in self._pins)
            if entry := self._entries.get(version):
                entry.awaited = False

    def pin(self, version: str, owner: str) -> None:
        """Has a version loaded as if a request of its owner waited for it, and kept; its owner pays for the copy meanwhile."""
        with self._lock:
            self._pins[version] = owner
            limit = self._shares.limit(owner)
            found = self._find(version, owner, 1, limit, is_requested=False)
            if found is None and self._wants[version].tenant != owner:
                self._wants.hand_over(version, owner, weight=1, max_units=limit)
            entry = found or self._entries.get(version)
            if entry is not None and entry.place != "host":
                self._charges.rebook(entry, owner)

    def unpin(self, version: str) -> None:
        """Lets a version's copy make room again; where no request waits for it, it is not loaded. Unknown ones are ignored."""
        with self._lock:
            self._end_pin(version)
            if entry := self._entries.get(version):
                self._charges.touch(entry)

    def is_pinned(self, version: str) -> bool:
        """Whether a version is pinned."""
        with self._lock:
            return version in self._pins

    def budget(self, version: str, tenant: str, *, max_bytes: int) -> Budget | None:
        """Returns what a tenant's limit leaves for a version; None where that does not matter.

        It does not where there is no limit, no image yet, or a copy that the tenant pays for, or uses beside who pays for it.
        """
        with self._lock:
            limit, entry = self._limit_of(max_bytes), self._entries.get(version)
            if limit is None or entry is None or not entry.blocks:
                return None
            is_paid = entry.tenant == tenant or {entry.tenant, tenant} <= set(entry.leases.values())
            if entry.place != "host" and is_paid:
                return None
            units = (entry.needed, self._charges.booked(tenant), self._charges.busy(tenant), limit)
            return Budget(*(number * self._unit_bytes for number in units))

    def take_freed(self) -> list[Evicted]:
        """Returns the copies that made way for a tenant's limit since the last call, with the slots that they had."""
        with self._lock:
            freed, self._freed = self._freed, []
            return freed

    def reserve(self, version: str) -> None:
        """Lets a wanted version have the next room: nothing else is loaded before it."""
        with self._lock:
            self._wants.reserve(version)

    def evict(self, version: str) -> Evicted | None:
        """Frees a version's device copy as soon as no lease is held, and gives out no more; it may be loaded again.

        A pinned one stays.

        Returns:
            The copy, if it was freed now.
        """
        with self._lock:
            entry = self._entries.get(version)
            if entry is None or entry.place != "device" or version in self._pins:
                return None
            entry.leaving = True
            return self._copies.settle(entry)

    def may_return(self, version: str) -> bool:
        """Whether a version that leaves the device may be loaded again; not one that was taken away."""
        with self._lock:
            entry = self._entries.get(version)
            return entry is None or not entry.dropped

    def arena_bytes(self, version: str) -> int:
        """Returns the bytes of the arena that a version's copy takes, or is about to."""
        with self._lock:
            entry = self._entries.get(version)
            return 0 if entry is None else entry.num_units * self._unit_bytes

    def excess_of(self, tenant: str) -> float:
        """Returns by how many units a tenant is above its share; 0 for one that has none: it neither holds a lease nor waits."""
        with self._lock:
            return self._shares.excess(tenant) if self._shares.has(tenant) else 0.0

    def yields(self, holder: str, *, version: str, loader: str) -> bool:
        """Whether a tenant is so far above its share that it gives way to another's load of a version; see `Shares.yields`."""
        with self._lock:
            entry = self._entries.get(version)
            if entry is None or not self._shares.has(loader):
                return False
            return self._shares.yields(holder, loader=loader, more=entry.needed)

    def wanted(self) -> tuple[str, ...]:
        """Returns the versions that were missed and not loaded since, first missed first."""
        with self._lock:
            return tuple(self._wants)

    def missing(self) -> tuple[str, ...]:
        """Returns the wanted versions that have no image in host memory and are not loading, first missed first."""
        with self._lock:
            return self._loads.missing()

    def next_load(self) -> LoadPlan | None:
        """Picks a wanted version whose image is in host memory and for which there is or can be made room.

        Its state becomes `loading`; the caller ends that by `commit` or `fail`. Nothing is evicted unless the load fits then.
        """
        with self._lock:
            return self._loads.next()

    def commit(self, plan: LoadPlan) -> int | None:
        """Notes that a load is done and visible.

        Returns:
            The load's epoch; None when the version was dropped meanwhile, so that it was freed at once.
        """
        with self._lock:
            return self._loads.commit(plan)

    def fail(self, plan: LoadPlan, *, retry: bool) -> None:
        """Notes that a load did not work; its slot and units are free again.

        Args:
            plan: The load.
            retry: Whether to try again after all other wanted versions; else the image is forgotten, as by `unstage`, and the
                version is wanted no more.
        """
        with self._lock:
            self._loads.fail(plan, retry=retry)

    def slot_of(self, version: str) -> int:
        """Returns the slot of a version's device copy; -1 without one."""
        with self._lock:
            entry = self._entries.get(version)
            return entry.slot if entry is not None and entry.place == "device" else -1

    def holdings(self) -> tuple[Holding, ...]:
        """Returns every version in host memory or on the device, most recently used first."""
        with self._lock:
            entries = sorted(self._entries.values(), key=lambda entry: -entry.used_at)
            return tuple(entry.holding() for entry in entries)

    @property
    def counters(self) -> Counters:
        """What happened since the start."""
        with self._lock:
            loads = self._loads
            return Counters(self._hits, self._misses, loads.num_done, loads.num_failed, self._copies.num_evicted)

    @property
    def units_used(self) -> int:
        """Units of the arena that hold an image or are about to."""
        with self._lock:
            return self._copies.units.used

    @property
    def largest_hole(self) -> int:
        """Units of the largest free extent; against what is free it measures fragmentation."""
        with self._lock:
            return self._copies.units.largest_hole

    def _find(self, version: str, tenant: str, weight: int, limit: int | None, *, is_requested: bool = True) -> Entry | None:
        """Returns a version's device copy, or None after remembering it as wanted."""
        entry = self._entries.get(version)
        if entry is not None and entry.place == "device" and not entry.dropped and not entry.leaving:
            return entry
        is_new = self._wants.add(version, tenant, weight=weight, max_units=limit, is_requested=is_requested)
        self._misses += is_new
        self._shares.restrict(tenant, limit)
        if not is_new and entry is not None and (payer := self._wants[version].tenant) != tenant:
            is_kept = not self._charges.admits(entry, payer, self._loads.limit_on(version))
            if is_kept and self._charges.admits(entry, tenant, limit):
                self._wants.hand_over(version, tenant, weight=weight, max_units=limit)
        return None

    def _charge(self, entry: Entry, tenant: str, limit: int | None) -> bool:
        """Makes a tenant pay for a copy that it uses, within its limit; or else the copy stays with a payer that uses it too.

        Returns whether somebody who uses it pays for it now; else nothing was changed.
        """
        if entry.tenant == tenant or entry.version in self._pins:
            return True
        gone = self._charges.making_way(entry, tenant, limit, self._copies.idle)
        if gone is None:
            return entry.tenant in entry.leases.values()
        self._freed += self._copies.evict(gone)
        self._charges.rebook(entry, tenant)
        return True

    def _end_pin(self, version: str) -> None:
        if self._pins.pop(version, None) is not None:
            self._wants.end_pin(version)

    def _limit_of(self, max_bytes: int) -> int | None:
        return max_bytes // self._unit_bytes if max_bytes else None
