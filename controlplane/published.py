"""The answer of a publish: as it is kept, and how it is completed when a probe came before the alias moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.aliases import move
from controlplane.answers import (
    Request,
    alias_from_json,
    alias_to_json,
    answered,
    complete,
    version_from_json,
    version_to_json,
)
from controlplane.catalog import READY, Alias, Arm, Version, aliases_of, find_version, lock_adapter
from controlplane.db import Database, Scope
from veneer.errors import FailedPreconditionError


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish gave.

    Attributes:
        version: The stored version.
        alias: The alias that was moved with it.
        awaits: The alias that moves once a probe of the version went well; empty: none does; None: no probe is waited for.
    """

    version: Version
    alias: Alias | None
    awaits: str | None = None


def answer_of(published: Published) -> dict[str, Any]:
    """An answer as it is kept."""
    alias = None if published.alias is None else alias_to_json(published.alias)
    return {"version": version_to_json(published.version), "alias": alias, "awaits": published.awaits}


def published_of(answer: Mapping[str, Any]) -> Published:
    """An answer as it was kept."""
    alias = None if answer["alias"] is None else alias_from_json(answer["alias"])
    return Published(version_from_json(answer["version"]), alias, answer.get("awaits"))


async def complete_publish(database: Database, request: Request, version: Version, *, alias: str, if_absent: bool) -> Published:
    """Moves the alias that waited for a version's probe, and keeps the answer with what the probe found.

    Args:
        database: The database.
        request: The publish.
        version: What it published.
        alias: The alias; empty: none is moved.
        if_absent: Leave the alias where it is if another publish made it meanwhile: nobody asked for it by name.

    Raises:
        NotFoundError: The version was deleted.
        FailedPreconditionError: The version may not be served any more, or the alias is frozen.
    """
    owner = version.owner
    async with database.transaction(Scope.of_tenant(owner)) as connection:
        known = await answered(connection, request)
        if known is not None and known.get("awaits") is None:  # another call with this request_id was quicker
            return published_of(known)
        await lock_adapter(connection, owner, version.adapter)
        present = await find_version(connection, owner, version.adapter, version.digest)
        if present.state != READY:
            raise FailedPreconditionError(f"version {version.digest} is {present.state.lower()}; no alias was moved")
        moved = None
        known_aliases = await aliases_of(connection, owner, [version.adapter], alias=alias)
        if alias and not (if_absent and known_aliases):
            moved = await move(connection, owner, version.adapter, alias, arms=[Arm(version.digest, 1)])
        published = Published(present, moved)
        await complete(connection, request, answer_of(published))
    return published
