"""The answer of a publish: as it is kept, and how it is completed when a probe came before the alias moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.aliases import AliasMovedError, check_servable, compare_generation, move, present_alias
from controlplane.answers import (
    Request,
    alias_from_json,
    alias_to_json,
    answered,
    complete,
    version_from_json,
    version_to_json,
)
from controlplane.catalog import READY, Alias, Arm, Version, find_version, lock_adapter
from controlplane.db import Database, Scope
from veneer.errors import AbortedError, FailedPreconditionError


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish gave.

    Attributes:
        version: The stored version.
        alias: The alias that was moved with it.
        awaits: The alias that moves once a probe of the version went well; empty: none does; None: no probe is waited for.
        generation: That alias's generation when the version was published; 0: it was absent.
    """

    version: Version
    alias: Alias | None
    awaits: str | None = None
    generation: int = 0


def answer_of(published: Published) -> dict[str, Any]:
    """An answer as it is kept."""
    alias = None if published.alias is None else alias_to_json(published.alias)
    return {
        "version": version_to_json(published.version),
        "alias": alias,
        "awaits": published.awaits,
        "generation": published.generation,
    }


def published_of(answer: Mapping[str, Any]) -> Published:
    """An answer as it was kept."""
    alias = None if answer["alias"] is None else alias_from_json(answer["alias"])
    return Published(version_from_json(answer["version"]), alias, answer.get("awaits"), answer.get("generation", 0))


async def complete_publish(database: Database, request: Request, waiting: Published, *, if_absent: bool) -> Published:
    """Moves the alias that waited for a version's probe, and keeps the answer with what the probe found.

    It is moved only from where it was when the version was published: the probe took its time, and whoever moved it meanwhile
    knew more.

    Args:
        database: The database.
        request: The publish.
        waiting: What it published, and the alias that waits.
        if_absent: Leave the alias where it is if another publish made it meanwhile: nobody asked for it by name.

    Raises:
        NotFoundError: The version was deleted.
        AbortedError: The alias has moved since the version was published.
        FailedPreconditionError: The version may not be served any more, or the alias is frozen.
    """
    version, alias = waiting.version, waiting.awaits or ""
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
        if alias:
            alias_now = await present_alias(connection, owner, version.adapter, alias)
            if not (if_absent and alias_now is not None):
                _compare(alias_now, waiting)
                await check_servable(connection, owner, version.adapter, [version.digest])
                moved = await move(connection, owner, version.adapter, alias, arms=[Arm(version.digest, 1)])
        published = Published(present, moved)
        await complete(connection, request, answer_of(published))
    return published


def _compare(alias: Alias | None, waiting: Published) -> None:
    try:
        compare_generation(alias, waiting.generation)
    except AbortedError as error:
        kept = f"version {waiting.version.digest} is published, and was not put on it"
        raise AliasMovedError(f"alias {waiting.awaits!r} moved while the version was probed; {kept}") from error
