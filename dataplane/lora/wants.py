"""Loads that are waited for, and which of them is next. Integers only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataplane.lora.shares import Shares


@dataclass(slots=True)
class Want:
    """A load that is waited for. Owned by `Wants`.

    Attributes:
        tenant: Who pays: who asked first, or after it the first that is not kept from it by its limit.
        passed_over: Loads that went first although this one was asked for before them.
        asked_by: Whose request waits, of several the first, with its weight and limit; None: the version is pinned.
    """

    tenant: str
    passed_over: int = 0
    asked_by: tuple[str, int, int | None] | None = None

    @property
    def is_requested(self) -> bool:
        """Whether a request waits."""
        return self.asked_by is not None


class Wants:
    """The versions that are waited for, first asked for first. Owned by one `Residency`, and called under its lock.

    The tenant that holds least for its weight is loaded first. So one version may go before another that was asked for earlier,
    `max_passed_over` times at most; then the earlier one is due, and all others wait.

    Args:
        shares: Where a tenant that waits for a load claims its share.
        max_passed_over: How often others may go first.
    """

    def __init__(self, shares: Shares, *, max_passed_over: int) -> None:
        self._shares = shares
        self._max_passed_over = max_passed_over
        self._wants: dict[str, Want] = {}

    def __contains__(self, version: str) -> bool:
        return version in self._wants

    def __iter__(self) -> Iterator[str]:
        return iter(self._wants)

    def __getitem__(self, version: str) -> Want:
        return self._wants[version]

    def add(self, version: str, tenant: str, *, weight: int, max_units: int | None = None, is_requested: bool = True) -> bool:
        """Notes that a tenant's request, or its pin, waits for a version; returns whether nobody did before."""
        if is_new := version not in self._wants:
            self._wants[version] = Want(tenant)
            self._shares.claim(tenant, weight=weight, max_units=max_units)
        want = self._wants[version]
        if is_requested and want.asked_by is None:
            want.asked_by = (tenant, weight, max_units)
        return is_new

    def hand_over(self, version: str, tenant: str, *, weight: int, max_units: int | None = None) -> None:
        """Makes another tenant the one for which a version is loaded, and which pays for it."""
        want = self._wants[version]
        self._shares.claim(tenant, weight=weight, max_units=max_units)
        self._shares.disclaim(want.tenant)
        want.tenant = tenant

    def drop(self, version: str) -> bool:
        """Notes that nobody waits for a version any more; returns whether a request did."""
        want = self._wants.pop(version, None)
        if want is None:
            return False
        self._shares.disclaim(want.tenant)
        return want.is_requested

    def end_requests(self, version: str, *, is_pinned: bool) -> None:
        """Notes that no request waits for a version any more; a pin may."""
        if not is_pinned:
            self.drop(version)
        elif want := self._wants.get(version):
            want.asked_by = None

    def end_pin(self, version: str) -> None:
        """Notes that no pin waits for a version any more; where a request does, its tenant pays and not the pin's owner."""
        want = self._wants.get(version)
        if want is None:
            return
        if want.asked_by is None:
            self.drop(version)
            return
        tenant, weight, max_units = want.asked_by
        if tenant != want.tenant:
            self.hand_over(version, tenant, weight=weight, max_units=max_units)

    def put_last(self, version: str) -> None:
        """Puts a version behind all others."""
        self._wants[version] = self._wants.pop(version)

    def reserve(self, version: str) -> None:
        """Makes a version that is waited for due."""
        if want := self._wants.get(version):
            want.passed_over = max(want.passed_over, self._max_passed_over)

    def is_due(self, version: str) -> bool:
        """Whether nothing may be loaded before a version."""
        return self._wants[version].passed_over >= self._max_passed_over

    def in_turn(self, is_loadable: Callable[[str], bool]) -> list[str]:
        """Returns the versions that may be loaded now, in the order in which room is sought for them: one, where one is due."""
        waiting = list(filter(is_loadable, self._wants))
        due = next(filter(self.is_due, waiting), None)
        if due is not None:
            return [due]
        return sorted(waiting, key=lambda version: self._shares.load(self._wants[version].tenant))

    def pass_over(self, version: str, is_loadable: Callable[[str], bool]) -> None:
        """Notes that a version goes before those that were asked for earlier and could be loaded too."""
        for earlier, want in self._wants.items():
            if earlier == version:
                return
            want.passed_over += is_loadable(earlier)
