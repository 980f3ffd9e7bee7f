"""A tenant beyond its budget of rank rows, beside others: who waits, who is refused, and what the others get."""

from __future__ import annotations

import asyncio
import itertools
import time

from benchmarks.beside import beside
from benchmarks.fleet import Fleet, ImageFolder, Tenant
from benchmarks.report import Row
from kernels.rows import aligned_rank
from veneer.errors import FailedPreconditionError

STREAMS, OUTPUT = 64, 64
_OUTSTANDING = 48
_BEYOND, _WITHIN = 10, 2
"""Adapters that the tenant with a budget asks for, and that it and each other may run at a time: one token costs all alike."""


async def measure_budget(images: ImageFolder, *, seconds: float) -> list[Row]:
    """Lets three tenants keep an engine full, one of which asks for five times as many adapters as its budget admits.

    Each has as many requests outstanding as there are seats for three quarters of them, so that all wait. The figure is the
    least of the others' parts of all tokens over their weights' part.
    """
    rows = aligned_rank(images.rank)
    greedy = Tenant("greedy", max_rank_rows=_WITHIN * rows)
    others = [Tenant("one"), Tenant("two", weight=2)]
    numbers = {
        tenant.name: range(_BEYOND + place * _WITHIN, _BEYOND + (place + 1) * _WITHIN) for place, tenant in enumerate(others)
    }
    numbers[greedy.name] = range(_BEYOND)
    tenants = [greedy, *others]
    print(
        f"{len(tenants)} tenants, {_OUTSTANDING} requests of each outstanding; "
        f"greedy asks for {_BEYOND} adapters within {greedy.max_rank_rows} rank rows"
    )
    async with Fleet.started(images, room=_BEYOND + 2 * _WITHIN, streams=STREAMS, output_tokens=OUTPUT) as fleet:
        fleet.stage(range(_BEYOND + 2 * _WITHIN))
        refusal = await _refusal(fleet, greedy, rank=greedy.max_rank_rows + 1)

        async def keep_busy(tenant: Tenant, turn: int) -> None:
            line = numbers[tenant.name]
            for place in itertools.count(turn):
                await fleet.stream(line[place % len(line)], output_tokens=OUTPUT, tenant=tenant)

        async with beside(keep_busy(tenant, turn) for tenant in tenants for turn in range(_OUTSTANDING)):
            while min(tenant.num_tokens for tenant in tenants) < STREAMS * OUTPUT // 2:
                await fleet.state()
            before = [tenant.num_tokens for tenant in tenants]
            end_s = time.monotonic() + seconds
            used, waiting = [], []
            mine = {images.version(number) for number in numbers[greedy.name]}
            while time.monotonic() < end_s:
                state = await fleet.state()
                used.append(sum(rows for holding in state.holdings if holding.leases and holding.version in mine))
                waiting.append(state.waiting_by_reason["budget"])
                await asyncio.sleep(0.1)
            served = [tenant.num_tokens - count for tenant, count in zip(tenants, before, strict=True)]
    weights = sum(tenant.weight for tenant in tenants)
    ratios = [count / sum(served) * weights / tenant.weight for tenant, count in zip(tenants, served, strict=True)]
    print(f"{'tenant':8}{'weight':>8}{'tokens':>10}{'share / weight':>16}")
    for tenant, count, ratio in zip(tenants, served, ratios, strict=True):
        print(f"{tenant.name:8}{tenant.weight:8}{count:10}{ratio:16.3f}")
    print(
        f"greedy used at most {max(used)} rank rows, and up to {max(waiting)} of its requests were seen to wait for them; "
        f"refused: {refusal}",
        flush=True,
    )
    return [
        Row("rank_budget_share", min(ratios[1:]), target=">= 0.95"),
        Row("rank_budget_used", max(used) / greedy.max_rank_rows, target="<= 1"),
        Row("rank_budget_waiting", max(waiting), unit="requests", target=">= 1"),
    ]


async def _refusal(fleet: Fleet, tenant: Tenant, *, rank: int) -> str:
    """Returns what an adapter is told that no budget of the tenant could admit."""
    try:
        await fleet.stream(0, output_tokens=1, tenant=tenant, rank=rank)
    except FailedPreconditionError as error:
        return error.message
    raise AssertionError("an adapter above the limit was run")
