"""Places of uploads that are received at the same time, shared fairly over organisations and tenants."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from veneer.errors import ResourceExhaustedError

_MAX_WAITING_PER_TENANT: Final = 64


@dataclass(eq=False, slots=True)
class _Upload:
    """An upload that has a place or waits for one.

    Attributes:
        tenant: Its tenant.
        group: The tenant's organisation, else the tenant: `("organization", name)` or `("tenant", name)`.
        granted: Has a result as soon as the upload has a place.
    """

    tenant: str
    group: tuple[str, str]
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def is_of_organization(self) -> bool:
        return self.group[0] == "organization"


class UploadPlaces:
    """Hands out places by max-min fair share. Owned by one event loop.

    A free place goes to the waiting upload whose organisation holds the fewest places, then to that whose tenant holds the
    fewest, then to the first that came. A quarter of all places, and of those of an organisation, goes to organisations and
    tenants that hold none, so that a few slow callers never hold all.
    """

    def __init__(self, *, size: int, per_tenant: int, per_organization: int) -> None:
        """Makes free places.

        Args:
            size: Places in all.
            per_tenant: Most that a tenant holds.
            per_organization: Most that the tenants of an organisation hold together.
        """
        self._size = size
        self._per_tenant = per_tenant
        self._per_organization = per_organization
        self._tenants: Counter[str] = Counter()
        self._groups: Counter[tuple[str, str]] = Counter()
        self._waiting: list[_Upload] = []

    @asynccontextmanager
    async def place(self, tenant: str, organization: str, *, wait_s: float) -> AsyncIterator[None]:
        """Holds a place for the block.

        Args:
            tenant: The upload's tenant.
            organization: The tenant's organisation; empty: none.
            wait_s: Longest wait for a place.

        Raises:
            ResourceExhaustedError: No place came free in time, or too many uploads of the tenant wait already.
        """
        upload = _Upload(tenant, ("organization", organization) if organization else ("tenant", tenant))
        if sum(one.tenant == tenant for one in self._waiting) >= _MAX_WAITING_PER_TENANT:
            raise ResourceExhaustedError(
                f"{_MAX_WAITING_PER_TENANT} uploads of the tenant wait for a place already; try again later", retry_after_s=wait_s
            )
        self._waiting.append(upload)
        self._hand_out()
        try:
            async with asyncio.timeout(wait_s):
                await upload.granted
        except BaseException as error:
            if upload in self._waiting:
                self._waiting.remove(upload)
            else:
                self._give_back(upload)
            if isinstance(error, TimeoutError):
                raise ResourceExhaustedError(self._refusal(upload, wait_s), retry_after_s=wait_s) from error
            raise
        try:
            yield
        finally:
            self._give_back(upload)

    def _hand_out(self) -> None:
        """Gives free places to those whose turn it is."""
        while True:
            fitting = [upload for upload in self._waiting if not self._lacks(upload)]
            if not fitting:
                return
            upload = min(fitting, key=lambda one: (self._groups[one.group], self._tenants[one.tenant]))  # the first of equals
            self._waiting.remove(upload)
            self._groups[upload.group] += 1
            self._tenants[upload.tenant] += 1
            if not upload.granted.done():  # a caller that went away gives its place back
                upload.granted.set_result(None)

    def _give_back(self, upload: _Upload) -> None:
        self._groups[upload.group] -= 1
        self._tenants[upload.tenant] -= 1
        self._groups += Counter()  # leaves out those that hold none
        self._tenants += Counter()
        self._hand_out()

    def _lacks(self, upload: _Upload) -> str:
        """Names the limit that keeps an upload from a place now; empty: it may have one."""
        of_group, of_tenant = self._groups[upload.group], self._tenants[upload.tenant]
        if of_tenant >= self._per_tenant:
            return f"the tenant has {of_tenant} uploads under way, and max_publishes_per_tenant is {self._per_tenant}"
        if upload.is_of_organization:
            left = self._per_organization - of_group
            if left <= (_reserved(self._per_organization) if of_tenant else 0):
                limit = f"max_publishes_per_organization is {self._per_organization}"
                return f"the tenant's organisation has {of_group} uploads under way, and {limit}"
        free = self._size - self._groups.total()
        if free <= (_reserved(self._size) if of_group else 0):
            return f"the {self._size} places (max_publishes) are taken, or kept for tenants that hold none"
        return ""

    def _refusal(self, upload: _Upload, wait_s: float) -> str:
        why = self._lacks(upload) or "others were first"
        return f"no place for the upload came free within {wait_s:g} s: {why}; try again later"


def _reserved(size: int) -> int:
    """Places that go to those alone that hold none."""
    return max(size // 4, min(1, size - 1))
