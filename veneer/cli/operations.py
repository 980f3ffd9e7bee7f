"""`veneer base` and `veneer status`: for operators."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from veneer.artifact import describe_base
from veneer.channel import ClientTls
from veneer.cli.output import console, print_json, print_table, say, short, size, when
from veneer.cli.residency import print_versions
from veneer.cli.target import Target
from veneer.controlplane.v1 import bases_pb2
from veneer.dataplane.v1 import admin_pb2
from veneer.health import SERVING, ask_health

bases = typer.Typer(no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@bases.command("add")
def add_base(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Hugging Face folder.", exists=True, file_okay=False)],
    *,
    name: Annotated[str | None, typer.Option(help="Human name; else what the folder says.")] = None,
    json: Json = False,
) -> None:
    """Compute a base model's digest and register it."""
    target: Target = context.obj

    async def run() -> bases_pb2.Base:
        async with target.operator() as operator:
            with console.status("reading the model"):
                description = await asyncio.to_thread(describe_base, folder, name=name)
            return await operator.register_base(description)

    base = asyncio.run(run())
    if json:
        print_json(base)
        return
    say(f"registered {base.name}: {base.digest}")
    if base.ends.token_ids:
        say(f"a sequence ends at the tokens {_ends(base)}")
    else:
        say("no token is named that ends a sequence: answers end at their limit, and structured outputs are off")


@bases.command("list")
def list_bases(context: typer.Context, *, json: Json = False) -> None:
    """List the registered bases."""
    target: Target = context.obj

    async def run() -> list[bases_pb2.Base]:
        async with target.operator() as operator:
            return await operator.bases()

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    rows = [
        (base.name, short(base.digest), base.family, base.num_layers, base.max_context, _ends(base), when(base.create_time))
        for base in found
    ]
    print_table("bases", ("name", "digest", "family", "layers", "context", "ends", "registered"), rows)


def _ends(base: bases_pb2.Base) -> str:
    """Tokens that end a sequence; `-` where that was not kept."""
    if not base.HasField("ends"):
        return "-"
    return ", ".join(map(str, base.ends.token_ids)) or "none"


def status(context: typer.Context, *, json: Json = False) -> None:
    """Show whether both planes serve, and what is resident where."""
    target: Target = context.obj

    async def run() -> tuple[dict[str, str], admin_pb2.GetResidencyResponse | None]:
        state = target.state
        control = target.control or (state.control if state else "127.0.0.1:7600")
        data = target.data or (state.data if state else "127.0.0.1:7700")
        tls = None if target.ca is None else ClientTls(ca=target.ca)
        health = {
            "control plane": f"{await ask_health(control, tls=tls)} at {control}",
            "data plane": f"{await ask_health(data, tls=tls)} at {data}",
        }
        if not (target.operator_key or state):
            return health, None
        async with target.operator() as operator:
            return health, await operator.residency() if health["data plane"].startswith(SERVING) else None

    health, residency = asyncio.run(run())
    if json:
        print_json({"health": health, "residency": residency})
    else:
        print_table("planes", ("plane", "health"), list(health.items()))
        if residency is not None:
            _print_residency(residency)
    if not all(text.startswith(SERVING) for text in health.values()):
        raise typer.Exit(1)


def _print_residency(residency: admin_pb2.GetResidencyResponse) -> None:
    engine = residency.engine
    hits = (residency.device_hits, residency.host_hits, residency.disk_hits, residency.store_loads)
    means_s = (residency.mean_store_load_s, residency.mean_disk_load_s, residency.mean_device_load_s)
    rows: list[tuple[str, Any]] = [
        ("running, waiting", f"{engine.running}, {engine.waiting}"),
        ("KV pages", f"{engine.kv_pages_used} of {engine.kv_pages_total}"),
        ("adapter arena", f"{size(engine.arena_bytes_used)} of {size(engine.arena_bytes_total)}"),
        ("steps, tokens", f"{engine.steps}, {engine.generated_tokens}"),
        ("most adapters, rows in a step", f"{engine.max_adapters_in_step}, {engine.max_rows_in_step}"),
        ("hits: device, host, disk, store", f"{', '.join(map(str, hits))} of {sum(hits)}"),
        ("mean load: store to disk, to host, to device", ", ".join(f"{mean_s * 1e3:.1f} ms" for mean_s in means_s)),
    ]
    print_table("engine", ("", ""), rows)
    print_versions(residency.versions)
    if residency.failing:
        print_table(
            "failing to load", ("version", "state", "failures", "status", "tried again in"), map(_failing, residency.failing)
        )


def _failing(one: admin_pb2.FailingVersion) -> tuple[Any, ...]:
    state = admin_pb2.CircuitState.Name(one.state).removeprefix("CIRCUIT_STATE_").lower().replace("_", "-")
    return short(one.version), state, one.failures, one.status, f"{one.retry_after_s:.1f} s" if one.retry_after_s else ""
