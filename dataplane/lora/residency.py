"""Which adapter versions the device holds, for whom, and which comes next. Integers only, one lock, no I/O under it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dataplane.lora.units import Extent, Units
from veneer.errors import ResourceExhaustedError

Place = Literal["host", "loading", "device"]


class DoesNotFitError(ResourceExhaustedError):
    """A version's image is larger than the whole arena."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use one version's device copy, for one sequence from its first step to its last.

    Attributes:
        lease_id: Number of this lease.
        version: The version.
        slot: Its slot in the descriptor table, valid until `release`.
        rank: Its largest rank.
        epoch: Number of the load that put it there; no two loads share one, so it may be part of a cache key.
    """

    lease_id: int
    version: str
    slot: int
    rank: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """A version that lost its device copy, and the slot that it had."""

    version: str
    slot: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load to carry out: copy the image to the extents, publish the slot, then `commit`; or `fail`.

    Attributes:
        version: What to load.
        slot: Where it will be found.
        extents: Which units take it.
        evicted: What made room. Its slots and units count as free already, and some of them are in this plan.
    """

    version: str
    slot: int
    extents: tuple[Extent, ...]
    evicted: tuple[Evicted, ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """One version in memory.

    Attributes:
        version: The version.
        place: `host` (image in host memory only), `loading`, or `device`.
        rank: Largest rank.
        size_bytes: Bytes of the image.
        leases: Leases held.
        epoch: Number of its last load; 0 before the first.
    """

    version: str
    place: Place
    rank: int
    size_bytes: int
    leases: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened since the start.

    Attributes:
        hits: Leases given.
        misses: Versions that became wanted.
        loads: Loads committed.
        failures: Loads failed.
        evictions: Device copies that made room for others.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    failures: int = 0
    evictions: int = 0


@dataclass(slots=True)
class _Entry:
    version: str
    rank: int = 0
    blocks: tuple[int, ...] = ()
    in_host: bool = False
    place: Place = "host"
    slot: int = -1
    extents: tuple[Extent, ...] = ()
    epoch: int = 0
    leases: set[int] = field(default_factory=set)
    used_at: int = 0
    claimed: bool = False
    """Loaded for a waiting request that has not taken its lease yet."""
    dropped: bool = False
    """To be freed as soon as nobody needs it."""


@dataclass(slots=True)
class _Want:
    passed_over: int = 0
    """Loads that went first since there was no room for this one."""


class Residency:
    """States of all versions: absent → host → loading → device → host → absent.

    A version on the device keeps its slot and units while one lease is held or while a request that waited for it has yet to take
    its lease; of the others the one least recently used makes room first. Where a wanted version finds no room, later ones go
    first, `max_passed_over` times at most; then they wait too, so that a large adapter is not starved by small ones.

    Any thread may call any method: scheduler and prefetcher meet here.

    Args:
        max_slots: Slots of the descriptor table.
        num_units: Units of the arena.
        unit_bytes: Bytes of a unit.
        max_passed_over: How often others may go first.
    """

    def __init__(self, max_slots: int, *, num_units: int, unit_bytes: int, max_passed_over: int = 16) -> None:
        self._lock = threading.Lock()
        self._units = Units(num_units, unit_bytes=unit_bytes)
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._entries: dict[str, _Entry] = {}
        self._wants: dict[str, _Want] = {}
        self._max_passed_over = max_passed_over
        self._clock = 0
        self._epoch = 0
        self._lease_id = 0
        self._hits = self._misses = self._loads = self._failures = self._evictions = 0

    def stage(self, version: str, *, rank: int, blocks: Sequence[int]) -> None:
        """Notes that a version's image lies in host memory; doing it again changes nothing.

        Args:
            version: Digest of the version.
            rank: Its largest rank.
            blocks: Bytes of each block of its image, in order.

        Raises:
            DoesNotFitError: The image is larger than the arena.
        """
        with self._lock:
            needed = self._units.needed(blocks)
            if needed > self._units.num_units:
                raise DoesNotFitError(f"adapter image needs {needed} units, the arena has {self._units.num_units}")
            entry = self._entries.setdefault(version, _Entry(version))
            entry.in_host, entry.dropped = True, False
            if entry.place == "host":
                entry.rank, entry.blocks = rank, tuple(blocks)

    def unstage(self, version: str, *, drop_device: bool = False) -> bool:
        """Notes that a version's image is no longer in host memory; unknown versions are ignored.

        Args:
            version: Digest of the version.
            drop_device: Also free its device copy as soon as no lease is held, and give out no more leases.

        Returns:
            Whether a device copy was freed now.
        """
        with self._lock:
            entry = self._entries.get(version)
            if entry is None:
                return False
            entry.in_host = False
            entry.dropped = entry.dropped or drop_device
            return self._settle(entry)

    def acquire(self, version: str) -> Lease | None:
        """Takes a lease on a version's device copy, or returns None and remembers it as wanted.

        Whoever got None calls again later, or `withdraw` when it no longer waits and nobody else does.
        """
        with self._lock:
            entry = self._entries.get(version)
            if entry is None or entry.place != "device" or entry.dropped:
                if version not in self._wants:
                    self._wants[version] = _Want()
                    self._misses += 1
                return None
            self._lease_id += 1
            entry.leases.add(self._lease_id)
            entry.claimed = False
            self._touch(entry)
            self._hits += 1
            return Lease(self._lease_id, version, entry.slot, entry.rank, entry.epoch)

    def release(self, lease: Lease) -> bool:
        """Gives a lease back, once.

        Returns:
            Whether a device copy that was to be dropped was freed now.
        """
        with self._lock:
            entry = self._entries[lease.version]
            assert lease.lease_id in entry.leases, "a lease is released once"
            entry.leases.remove(lease.lease_id)
            self._touch(entry)
            return self._settle(entry)

    def withdraw(self, version: str) -> None:
        """Notes that no request waits for a version any more: it is neither loaded nor kept for a lease to come."""
        with self._lock:
            self._wants.pop(version, None)
            if entry := self._entries.get(version):
                entry.claimed = False

    def wanted(self) -> tuple[str, ...]:
        """Returns the versions that were missed and not loaded since, first missed first."""
        with self._lock:
            return tuple(self._wants)

    def missing(self) -> tuple[str, ...]:
        """Returns the wanted versions that have no image in host memory and are not loading, first missed first."""
        with self._lock:
            return tuple(version for version in self._wants if version not in self._entries or self._is_missing(version))

    def next_load(self) -> LoadPlan | None:
        """Picks the first wanted version whose image is in host memory and for which there is or can be made room.

        Its state becomes `loading`; the caller ends that by `commit` or `fail`. Nothing is evicted unless the load fits then.
        """
        with self._lock:
            for version, want in self._wants.items():
                entry = self._entries.get(version)
                if entry is None or not entry.in_host or entry.place != "host" or entry.dropped:
                    continue
                plan = self._plan(entry)
                if plan is not None:
                    for earlier, passed in self._wants.items():
                        if earlier == version:
                            break
                        passed.passed_over += self._is_loadable(earlier)
                    return plan
                if want.passed_over >= self._max_passed_over:
                    return None
            return None

    def commit(self, plan: LoadPlan) -> int | None:
        """Notes that a load is done and visible.

        Returns:
            The load's epoch; None when the version was dropped meanwhile, so that it was freed at once.
        """
        with self._lock:
            entry = self._loading(plan)
            self._epoch += 1
            self._loads += 1
            entry.place, entry.epoch = "device", self._epoch
            entry.claimed = self._wants.pop(plan.version, None) is not None
            self._touch(entry)
            return None if self._settle(entry) else entry.epoch

    def fail(self, plan: LoadPlan, *, retry: bool) -> None:
        """Notes that a load did not work; its slot and units are free again.

        Args:
            plan: The load.
            retry: Whether to try again after all other wanted versions; else the image is forgotten, as by `unstage`, and the
                version is wanted no more.
        """
        with self._lock:
            entry = self._loading(plan)
            self._failures += 1
            self._free(entry)
            want = self._wants.pop(plan.version, None)
            if retry and want is not None:
                self._wants[plan.version] = want
            entry.in_host = entry.in_host and retry
            self._settle(entry)

    def holdings(self) -> tuple[Holding, ...]:
        """Returns every version in host memory or on the device, most recently used first."""
        with self._lock:
            entries = sorted(self._entries.values(), key=lambda entry: -entry.used_at)
            return tuple(
                Holding(entry.version, entry.place, entry.rank, sum(entry.blocks), len(entry.leases), entry.epoch)
                for entry in entries
            )

    @property
    def counters(self) -> Counters:
        """What happened since the start."""
        with self._lock:
            return Counters(self._hits, self._misses, self._loads, self._failures, self._evictions)

    @property
    def units_used(self) -> int:
        """Units of the arena that hold an image or are about to."""
        with self._lock:
            return self._units.num_units - self._units.free

    def _plan(self, entry: _Entry) -> LoadPlan | None:
        """Takes a slot and units for a load, evicting until it fits; or changes nothing and returns None."""
        victims = sorted(
            (other for other in self._entries.values() if other.place == "device" and not other.leases and not other.claimed),
            key=lambda other: other.used_at,
        )
        units = self._units.copy()
        count = 0
        extents = units.take(entry.blocks) if self._free_slots else None
        while extents is None and count < len(victims):
            units.give(victims[count].extents)
            count += 1
            extents = units.take(entry.blocks)
        if extents is None:
            return None
        evicted = tuple(Evicted(victim.version, victim.slot) for victim in victims[:count])
        for victim in victims[:count]:
            self._free(victim)
            self._evictions += 1
            self._forget_if_gone(victim)
        self._units = units
        entry.slot, entry.extents, entry.place = self._free_slots.pop(), extents, "loading"
        return LoadPlan(entry.version, entry.slot, extents, evicted)

    def _is_loadable(self, version: str) -> bool:
        entry = self._entries.get(version)
        return entry is not None and entry.in_host and entry.place == "host"

    def _is_missing(self, version: str) -> bool:
        entry = self._entries[version]
        return entry.dropped or (entry.place == "host" and not entry.in_host)

    def _loading(self, plan: LoadPlan) -> _Entry:
        entry = self._entries[plan.version]
        assert (entry.place, entry.slot) == ("loading", plan.slot), "a load ends once"
        return entry

    def _settle(self, entry: _Entry) -> bool:
        """Frees a dropped device copy that nobody uses; forgets an entry that is nowhere."""
        freed = entry.dropped and entry.place == "device" and not entry.leases
        if freed:
            self._free(entry)
        self._forget_if_gone(entry)
        return freed

    def _free(self, entry: _Entry) -> None:
        self._units.give(entry.extents)
        self._free_slots.append(entry.slot)
        entry.slot, entry.extents, entry.place, entry.claimed = -1, (), "host", False

    def _forget_if_gone(self, entry: _Entry) -> None:
        if entry.place == "host" and not entry.in_host:
            self._entries.pop(entry.version, None)

    def _touch(self, entry: _Entry) -> None:
        self._clock += 1
        entry.used_at = self._clock
