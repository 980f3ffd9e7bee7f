"""The command line: its options, its commands, and what happens when one fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from veneer.cli import (
    audit,
    canaries,
    catalog,
    checking,
    generation,
    nodes,
    operations,
    organizations,
    pins,
    stack,
    tenants,
    top,
    trust,
    usage,
)
from veneer.cli.output import print_error, print_fault
from veneer.cli.target import Target
from veneer.errors import VeneerError
from veneer.local.state import DEFAULT_STATE

app = typer.Typer(
    name="veneer",
    help="Serve thousands of fine-tunes of one language model from one copy of its weights.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_GROUP = "Where to and as whom (else what `veneer up` started)"


def _show_version(wanted: bool) -> None:  # noqa: FBT001  as typer calls it
    if wanted:
        typer.echo(f"veneer {metadata.version('veneer')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    *,
    key: Annotated[str, typer.Option(envvar="VENEER_API_KEY", help="Key of a tenant.", rich_help_panel=_GROUP)] = "",
    operator_key: Annotated[
        str, typer.Option(envvar="VENEER_OPERATOR_KEY", help="Key of an operator.", rich_help_panel=_GROUP)
    ] = "",
    operator_key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="VENEER_OPERATOR_KEY_FILE", help="File with it.", exists=True, dir_okay=False, rich_help_panel=_GROUP
        ),
    ] = None,
    org_key: Annotated[str, typer.Option(envvar="VENEER_ORG_KEY", help="Key of an organisation.", rich_help_panel=_GROUP)] = "",
    control: Annotated[str, typer.Option(envvar="VENEER_CONTROL", help="Control plane, host:port.", rich_help_panel=_GROUP)] = "",
    data: Annotated[
        str, typer.Option(envvar="VENEER_DATA", help="Data planes, host:port with commas between.", rich_help_panel=_GROUP)
    ] = "",
    control_operators: Annotated[
        str, typer.Option(envvar="VENEER_CONTROL_OPERATORS", help="Control plane's operator listener.", rich_help_panel=_GROUP)
    ] = "",
    data_operators: Annotated[
        str,
        typer.Option(
            envvar="VENEER_DATA_OPERATORS",
            help="Data plane's operator listener; for `top` several with commas between.",
            rich_help_panel=_GROUP,
        ),
    ] = "",
    ca: Annotated[
        Path | None, typer.Option(envvar="VENEER_CA", help="PEM authorities; turns on TLS.", rich_help_panel=_GROUP)
    ] = None,
    state: Annotated[
        Path, typer.Option(envvar="VENEER_STATE", help="Folder of the local stack.", rich_help_panel=_GROUP)
    ] = DEFAULT_STATE,
    version: Annotated[  # noqa: ARG001  it ends the program as it is read
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Reads the options that all commands share."""
    context.obj = Target(
        state_folder=state,
        control=control,
        control_operators=control_operators,
        data=data,
        data_operators=data_operators,
        key=key,
        operator_key=operator_key or ("" if operator_key_file is None else operator_key_file.read_text().strip()),
        org_key=org_key,
        ca=ca,
    )


app.command("up")(stack.up)
app.command("down")(stack.down)
app.command("status")(operations.status)
app.command("top")(top.top)
app.command("audit")(audit.audit)
app.command("check")(checking.check)
app.command("publish")(catalog.publish)
app.command("adapters")(catalog.adapters)
app.command("versions")(catalog.versions)
app.command("report")(checking.report)
app.command("attach")(checking.attach)
app.command("alias")(catalog.alias)
app.command("split")(catalog.split)
app.command("rollback")(catalog.rollback)
app.command("promote")(catalog.promote)
app.command("freeze")(catalog.freeze)
app.command("unfreeze")(catalog.unfreeze)
app.command("retire")(catalog.retire)
app.command("delete")(catalog.delete)
app.command("generate")(generation.generate)
app.add_typer(canaries.canaries, name="canary", help="Versions on their way to an alias's whole traffic.")
app.command("usage")(usage.usage)
app.add_typer(operations.bases, name="base", help="Base models (for operators).")
nodes.nodes.command("pin")(pins.pin)
nodes.nodes.command("unpin")(pins.unpin)
nodes.nodes.command("pins")(pins.pins)
app.add_typer(nodes.nodes, name="node", help="Data planes (for operators).")
app.add_typer(organizations.organizations, name="org", help="Organisations and their keys (for operators, and with --org-key).")
app.add_typer(tenants.tenants, name="tenant", help="Tenants (for operators, and with --org-key for an organisation).")
app.add_typer(tenants.keys, name="key", help="Keys of a tenant (for its owners; with --tenant for operators and organisations).")
app.add_typer(trust.trust, name="trust", help="Whose signatures of adapters hold (for owners).")
app.add_typer(tenants.grants, name="grant", help="Which other tenants may use an adapter.")


def _command(arguments: Sequence[str]) -> str:
    """The first word of a command line that is a command; options before it take a value each."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("-"):
            return word
        if "=" not in word:
            next(words, None)
    return ""


def main() -> None:
    """Runs the command; the exit status is 0, 1 after an error, 2 after wrong usage, 130 after Ctrl-C."""
    try:
        app(prog_name="veneer")  # what a shell completes, however the command was started
    except VeneerError as error:
        print_error(error, command=_command(sys.argv[1:]))
        sys.exit(1)
    except OSError as error:
        print_fault(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
