"""The copies on the device: which slot and units each takes, which may go, and what goes so that another has room."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from dataplane.lora.charges import Charges
from dataplane.lora.entries import Entry
from dataplane.lora.eviction import Policy, Victims
from dataplane.lora.holdings import Evicted, LoadPlan
from dataplane.lora.shares import Shares
from dataplane.lora.units import Units
from veneer.errors import ResourceExhaustedError

_COST_WITHOUT_HOST_IMAGE = 8
"""What a copy costs to bring from the store, in loads from host memory."""


class DoesNotFitError(ResourceExhaustedError):
    """A version's image is larger than the whole arena."""


class Copies:
    """Slots and units, and whose they are. Owned by one `Residency`, called under its lock.

    A copy that nobody uses and nobody pinned is idle. One that requests wait for is kept for a quantum of served tokens, so that
    two versions do not push each other out; but not from a load that is due, nor, where its tenant is above its share, from a
    tenant below (`Shares.yields`). What was itself loaded because it was due stays for its first lease, or it would be due again,
    and loaded in vain, for ever.

    Of those that may go, the tenant's most above its share of the units go first (see `Shares`), then those that nobody waits
    for, then those worth least (see `Usage`).

    Args:
        shares: Where copies are charged.
        max_slots: Slots of the descriptor table.
        num_units: Units of the arena.
        unit_bytes: Bytes of a unit.
        quantum_tokens: Tokens that a copy serves before it gives way while requests wait for it.
        policy: Says what a copy is worth.

    Attributes:
        entries: What is known of each version in host memory or on the device.
        charges: Who pays for which copy.
        pins: Owners of the versions that are pinned.
        num_evicted: Copies that made room, or gave way.
    """

    def __init__(
        self, shares: Shares, *, max_slots: int, num_units: int, unit_bytes: int, quantum_tokens: int, policy: Policy
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self.pins: dict[str, str] = {}
        self.charges = Charges(shares, is_idle=self._is_idle)
        self.num_evicted = 0
        self._shares = shares
        self._units = Units(num_units, unit_bytes=unit_bytes)
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._victims = Victims(policy)
        self._quantum_tokens = quantum_tokens
        self._clock = 0

    @property
    def units(self) -> Units:
        """Free and taken units; others only read them."""
        return self._units

    def needed(self, blocks: Sequence[int]) -> int:
        """Returns the units that a copy with blocks of these bytes takes in one piece.

        Raises:
            DoesNotFitError: More than there are.
        """
        needed = self._units.needed(blocks)
        if needed > self._units.num_units:
            raise DoesNotFitError(f"adapter image needs {needed} units, the arena has {self._units.num_units}")
        return needed

    def take(self, entry: Entry, tenant: str, *, limit: int | None, is_due: bool) -> LoadPlan | None:
        """Takes a slot and units for a load, evicting until it fits; or changes nothing and returns None.

        Args:
            entry: The version, which is in host memory alone.
            tenant: Who pays for the copy.
            limit: Units that copies charged to it may take; None for no limit.
            is_due: Whether nothing may be loaded before it, so that no quantum of others stands in its way.
        """
        units = self._units.copy()
        may_go = functools.partial(self._may_go, tenant, entry.needed, is_due=is_due)
        victims = self.charges.making_way(entry, tenant, limit, may_go)
        if victims is None:
            return None
        for victim in victims:
            units.give(victim.extents)
        extents = units.take(entry.blocks) if self._free_slots or victims else None
        if extents is None:
            gone = {victim.version for victim in victims}
            rest = [copy for copy in may_go() if copy.version not in gone]
            if units.free + sum(copy.num_units for copy in rest) < entry.needed:
                return None
            for victim in self._shares.in_order(rest, loader=tenant, more=entry.needed):
                victims.append(victim)
                units.give(victim.extents)
                extents = units.take(entry.blocks)
                if extents is not None:
                    break
        if extents is None:
            return None
        evicted = self.evict(victims)
        self._units = units
        entry.slot, entry.extents, entry.place, entry.owed = self._free_slots.pop(), extents, "loading", is_due
        self.charges.book(entry, tenant)
        return LoadPlan(entry.version, entry.slot, extents, evicted)

    def evict(self, victims: Iterable[Entry]) -> tuple[Evicted, ...]:
        """Frees copies that make room."""
        evicted = []
        for victim in victims:
            evicted.append(Evicted(victim.version, victim.slot))
            self.free(victim)
            self.num_evicted += 1
            self.forget_if_gone(victim)
        return tuple(evicted)

    def settle(self, entry: Entry) -> Evicted | None:
        """Frees a copy that is to go and that nobody uses; forgets an entry that is nowhere."""
        freed = None
        if (entry.dropped or entry.leaving) and entry.place == "device" and not entry.leases:
            self.num_evicted += entry.leaving
            freed = Evicted(entry.version, entry.slot, "unload" if entry.dropped else "yield")
            self.free(entry)
        self.forget_if_gone(entry)
        return freed

    def free(self, entry: Entry) -> None:
        """Gives a copy's slot and units back."""
        self._victims.discard(entry.version)
        self.charges.unbook(entry)
        self._units.give(entry.extents)
        self._free_slots.append(entry.slot)
        entry.slot, entry.extents, entry.place = -1, (), "host"
        entry.awaited = entry.leaving = False

    def forget_if_gone(self, entry: Entry) -> None:
        """Forgets a version that is neither in host memory nor on the device."""
        if entry.place == "host" and not entry.in_host:
            self.entries.pop(entry.version, None)

    def offer(self, entry: Entry) -> None:
        """Puts a copy on the device, or its new price, among those that may go."""
        self._victims.add(
            entry.version, size=self._shares.size(entry.num_units), cost=1 if entry.in_host else _COST_WITHOUT_HOST_IMAGE
        )

    def touch(self, entry: Entry, *, uses: int = 0) -> None:
        """Notes that a copy was used just now; and how often, for what it is worth."""
        self._clock += 1
        entry.used_at = self._clock
        self._victims.note(entry.version, uses=uses)

    def idle(self) -> list[Entry]:
        """Returns the copies that nobody uses and nobody pinned, worth least first."""
        copies = map(self.entries.__getitem__, self._victims.in_order())
        return [copy for copy in copies if self._is_idle(copy)]

    def _is_idle(self, copy: Entry) -> bool:
        return copy.place == "device" and not copy.leases and copy.version not in self.pins

    def _may_go(self, loader: str, needed: int, *, is_due: bool) -> Sequence[Entry]:
        """Returns the copies that may make room for a load of so many units, in the order in which they go."""
        copies = [
            copy
            for copy in self.idle()
            if not copy.awaited
            or copy.served >= self._quantum_tokens
            or is_due
            or (not copy.owed and self._shares.yields(copy.tenant, loader=loader, more=needed))
        ]
        return sorted(copies, key=lambda copy: copy.awaited)
