"""`veneer usage`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

import typer

from veneer.cli.output import print_json, print_table, when
from veneer.cli.target import Target
from veneer.controlplane.v1 import tenants_pb2

_PERIODS = {"hour": tenants_pb2.USAGE_PERIOD_HOUR, "day": tenants_pb2.USAGE_PERIOD_DAY}


def usage(
    context: typer.Context,
    *,
    by: Annotated[Literal["hour", "day"], typer.Option(help="What a row sums up; days are those of UTC.")] = "day",
    days: Annotated[int, typer.Option(help="How far back.", min=1, max=3650)] = 30,
    tenant: Annotated[str, typer.Option(help="As an operator or organisation, for this tenant; else for that of the key.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what a tenant's requests used, by adapter, latest first."""
    target: Target = context.obj
    since = datetime.now(UTC) - timedelta(days=days)

    async def run() -> list[tenants_pb2.Usage]:
        async with target.keeper(tenant) as client:
            return await client.usage(tenant=tenant, period=_PERIODS[by], since=since)

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    rows = [
        (
            when(one.start_time),
            f"{one.owner}/{one.adapter}" if one.adapter else "(base)",
            *(f"{number:,}" for number in (one.requests, one.failed_requests)),
            *(f"{number:,}" for number in (one.prompt_tokens, one.cached_tokens, one.output_tokens)),
        )
        for one in found
    ]
    heads = ("from", "adapter", "requests", "failed", "prompt tokens", "of them cached", "output tokens")
    print_table("usage", heads, rows)
