"""`veneer top`: what the data planes are doing now."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from veneer.cli.output import console, plain, print_json, print_json_line, short, size, version_name
from veneer.cli.target import Target
from veneer.dataplane.v1 import admin_pb2
from veneer.errors import InvalidArgumentError, VeneerError, Violation
from veneer.operator_client import OperatorClient

_TIERS = {
    admin_pb2.TIER_DEVICE: "device",
    admin_pb2.TIER_LOADING: "loading",
    admin_pb2.TIER_HOST: "host",
    admin_pb2.TIER_DISK: "disk",
}
_HITS = ("device", "host", "disk", "store")
"""Where a request found its adapter; `store`: nowhere on the node."""
_MAX_ROWS = 12  # of tenants, and of versions, on a screen


@dataclass(frozen=True, slots=True)
class Sample:
    """What one data plane said, or why it said nothing.

    Attributes:
        address: Where it is.
        time_s: When it said so; monotonic.
        residency: What it said; None when it could not be asked.
        error: Why it could not.
    """

    address: str
    time_s: float
    residency: admin_pb2.GetResidencyResponse | None = None
    error: str = ""


def top(
    context: typer.Context,
    *,
    once: Annotated[bool, typer.Option("--once", help="Show it once.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between looks.", min=0.2, max=3600)] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; without --once a document a line.")] = False,
) -> None:
    """Watch the data planes: replicas, tiers, hit rates, tenants, streams; until Ctrl-C. For operators.

    --data-operators names several with commas between. Rates are those since the look before, with --once since the start.
    """
    target: Target = context.obj
    if not (once or as_json or console.is_terminal):
        raise InvalidArgumentError.of([Violation("top", "needs a terminal to draw on; use --once or --json")])

    async def run() -> bool:
        async with AsyncExitStack() as stack:
            replicas = [(one, await stack.enter_async_context(target.operator(data=one))) for one in target.operator_addresses]
            if once:
                return _show_once(await look(replicas), as_json=as_json)
            with _shown(as_json=as_json) as live:
                await _follow(replicas, live, interval_s)
        return True

    try:
        if not asyncio.run(run()):
            raise typer.Exit(1)
    except KeyboardInterrupt:
        return


async def look(replicas: Sequence[tuple[str, OperatorClient]]) -> list[Sample]:
    """Asks all data planes at the same time."""

    async def ask(address: str, operator: OperatorClient) -> Sample:
        try:
            residency = await operator.residency()
        except VeneerError as error:
            return Sample(address, time.monotonic(), error=f"{error.status}: {error.message}")
        return Sample(address, time.monotonic(), residency)

    return await asyncio.gather(*(ask(*one) for one in replicas))


def overview(samples: Sequence[Sample], before: Sequence[Sample] = ()) -> dict[str, Any]:
    """What the samples say, as plain data: each replica, tenants and versions of all.

    Args:
        samples: One of each data plane.
        before: The samples before, for rates; without them rates are those since the data planes started.
    """
    earlier = {one.address: one for one in before}
    streams, leases, uses, copies = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    names: dict[str, str] = {}
    for sample in samples:
        if sample.residency is None:
            continue
        streams.update({one.tenant: one.streams for one in sample.residency.tenants})
        for version in sample.residency.versions:
            if version.adapter:
                names[version.version] = version_name(version.owner, version.adapter, version.number)
            leases[version.version] += version.leases
            uses[version.version] += version.uses
            copies[version.version] += version.tier == admin_pb2.TIER_DEVICE
    busiest = sorted(uses, key=lambda one: (-leases[one], -uses[one], one))
    return {
        "replicas": [_replica(one, earlier.get(one.address)) for one in samples],
        "tenants": [{"tenant": tenant, "streams": count} for tenant, count in streams.most_common()],
        "versions": [
            {
                "version": one,
                "name": names.get(one, ""),
                "device_copies": copies[one],
                "leases": leases[one],
                "uses": uses[one],
            }
            for one in busiest
        ],
    }


def draw(view: dict[str, Any]) -> Group:
    """Tables of an overview."""
    replicas = _table("replicas", *"address base running waiting tokens/s steps/s KV arena host disk".split())
    tiers = _table("tiers", *"address device loading host disk failing".split(), *(f"hit:{one}" for one in _HITS))
    for one in view["replicas"]:
        if one["error"]:
            replicas.add_row(plain(one["address"]), Text(plain(one["error"]), style="bold red"))
            continue
        replicas.add_row(*(Text(plain(cell)) for cell in _replica_cells(one)))
        tiers.add_row(*(Text(plain(cell)) for cell in _tier_cells(one)))
    tenants = _table("tenants", "tenant", "streams")
    for one in view["tenants"][:_MAX_ROWS]:
        tenants.add_row(Text(plain(one["tenant"])), str(one["streams"]))
    versions = _table("versions, the busiest first", "adapter", "version", "on devices", "leases", "uses")
    for one in view["versions"][:_MAX_ROWS]:
        name = Text(plain(one["name"] or "–"))
        versions.add_row(name, short(one["version"]), str(one["device_copies"]), str(one["leases"]), str(one["uses"]))
    rest = max(len(view["versions"]) - _MAX_ROWS, 0)
    return Group(replicas, tiers, tenants, versions, Text(f"and {rest} more versions" if rest else ""))


def _replica(sample: Sample, before: Sample | None) -> dict[str, Any]:
    found = sample.residency
    if found is None:
        return {"address": sample.address, "error": sample.error}
    engine = found.engine
    # An engine that was started again counts from 0, as if nothing had been before.
    last = before.residency if before is not None else None
    is_same = last is not None and last.engine.steps <= engine.steps
    past = last if last is not None and is_same else admin_pb2.GetResidencyResponse()
    past_s = sample.time_s - before.time_s if before is not None and is_same else 0.0
    hits = {
        "device": found.device_hits - past.device_hits,
        "host": found.host_hits - past.host_hits,
        "disk": found.disk_hits - past.disk_hits,
        "store": found.store_loads - past.store_loads,
    }
    asked = sum(hits.values())
    tiers = Counter(_TIERS.get(version.tier, "?") for version in found.versions)
    return {
        "address": sample.address,
        "error": "",
        "base_digest": found.base_digest,
        "running": engine.running,
        "waiting": engine.waiting,
        "tokens_per_s": (engine.generated_tokens - past.engine.generated_tokens) / past_s if past_s else None,
        "steps_per_s": (engine.steps - past.engine.steps) / past_s if past_s else None,
        "kv_pages": [engine.kv_pages_used, engine.kv_pages_total],
        "arena_bytes": [engine.arena_bytes_used, engine.arena_bytes_total],
        "host_bytes": engine.host_bytes_used,
        "disk_bytes": engine.disk_bytes_used,
        "versions": {tier: tiers[tier] for tier in _TIERS.values()},
        "failing": len(found.failing),
        "hit_rates": {tier: count / asked if asked else None for tier, count in hits.items()},
    }


def _replica_cells(one: dict[str, Any]) -> Iterator[str]:
    yield from (one["address"], short(one["base_digest"]), str(one["running"]), str(one["waiting"]))
    yield from (_number(one["tokens_per_s"]), _number(one["steps_per_s"]))
    pages, all_pages = one["kv_pages"]
    used, total = one["arena_bytes"]
    yield from (f"{pages}/{all_pages}", f"{size(used)}/{size(total)}", size(one["host_bytes"]), size(one["disk_bytes"]))


def _tier_cells(one: dict[str, Any]) -> Iterator[str]:
    yield one["address"]
    yield from (str(one["versions"][tier]) for tier in _TIERS.values())
    yield str(one["failing"])
    rates = one["hit_rates"]
    yield from ("–" if rates[name] is None else f"{rates[name]:.0%}" for name in _HITS)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _show_once(samples: Sequence[Sample], *, as_json: bool) -> bool:
    """Prints one look; says whether every data plane answered."""
    view = overview(samples)
    if as_json:
        print_json(view)
    else:
        console.print(draw(view))
    return not any(one["error"] for one in view["replicas"])


@contextmanager
def _shown(*, as_json: bool) -> Iterator[Live | None]:
    """The screen, or None for lines of JSON."""
    if as_json:
        yield None
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield live


async def _follow(replicas: Sequence[tuple[str, OperatorClient]], live: Live | None, interval_s: float) -> None:
    before: list[Sample] = []
    while True:
        samples = await look(replicas)
        view = overview(samples, before)
        if live is None:
            print_json_line(view)
            sys.stdout.flush()
        else:
            live.update(draw(view), refresh=True)
        before = samples
        await asyncio.sleep(interval_s)
