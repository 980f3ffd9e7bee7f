"""Shares of quotas are kept by a replica whoever asks beside; see `tests/controlplane/test_quotas.py` for how they are cut."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from dataplane.quotas import Amounts, Demand, Leased, Quotas
from dataplane.resolution import Caller, TenantQuotas
from tests.dataplane.doubles import caller, until

_PLENTY = 10**6


class Shares:
    """A control plane that gives everyone much, in leases that end soon."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def __call__(self, demands: Sequence[Demand]) -> Leased:
        self.asked.update(demand.tenant for demand in demands)
        share = Amounts(requests=_PLENTY, tokens=_PLENTY, streams=_PLENTY)
        return Leased({demand.tenant: share for demand in demands}, lifetime_s=0.6)


def tenant(name: str) -> Caller:
    return replace(caller(quotas=TenantQuotas(requests=_PLENTY, tokens=_PLENTY)), tenant=name)


@asynccontextmanager
async def kept(shares: Shares) -> AsyncIterator[Quotas]:
    quotas = Quotas(shares)
    task = asyncio.create_task(quotas.run())
    try:
        yield quotas
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_tenant_that_asks_all_the_time_does_not_keep_others_leases_from_being_renewed() -> None:
    shares = Shares()
    async with kept(shares) as quotas:
        for name in ("quiet", "busy"):
            async with quotas.admitted(tenant(name), 1):
                pass

        async def ask_on() -> None:
            while True:
                await quotas.renew("busy")

        asking = asyncio.create_task(ask_on())
        await until(lambda: shares.asked["quiet"] > 3)
        asking.cancel()
        assert shares.asked["busy"] > shares.asked["quiet"]
