"""Who pays for which copy on the device, and how much a tenant's copies may take together. Integers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from dataplane.lora.entries import Entry
from dataplane.lora.shares import Shares


class Charges:
    """Books each copy to one tenant, as its share sees it and as its limit does. Owned by one `Residency`, called under its lock.

    A limit counts the units that a copy takes in one piece: how it is cut is nothing that a tenant chose.

    Args:
        shares: Where copies are charged as what they take of the arena.
        needed: Says how many units an entry's copy takes in one piece.
        idle: Yields the copies that nobody uses or pinned, worth least first.
    """

    def __init__(self, shares: Shares, *, needed: Callable[[Entry], int], idle: Callable[[], Iterable[Entry]]) -> None:
        self._shares = shares
        self._needed = needed
        self._idle = idle
        self._booked: Counter[str] = Counter()

    def book(self, entry: Entry, tenant: str) -> None:
        """Charges a copy to a tenant."""
        entry.tenant = tenant
        self._shares.charge(tenant, entry.num_units)
        self._booked[tenant] += self._needed(entry)

    def unbook(self, entry: Entry) -> None:
        """Takes a copy off its tenant again, before its extents are given back."""
        self._shares.discharge(entry.tenant, entry.num_units)
        self._booked[entry.tenant] -= self._needed(entry)
        if not self._booked[entry.tenant]:
            del self._booked[entry.tenant]

    def rebook(self, entry: Entry, tenant: str) -> None:
        """Charges a copy to another tenant."""
        self.unbook(entry)
        self.book(entry, tenant)

    def booked(self, tenant: str) -> int:
        """Returns the units of the copies charged to a tenant."""
        return self._booked[tenant]

    def busy(self, tenant: str) -> int:
        """Returns the units charged to a tenant that cannot make room: what is leased, pinned or on its way."""
        return self._booked[tenant] - sum(self._needed(copy) for copy in self._idle() if copy.tenant == tenant)

    def admits(self, entry: Entry, tenant: str, limit: int | None) -> bool:
        """Whether a tenant's limit admits a copy once its idle ones have made room."""
        return limit is None or self.busy(tenant) + self._needed(entry) <= limit

    def making_way(self, entry: Entry, tenant: str, limit: int | None, idle: Callable[[], Iterable[Entry]]) -> list[Entry] | None:
        """Returns which of a tenant's idle copies go so that its limit admits another, or None where all of them do not do."""
        above = 0 if limit is None else self._booked[tenant] + self._needed(entry) - limit
        gone: list[Entry] = []
        for copy in idle() if above > 0 else ():
            if copy.tenant == tenant:
                gone.append(copy)
                above -= self._needed(copy)
            if above <= 0:
                break
        return gone if above <= 0 else None
