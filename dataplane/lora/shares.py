"""Shares of the arena: how much of it each tenant holds, may hold, and whose copies go first. Integers and floats only."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Copy(Protocol):
    """An adapter's copy on the device, charged to a tenant."""

    @property
    def tenant(self) -> str:
        """Who pays for it."""

    @property
    def num_units(self) -> int:
        """Units that it takes."""


C = TypeVar("C", bound=Copy)


class Shares:
    """Units and slots by tenant, as one number. Owned by one `Residency`.

    A copy counts as its units or, where slots are scarcer than bytes, as a slot's part of all units.

    Only tenants that hold a lease or wait for a load have a share, and a limit: what others left behind goes by recency alone, so
    that no memory is kept for those who do not ask for it.

    Args:
        num_units: Units of the arena.
        num_slots: Slots of its descriptor table.
    """

    def __init__(self, num_units: int, *, num_slots: int) -> None:
        self._num_units = num_units
        self._num_slots = num_slots
        self._held: Counter[str] = Counter()
        self._limits: dict[str, int] = {}
        self._claims: Counter[str] = Counter()
        self._weights: dict[str, int] = {}
        self._total_weight = 0

    def size(self, num_units: int) -> int:
        """Returns what a copy counts as, in units over the number of slots."""
        return max(num_units * self._num_slots, self._num_units)

    def charge(self, tenant: str, num_units: int) -> None:
        """Charges a copy of so many units to a tenant."""
        self._held[tenant] += self.size(num_units)

    def discharge(self, tenant: str, num_units: int) -> None:
        """Takes a copy off again."""
        self._held[tenant] -= self.size(num_units)
        if not self._held[tenant]:
            del self._held[tenant]

    def claim(self, tenant: str, *, weight: int, max_units: int | None = None) -> None:
        """Notes that a tenant holds one lease more, or waits for one load more, and what its limit is now."""
        self._claims[tenant] += 1
        self.restrict(tenant, max_units)
        self._total_weight += weight - self._weights.get(tenant, 0)
        self._weights[tenant] = weight

    def disclaim(self, tenant: str) -> None:
        """Takes one of these back."""
        self._claims[tenant] -= 1
        if not self._claims[tenant]:
            del self._claims[tenant]
            self._limits.pop(tenant, None)
            self._total_weight -= self._weights.pop(tenant)

    def restrict(self, tenant: str, max_units: int | None) -> None:
        """Notes what the limit of a tenant is now, if it has a share; None for no limit."""
        if max_units is None:
            self._limits.pop(tenant, None)
        elif self._claims[tenant]:
            self._limits[tenant] = max_units

    def limit(self, tenant: str) -> int | None:
        """Returns the units that copies charged to a tenant may take; None for no limit."""
        return self._limits.get(tenant)

    def excess(self, tenant: str, *, more: int = 0) -> float:
        """Returns by how many units a tenant that has a share is above it; below 0 it may have more.

        Args:
            tenant: The tenant.
            more: Units of a copy that it would hold beside the others; 0 for none.
        """
        held = self._held[tenant] + (self.size(more) if more else 0)
        return held / self._num_slots - self._num_units * self._weights[tenant] / self._total_weight

    def load(self, tenant: str) -> float:
        """Returns what a tenant holds over its weight; who holds least is served first."""
        return self._held[tenant] / self._weights[tenant]

    def has(self, tenant: str) -> bool:
        """Whether a tenant has a share."""
        return tenant in self._weights

    def yields(self, holder: str, *, loader: str, more: int) -> bool:
        """Whether a tenant above its share gives way to one below: only if that one, after its load, is above by less.

        So no two tenants take each other's place in turn.
        """
        if not self.has(holder) or self.excess(loader) >= 0:
            return False
        above = self.excess(holder) / self._weights[holder]
        return above > max(0.0, self.excess(loader, more=more) / self._weights[loader])

    def in_order(self, copies: Iterable[C], *, loader: str, more: int) -> Iterator[C]:
        """Yields copies in the order in which they go: of the tenant most above its share first, of one tenant in their order.

        Once nobody is above, the rest in their order.

        Args:
            copies: Copies that may go, in the order in which they go.
            loader: Tenant for which room is made.
            more: Units of the copy that it will hold beside the others.
        """
        rest = list(copies)
        lines: defaultdict[str, deque[C]] = defaultdict(deque)
        for copy in rest:
            if copy.tenant in self._weights:
                lines[copy.tenant].append(copy)
        excess = {tenant: self.excess(tenant, more=more if tenant == loader else 0) for tenant in lines}
        gone: set[int] = set()
        while lines:
            most = max(lines, key=lambda tenant: excess[tenant] / self._weights[tenant])
            if excess[most] <= 0:
                break
            copy = lines[most].popleft()
            if not lines[most]:
                del lines[most]
            excess[most] -= self.size(copy.num_units) / self._num_slots
            gone.add(id(copy))
            yield copy
        yield from (copy for copy in rest if id(copy) not in gone)
