"""`veneer trust`: whose signatures of adapters hold, and what is asked of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from veneer.cli.output import note, print_json, print_table, say, when
from veneer.cli.target import Target
from veneer.controlplane.v1 import signatures_pb2
from veneer.errors import InvalidArgumentError, NotFoundError, Violation

trust = typer.Typer(no_args_is_help=True)

_POLICIES = {
    "off": signatures_pb2.SIGNATURE_POLICY_OFF,
    "if-present": signatures_pb2.SIGNATURE_POLICY_IF_PRESENT,
    "require": signatures_pb2.SIGNATURE_POLICY_REQUIRE,
}
_POLICY_NAMES = {value: name for name, value in _POLICIES.items()}
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@trust.command("add")
def add(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(help="PEM: a public key, or the certificate of an authority.", exists=True, dir_okay=False)
    ],
    *,
    name: Annotated[str, typer.Option(help="What to call it; else the file's name.")] = "",
    json: Json = False,
) -> None:
    """Trust a key or an authority: adapters that it signed hold."""
    target: Target = context.obj

    async def run() -> signatures_pb2.TrustedKey:
        async with target.client() as client:
            return await client.trust_key(name or file.stem, file.read_bytes())

    key = asyncio.run(run())
    if json:
        print_json(key)
        return
    say(f"trusted {key.name}: {_kind(key)}, {key.algorithm}, {key.id}")
    note("to have only signed adapters loaded: veneer trust policy require")


@trust.command("list")
def list_keys(context: typer.Context, *, json: Json = False) -> None:
    """List whom your tenant trusts, and what it asks of signatures."""
    target: Target = context.obj

    async def run() -> signatures_pb2.ListTrustedKeysResponse:
        async with target.client() as client:
            return await client.trusted_keys()

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    rows = [(one.name, _kind(one), one.algorithm, one.subject, one.id, when(one.create_time)) for one in found.keys]
    print_table("trusted", ("name", "kind", "signs with", "subject", "id", "since"), rows)
    say(f"signatures of adapters: {_POLICY_NAMES.get(found.policy, 'unknown')}")


@trust.command("remove")
def remove(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="Name, identifier, or the beginning of an identifier.")],
    *,
    json: Json = False,
) -> None:
    """Trust a key or an authority no longer; unless the policy is off, what only it signed is loaded nowhere any more."""
    target: Target = context.obj

    async def run() -> signatures_pb2.TrustedKey:
        async with target.client() as client:
            known = (await client.trusted_keys()).keys
            found = [one for one in known if one.name == key] or [one for one in known if one.id.startswith(key)]
            if not found:
                raise NotFoundError(f"no trusted key is called {key}; `veneer trust list` shows them")
            if len(found) > 1:
                raise InvalidArgumentError.of([Violation("key", f"{key} is the beginning of {len(found)} identifiers")])
            return await client.distrust_key(found[0].id)

    removed = asyncio.run(run())
    print_json(removed) if json else say(f"{removed.name} is not trusted any more: {removed.id}")


@trust.command("policy")
def policy(
    context: typer.Context,
    asked: Annotated[
        Literal["off", "if-present", "require"],
        typer.Argument(help="off: refuse nothing; if-present: a signature must hold; require: there must be one that holds."),
    ],
    *,
    json: Json = False,
) -> None:
    """Say what is asked of signatures, at publish and at each load by a data plane."""
    target: Target = context.obj

    async def run() -> None:
        async with target.client() as client:
            await client.set_signature_policy(_POLICIES[asked])

    asyncio.run(run())
    print_json({"policy": asked}) if json else say(f"signatures of adapters: {asked}")


def _kind(key: signatures_pb2.TrustedKey) -> str:
    return "authority" if key.kind == signatures_pb2.TRUSTED_KEY_KIND_CERTIFICATE else "key"
