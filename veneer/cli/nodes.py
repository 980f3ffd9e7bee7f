"""`veneer node`: data planes, for operators."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from veneer.cli.output import note, print_json, print_table, say, short, when
from veneer.cli.target import Target
from veneer.controlplane.v1 import nodes_pb2
from veneer.local.state import write_secret

nodes = typer.Typer(no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@nodes.command("token")
def create_token(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the data plane.")],
    *,
    out: Annotated[Path | None, typer.Option(help="File to write it to, for its owner alone; else it is printed.")] = None,
    unless: Annotated[
        Path | None, typer.Option(help="Do nothing if this file exists: the key that the data plane got with an earlier token.")
    ] = None,
    json: Json = False,
) -> None:
    """Create a token that lets one data plane in, once. It is printed alone on standard output, so that a script can take it."""
    target: Target = context.obj
    if unless is not None and unless.exists():
        print_json({"node_name": name, "has_key": True}) if json else say(f"{name} has a key already")
        return

    async def run() -> nodes_pb2.CreateEnrollmentTokenResponse:
        async with target.operator() as operator:
            return await operator.create_enrollment_token(name)

    response = asyncio.run(run())
    if out is not None:
        write_secret(out, response.token)
        response.ClearField("token")
    if json:
        print_json(response)
        return
    note(f"a data plane may enrol with it until {when(response.expire_time)}")
    say(f"wrote the token for {name} to {out}") if out else typer.echo(response.token)


@nodes.command("list")
def list_nodes(context: typer.Context, *, json: Json = False) -> None:
    """List the data planes, revoked ones included."""
    target: Target = context.obj

    async def run() -> list[nodes_pb2.Node]:
        async with target.operator() as operator:
            return await operator.nodes()

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    rows = [(one.id, one.name, short(one.base_digest), when(one.create_time), when(one.revoke_time)) for one in found]
    print_table("data planes", ("id", "name", "base", "enrolled", "revoked"), rows)


@nodes.command("revoke")
def revoke_node(
    context: typer.Context,
    node_id: Annotated[str, typer.Argument(metavar="ID", help="Its identifier.")],
    *,
    json: Json = False,
) -> None:
    """End a data plane's keys at once; it serves nobody from then on."""
    target: Target = context.obj

    async def run() -> nodes_pb2.Node:
        async with target.operator() as operator:
            return await operator.revoke_node(node_id)

    revoked = asyncio.run(run())
    print_json(revoked) if json else say(f"revoked {revoked.name}")
