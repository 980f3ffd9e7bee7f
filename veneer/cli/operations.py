"""`veneer base` and `veneer status`: for operators."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from veneer.artifact import describe_base
from veneer.channel import ClientTls
from veneer.chat.source import check_chat
from veneer.cli.output import console, note, print_json, print_table, say, short, size, version_name, when
from veneer.cli.residency import print_versions
from veneer.cli.target import Target
from veneer.cli.top import Sample, look
from veneer.controlplane.v1 import bases_pb2
from veneer.dataplane.v1 import admin_pb2
from veneer.health import SERVING, ask_health

bases = typer.Typer(no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class ChatContents(StrEnum):
    """What control tokens in contents of messages are."""

    TEXT = "text"
    TOKENS = "tokens"


@bases.command("add")
def add_base(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Hugging Face folder.", exists=True, file_okay=False)],
    *,
    name: Annotated[str | None, typer.Option(help="Human name; else what the folder says.")] = None,
    chat_contents: Annotated[
        ChatContents | None,
        typer.Option(
            help="Control tokens in contents of messages are ordinary text, or these tokens (data planes take it at their next "
            "start); else as it is, or text for a new base."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Compute a base model's digest and register it."""
    target: Target = context.obj

    async def run() -> bases_pb2.Base:
        async with target.operator() as operator:
            with console.status("reading the model"):
                description = await asyncio.to_thread(describe_base, folder, name=name)
                fault = await asyncio.to_thread(check_chat, folder)
            contents = None if chat_contents is None else chat_contents.value
            return await operator.register_base(replace(description, chat_contents=contents, chat_fault=fault and fault[:400]))

    base = asyncio.run(run())
    if json:
        print_json(base)
        return
    say(f"registered {base.name}: {base.digest}")
    if base.ends.token_ids:
        say(f"a sequence ends at the tokens {_ends(base)}")
    elif base.HasField("ends"):
        say("no token is named that ends a sequence: answers end at their limit, and structured outputs are off")
    if not base.HasField("chat_fault"):
        say("the chat template was not tried: the package jinja2 is not installed")
    if base.chat_fault:
        say(f"conversations cannot be served, texts and token ids can: {base.chat_fault}")
    elif base.chat_contents == bases_pb2.CHAT_CONTENTS_TOKENS:
        say("control tokens in contents of messages are these tokens: contents can end a turn and begin another")
    else:
        say("control tokens in contents of messages are ordinary text")


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
        (
            base.name,
            short(base.digest),
            base.family,
            base.num_layers,
            base.max_context,
            _ends(base),
            _chat(base),
            when(base.create_time),
        )
        for base in found
    ]
    print_table("bases", ("name", "digest", "family", "layers", "context", "ends", "chat contents", "registered"), rows)


def _ends(base: bases_pb2.Base) -> str:
    """Tokens that end a sequence; `-` where that was not kept."""
    if not base.HasField("ends"):
        return "-"
    return ", ".join(map(str, base.ends.token_ids)) or "none"


def _chat(base: bases_pb2.Base) -> str:
    """What control tokens in contents are, or why there are no conversations."""
    if base.chat_fault:
        return f"none: {base.chat_fault}"
    return "tokens" if base.chat_contents == bases_pb2.CHAT_CONTENTS_TOKENS else "text"


def status(context: typer.Context, *, json: Json = False) -> None:
    """Show whether the control plane and every data plane serve, and what is resident where; exit status 1 when one does not.

    What is resident is asked of the operators' listeners (--data-operators), with an operator's key.
    """
    target: Target = context.obj

    async def run() -> tuple[list[PlaneHealth], list[Sample]]:
        tls = None if target.ca is None else ClientTls(ca=target.ca)
        planes = [("control plane", target.control_address), *(("data plane", one) for one in target.data_addresses)]
        health = await asyncio.gather(*(ask_health(address, tls=tls) for _, address in planes))
        rows = [PlaneHealth(plane, address, text) for (plane, address), text in zip(planes, health, strict=True)]
        if not target.knows_operators:
            return rows, []
        async with AsyncExitStack() as stack:
            replicas = [(one, await stack.enter_async_context(target.operator(data=one))) for one in target.operator_addresses]
            return rows, await look(replicas)

    planes, samples = asyncio.run(run())
    if json:
        residency = [{"address": one.address, "error": one.error, "residency": one.residency} for one in samples]
        print_json({"planes": [asdict(one) for one in planes], "residency": residency})
    else:
        print_table("planes", ("plane", "address", "health"), [(one.plane, one.address, one.health) for one in planes])
        for sample in samples:
            _print_residency(sample, alone=len(samples) == 1)
        if not samples:
            note("what is resident where takes an operator's key and the operators' listeners: --operator-key, --data-operators")
    if not all(one.health == SERVING for one in planes) or any(one.error for one in samples):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class PlaneHealth:
    """What one plane said of its health.

    Attributes:
        plane: `control plane` or `data plane`.
        address: Where it is asked.
        health: `SERVING`, another status, or why there is none.
    """

    plane: str
    address: str
    health: str


def _print_residency(sample: Sample, *, alone: bool) -> None:
    residency = sample.residency
    title = "engine" if alone else f"engine of {sample.address}"
    if residency is None:
        print_table(title, ("", ""), [("cannot be asked", sample.error)])
        return
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
    print_table(title, ("", ""), rows)
    print_versions(residency.versions)
    if residency.failing:
        print_table(
            "failing to load",
            ("adapter", "version", "state", "failures", "status", "tried again in"),
            map(_failing, residency.failing),
        )


def _failing(one: admin_pb2.FailingVersion) -> tuple[Any, ...]:
    state = admin_pb2.CircuitState.Name(one.state).removeprefix("CIRCUIT_STATE_").lower().replace("_", "-")
    name = version_name(one.owner, one.adapter, one.number)
    return name, short(one.version), state, one.failures, one.status, f"{one.retry_after_s:.1f} s" if one.retry_after_s else ""
