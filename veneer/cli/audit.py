"""`veneer audit`: who wrote what, and what changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from veneer.cli.output import print_json, print_table, when
from veneer.cli.target import Target
from veneer.controlplane.v1 import tenants_pb2

_UNCHANGING = frozenset({"create_time", "update_time"})
_MAX_VALUE = 60


def audit(
    context: typer.Context,
    *,
    tenant: Annotated[str, typer.Option(help="As an operator or organisation, for this tenant; else for that of the key.")] = "",
    installation: Annotated[
        bool, typer.Option("--installation", help="As an operator, for what is no tenant's: bases, data planes, operators.")
    ] = False,
    limit: Annotated[int, typer.Option(help="How many entries.", min=1, max=1_000_000)] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every entry whole.")] = False,
) -> None:
    """Show the last writes, newest first: when, by which key, to what, and what changed. For owners, auditors and operators."""
    target: Target = context.obj
    if tenant and installation:
        raise typer.BadParameter("name a tenant or --installation, not both")

    async def run() -> list[tenants_pb2.AuditEntry]:
        async with target.operator() if installation else target.keeper(tenant) as client:
            return await client.audit(tenant=tenant, limit=limit)

    found = asyncio.run(run())
    print_json(found) if as_json else print_writes(found)


def print_writes(entries: Sequence[tenants_pb2.AuditEntry]) -> None:
    """Prints entries as a table."""
    rows = [(when(one.create_time), one.actor, f"{one.action} {one.object}", changed(one.before, one.after)) for one in entries]
    print_table("writes", ("when", "by", "what", "change"), rows)


def changed(before: str, after: str) -> str:
    """What a write changed, in words: fields of a new or removed row, old and new values of a changed one."""
    old: dict[str, Any] = json.loads(before) if before else {}
    new: dict[str, Any] = json.loads(after) if after else {}
    if not (old and new):
        return ", ".join(f"{name} {_value(one)}" for name, one in (old or new).items() if name not in _UNCHANGING and one)
    identity = [str(new[name]) for name in ("adapter", "name", "alias", "id") if new.get(name)]
    moved = [
        f"{name} {_value(old.get(name))} → {_value(one)}"
        for name, one in new.items()
        if old.get(name) != one and name not in _UNCHANGING
    ]
    return f"{'/'.join(identity)}: {', '.join(moved)}"


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"
