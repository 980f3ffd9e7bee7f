"""`veneer node pin`, `unpin` and `pins`: versions that a data plane keeps on its device for a time."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from veneer.cli.nodes import Json
from veneer.cli.output import note, print_json, print_table, say, short, size, version_name, when
from veneer.cli.residency import whole_digest
from veneer.cli.target import Target
from veneer.dataplane.v1 import admin_pb2

Version = Annotated[str, typer.Argument(help="Digest of the version; its first characters do where the data plane holds it.")]
_MAX_HOURS = 720


def pin(
    context: typer.Context,
    version: Version,
    *,
    hours: Annotated[float, typer.Option("--for", min=0.001, max=_MAX_HOURS, help="Hours to keep it.")] = 24.0,
    json: Json = False,
) -> None:
    """Bring a version to a data plane's device and keep it there for a time; again: until the new time."""
    target: Target = context.obj

    async def run() -> admin_pb2.Pin:
        async with target.operator() as operator:
            return await operator.pin_version(await whole_digest(operator, version), lifetime_s=hours * 3600)

    made = asyncio.run(run())
    if json:
        print_json(made)
    else:
        say(f"{short(made.version)} of {made.owner} stays until {when(made.expire_time)}; it takes {size(made.size_bytes)}")


def unpin(context: typer.Context, version: Version, *, json: Json = False) -> None:
    """End a pin; the copy stays until its room is needed."""
    target: Target = context.obj

    async def run() -> bool:
        async with target.operator() as operator:
            return await operator.unpin_version(await whole_digest(operator, version))

    was_pinned = asyncio.run(run())
    if json:
        print_json({"version": version, "was_pinned": was_pinned})
    else:
        say(f"{short(version)} {'is no longer' if was_pinned else 'was not'} pinned")


def pins(context: typer.Context, *, json: Json = False) -> None:
    """List what is pinned on a data plane, the first to end first, and what may be."""
    target: Target = context.obj

    async def run() -> admin_pb2.ListPinsResponse:
        async with target.operator() as operator:
            return await operator.pins()

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    rows = [
        (
            version_name(one.owner, one.adapter, one.number),
            short(one.version),
            one.owner,
            size(one.size_bytes),
            when(one.expire_time),
        )
        for one in found.pins
    ]
    print_table("pinned versions", ("adapter", "version", "owner", "size", "until"), rows)
    allowed = f"{size(found.pinned_bytes)} of {size(found.max_pinned_bytes)}"
    note(f"{allowed} are pinned; one owner may have {size(found.max_pinned_bytes_per_tenant)}")
