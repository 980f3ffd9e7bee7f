"""`veneer canary start`, `show` and `stop`: a version on its way to an alias's whole traffic."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

import typer

from veneer.canary_calls import CanaryStep
from veneer.cli.catalog import AdapterName, AliasName, DryRun, Expected, Json, find_versions
from veneer.cli.output import note, print_json, print_table, say, short
from veneer.cli.target import Target
from veneer.controlplane.v1 import canaries_pb2
from veneer.errors import InvalidArgumentError, Violation

canaries = typer.Typer(no_args_is_help=True)
_STEP = re.compile(r"(\d+)%?:(\d+(?:\.\d+)?)([smh]?)(?::(\d+))?")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600}
_MAX_S = 30 * 86_400
_MAX_REQUESTS = 10_000_000
_STEPS = ("5:5m:100", "25:10m:500", "50:10m:500")
_STEPS_HELP = "PERCENT:TIME[:REQUESTS], e.g. `5:5m:100`; repeat it, each with more percent."


@canaries.command()
def start(
    context: typer.Context,
    adapter: AdapterName,
    version: Annotated[str, typer.Argument(help="Number, digest, or the beginning of a digest.")],
    *,
    step: Annotated[list[str] | None, typer.Option(help=f"{_STEPS_HELP} Else {' '.join(_STEPS)}.")] = None,
    alias: AliasName = "stable",
    expected: Expected = None,
    request_id: Annotated[str, typer.Option(help="Your own identifier: repeating a start with it changes nothing.")] = "",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Give a version more and more of an alias's traffic, and none any more once it fails more often than what is served."""
    target: Target = context.obj
    steps = [_read_step(text) for text in step or _STEPS]

    async def run() -> canaries_pb2.Canary:
        async with target.client() as client:
            [digest] = await find_versions(client, adapter, [version])
            return await client.start_canary(
                adapter, digest, steps, alias=alias, expected_generation=expected, request_id=request_id, dry_run=dry_run
            )

    _show(asyncio.run(run()), json=json)
    if not json:
        note("nothing was done" if dry_run else f"to follow it: veneer canary show {adapter} --alias {alias}")


@canaries.command()
def show(context: typer.Context, adapter: AdapterName, *, alias: AliasName = "stable", json: Json = False) -> None:
    """Show an alias's present or last canary, with how requests ended."""
    target: Target = context.obj

    async def run() -> canaries_pb2.Canary:
        async with target.client() as client:
            return await client.canary(adapter, alias=alias)

    _show(asyncio.run(run()), json=json)


@canaries.command()
def stop(
    context: typer.Context, adapter: AdapterName, *, alias: AliasName = "stable", dry_run: DryRun = False, json: Json = False
) -> None:
    """End a canary; all traffic goes back to the version that had it before."""
    target: Target = context.obj

    async def run() -> canaries_pb2.Canary:
        async with target.client() as client:
            return await client.stop_canary(adapter, alias=alias, dry_run=dry_run)

    _show(asyncio.run(run()), json=json)


def _read_step(text: str) -> CanaryStep:
    found = _STEP.fullmatch(text)
    step = None if found is None else CanaryStep(int(found[1]), float(found[2]) * _UNIT_S[found[3]], int(found[4] or 0))
    if step is None or not 1 <= step.weight_percent <= 99 or step.duration_s > _MAX_S or step.min_requests > _MAX_REQUESTS:
        bounds = "Percents are 1 to 99, times at most 30 days, requests at most 10000000."
        raise InvalidArgumentError.of([Violation(f"--step {text}", f"is not {_STEPS_HELP} {bounds}")])
    return step


def _show(canary: canaries_pb2.Canary, *, json: bool) -> None:
    if json:
        print_json(canary)
        return
    state = canaries_pb2.CanaryState.Name(canary.state).removeprefix("CANARY_STATE_").lower().replace("_", " ")
    say(f"canary of {canary.adapter} on {canary.alias}: {state}{f' ({canary.reason})' if canary.reason else ''}")
    names = ("", "version", "ok", "failed")
    counts = (("new", canary.version, canary.version_counts), ("stable", canary.stable_version, canary.stable_counts))
    print_table("requests", names, [(name, short(version), tally.ok, tally.failed) for name, version, tally in counts])
    rows = [
        ("→" if place == canary.step else "", f"{step.weight_percent} %", f"{step.duration.seconds} s", step.min_requests)
        for place, step in enumerate(canary.steps)
    ]
    print_table("steps", ("", "traffic", "at least", "requests"), rows)
    note(f"evidence that it fails more often: {canary.evidence:.3g}; at 100 it is rolled back")
