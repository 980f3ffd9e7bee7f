"""Who pays for which copy on the device, and how much a tenant's copies may take together. Integers only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from dataplane.lora.entries import Entry
from dataplane.lora.shares import Shares


class Charges:
    """Books each copy to one tenant, as its share sees it and as its limit does. Owned by one `Residency`, called under its lock.

    A limit counts the units that a copy takes in one piece: how it is cut is nothing that a tenant chose.

    Args:
        shares: Where copies are charged as what they take of the arena.
        is_idle: Whether a copy on the device is neither used nor pinned; `touch` says when that may have changed.
    """

    def __init__(self, shares: Shares, *, is_idle: Callable[[Entry], bool]) -> None:
        self._shares = shares
        self._is_idle = is_idle
        self._booked: Counter[str] = Counter()
        self._copies: defaultdict[str, dict[str, Entry]] = defaultdict(dict)
        self._busy: dict[str, int] = {}

    def book(self, entry: Entry, tenant: str) -> None:
        """Charges a copy to a tenant."""
        entry.tenant = tenant
        self._shares.charge(tenant, entry.num_units)
        self._booked[tenant] += entry.needed
        self._copies[tenant][entry.version] = entry
        self.touch(entry)

    def unbook(self, entry: Entry) -> None:
        """Takes a copy off its tenant again, before its extents are given back."""
        self.touch(entry)
        self._shares.discharge(entry.tenant, entry.num_units)
        self._booked[entry.tenant] -= entry.needed
        del self._copies[entry.tenant][entry.version]
        if not self._copies[entry.tenant]:
            del self._booked[entry.tenant], self._copies[entry.tenant]

    def rebook(self, entry: Entry, tenant: str) -> None:
        """Charges a copy to another tenant."""
        self.unbook(entry)
        self.book(entry, tenant)

    def touch(self, entry: Entry) -> None:
        """Notes that a copy may be idle that was not before, or the other way round."""
        self._busy.pop(entry.tenant, None)

    def booked(self, tenant: str) -> int:
        """Returns the units of the copies charged to a tenant."""
        return self._booked[tenant]

    def busy(self, tenant: str) -> int:
        """Returns the units charged to a tenant that cannot make room: what is leased, pinned or on its way.

        Asked for each request that waits, in every step: counted again only after something changed.
        """
        copies = self._copies.get(tenant)
        if copies is None:
            return 0
        if tenant not in self._busy:
            self._busy[tenant] = sum(copy.needed for copy in copies.values() if not self._is_idle(copy))
        return self._busy[tenant]

    def admits(self, entry: Entry, tenant: str, limit: int | None) -> bool:
        """Whether a tenant's limit admits a copy once its idle ones have made room."""
        return limit is None or self.busy(tenant) + entry.needed <= limit

    def making_way(self, entry: Entry, tenant: str, limit: int | None, idle: Callable[[], Iterable[Entry]]) -> list[Entry] | None:
        """Returns which of a tenant's idle copies go so that its limit admits another, or None where all of them do not do."""
        above = 0 if limit is None else self._booked[tenant] + entry.needed - limit
        gone: list[Entry] = []
        for copy in idle() if above > 0 else ():
            if copy.tenant == tenant:
                gone.append(copy)
                above -= copy.needed
            if above <= 0:
                break
        return gone if above <= 0 else None
