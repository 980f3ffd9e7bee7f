"""Advisory locks of the database: each kind has a namespace of its own, so that no name can mean the lock of another kind.

A lock is the number of its kind and a hash of its name. Two names with the same hash only wait for each other now and then. The
numbers never change: processes of two versions must exclude each other too.
"""

from __future__ import annotations

from enum import IntEnum

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection


class Lock(IntEnum):
    """Kinds of locks; what is locked, and what the name is."""

    MIGRATION = 0x76650001
    """Changing the schema."""
    RELAY = 0x76650002
    """Relaying hints: of two, the order would be lost."""
    LEADER = 0x76650003
    """A job of one process at a time; the job."""
    ANSWER = 0x76650004
    """A write that may come again; tenant and request_id."""
    QUOTA = 0x76650005
    """Cutting a quota into shares; the tenant."""
    STORED = 0x76650006
    """Counting what is kept; the tenant."""
    ORGANIZATION_ANSWER = 0x76650007
    """A write of an organisation that may come again; organisation and request_id."""
    ORGANIZATION_STORED = 0x76650008
    """Counting what is kept by all tenants of an organisation; the organisation."""
    TENANTS = 0x76650009
    """Counting the tenants of an organisation; the organisation."""
    TRUST = 0x7665000A
    """Counting whom a tenant trusts; the tenant."""


_KEY = "CAST(:kind AS int), hashtext(:name)"
_HOLD = text(f"SELECT pg_advisory_xact_lock({_KEY})")
_TRY_HOLD = text(f"SELECT pg_try_advisory_xact_lock({_KEY})")
_TRY_TAKE = text(f"SELECT pg_try_advisory_lock({_KEY})")
_LET_GO = text(f"SELECT pg_advisory_unlock({_KEY})")
TAKE = text(f"SELECT pg_advisory_lock({_KEY})")
"""Waits for a lock, which the session has until it ends; see `parameters`."""


def parameters(kind: Lock, name: str = "") -> dict[str, int | str]:
    """What a statement needs to name a lock."""
    return {"kind": int(kind), "name": name}


async def hold(connection: AsyncConnection, kind: Lock, name: str) -> None:
    """Waits for a lock, which the transaction has until it ends."""
    await connection.execute(_HOLD, parameters(kind, name))


async def try_hold(connection: AsyncConnection, kind: Lock, name: str = "") -> bool:
    """Takes a lock until the transaction ends, unless another has it."""
    return bool((await connection.execute(_TRY_HOLD, parameters(kind, name))).scalar_one())


async def try_take(connection: AsyncConnection, kind: Lock, name: str) -> bool:
    """Takes a lock until the session ends or lets it go, unless another has it."""
    return bool((await connection.execute(_TRY_TAKE, parameters(kind, name))).scalar_one())


async def let_go(connection: AsyncConnection, kind: Lock, name: str) -> None:
    """Lets a lock of the session go."""
    await connection.execute(_LET_GO, parameters(kind, name))
