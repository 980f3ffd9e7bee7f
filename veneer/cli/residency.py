"""`veneer node residency` and `veneer node unload`: what a data plane holds, and what comes free."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from veneer.cli.nodes import Json, nodes
from veneer.cli.output import print_json, print_json_line, print_table, say, short, size, version_name, when
from veneer.cli.target import Target
from veneer.dataplane.v1 import admin_pb2
from veneer.errors import FailedPreconditionError, NotFoundError
from veneer.operator_client import OperatorClient

_TIERS = {
    admin_pb2.TIER_DISK: "disk",
    admin_pb2.TIER_HOST: "host",
    admin_pb2.TIER_LOADING: "loading",
    admin_pb2.TIER_DEVICE: "device",
}
_DIGEST_LENGTH = 64


def print_versions(versions: Iterable[admin_pb2.ResidentVersion]) -> None:
    """Prints a table of versions."""
    rows = [
        (
            version_name(one.owner, one.adapter, one.number),
            short(one.version),
            _TIERS.get(one.tier, "?"),
            one.max_rank,
            size(one.size_bytes),
            one.leases,
            one.uses,
            _loss(one),
        )
        for one in versions
    ]
    print_table("resident versions", ("adapter", "version", "tier", "rank", "size", "leases", "uses", "loss"), rows)


@nodes.command("residency")
def residency(
    context: typer.Context,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Go on with every change, until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch a document a line.")] = False,
) -> None:
    """Show which versions a data plane holds, in which tier, and who uses them."""
    target: Target = context.obj

    async def look() -> admin_pb2.GetResidencyResponse:
        async with target.operator() as operator:
            return await operator.residency()

    async def follow() -> None:
        async with target.operator() as operator:
            async for update in operator.watch_residency():
                if json:
                    print_json_line(update)
                else:
                    _print_update(update)

    if watch:
        asyncio.run(follow())
        return
    found = asyncio.run(look())
    if json:
        print_json(found)
    else:
        print_versions(found.versions)


@nodes.command("unload")
def unload(
    context: typer.Context,
    version: Annotated[str, typer.Argument(help="Digest of the version, or its first characters.")],
    *,
    wait_s: Annotated[float, typer.Option("--wait", min=0, max=3600, help="Seconds to wait for running requests.")] = 60.0,
    force: Annotated[bool, typer.Option("--force", help="A pinned version too; else it is asked about.")] = False,
    json: Json = False,
) -> None:
    """Let a data plane drop a version from every tier, and show what came free. Running requests end well.

    A version that may still be served is loaded again when a request needs it; `veneer retire` ends that.
    """
    target: Target = context.obj

    async def run() -> admin_pb2.UnloadVersionResponse:
        async with target.operator() as operator:
            digest = await whole_digest(operator, version)
            if not force:
                for pin in (await operator.pins()).pins:
                    if pin.version == digest:
                        _confirm(pin)
            return await operator.unload(digest, wait_s=wait_s)

    done = asyncio.run(run())
    if json:
        print_json(done)
    elif done.complete:
        freed = done.freed
        say(
            f"nothing is left of {short(version)}: came free {size(freed.device_bytes)} on the device, {size(freed.host_bytes)} "
            f"in host memory, {size(freed.disk_bytes)} on disk, {size(freed.kv_bytes)} of KV pages"
        )
    elif done.came_back:
        say(f"{short(version)} was loaded again meanwhile, for a request that needed it")
    else:
        say(f"{done.leases} requests still use {short(version)}; it goes with the last of them")
    if not done.complete:
        raise typer.Exit(1)


def _confirm(pin: admin_pb2.Pin) -> None:
    """Asks whether a pin may end, where there is a terminal to ask on.

    Raises:
        FailedPreconditionError: There is none, or the answer is no.
    """
    pinned = f"{short(pin.version)} ({version_name(pin.owner, pin.adapter, pin.number)}) is pinned until {when(pin.expire_time)}"
    if not sys.stdin.isatty():
        raise FailedPreconditionError(f"{pinned}: --force ends the pin and unloads it, `veneer node unpin` ends the pin alone")
    if not typer.confirm(f"{pinned}. End the pin and unload it?", err=True):
        raise FailedPreconditionError("nothing was unloaded, and the pin stays")


async def whole_digest(operator: OperatorClient, version: str) -> str:
    """Completes a digest by what the node holds.

    Raises:
        NotFoundError: It holds no such version, or several.
    """
    if len(version) == _DIGEST_LENGTH:
        return version
    found = [one.version for one in (await operator.residency()).versions if one.version.startswith(version)]
    if len(found) != 1:
        raise NotFoundError(f"the node holds {len(found) or 'no'} versions that begin with {version}; give more of its digest")
    return found[0]


def _loss(one: admin_pb2.ResidentVersion) -> str:
    return f"{one.loss:.1%} at {one.loss_at}" if one.loss else ""


def _print_update(update: admin_pb2.WatchResidencyResponse) -> None:
    if update.snapshot:
        say(f"epoch {update.position.epoch}")
    for one in update.versions:
        tier = _TIERS.get(one.tier, "?")
        name = version_name(one.owner, one.adapter, one.number)
        held = f"rank {one.max_rank}  {size(one.size_bytes)}  leases {one.leases}  uses {one.uses}"
        say(f"{tier:<8}{short(one.version)}  {name}  {held}")
    for version in update.gone:
        say(f"{'gone':<8}{short(version)}")
