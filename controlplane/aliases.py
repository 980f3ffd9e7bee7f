"""Moving aliases: by compare-and-swap, forward and back, unless they are frozen."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

from sqlalchemy import Row, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.answers import RACED, Request, alias_from_json, alias_to_json, answered, keep
from controlplane.catalog import NO_VERSION, READY, STABLE, Alias, Arm, aliases_of, lock_adapter
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import Database, Scope
from controlplane.signatures import why_untrusted
from controlplane.splits import Assignment, assign, consecutive
from veneer.errors import ALIAS_MOVED, AbortedError, FailedPreconditionError, InvalidArgumentError, NotFoundError, Violation

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
_WHOLE = 1
"""Weight of the only arm."""
_MOST_JUDGED = 32
"""Earlier versions that a roll-back looks at for one whose signature is allowed."""
_MOST_RECALLED = 256
"""Earlier splits between the same versions among which a move looks for one with the same weights."""
_NO_ALIAS = "there is no such alias"
_Choose = Callable[[AsyncConnection, Alias | None], Awaitable[Sequence[Arm]]]
"""Arms to move an alias to, given what it is now."""


def check_alias_name(name: str, *, field: str = "alias") -> None:
    """Refuses a name that no alias can have; `field` is where the caller gave it.

    Raises:
        InvalidArgumentError: It is not 1 to 63 of lower-case letters, digits, `.`, `_` and inner hyphens.
    """
    if _NAME.fullmatch(name) is None:
        text = "must be 1 to 63 of lower-case letters, digits, '.', '_' and hyphens that begins and ends with a letter or digit"
        raise InvalidArgumentError.of([Violation(field, text)])


class AliasMovedError(AbortedError):
    """The alias is at another generation than its caller saw."""

    kind = ALIAS_MOVED


class Aliases:
    """Use cases that move aliases. Stateless; any task may call it.

    Every move runs under the lock of its adapter's row and gives the alias its next generation. The arms of earlier generations
    stay: they are the history that `rollback` reads.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def set(
        self,
        owner: str,
        adapter: str,
        alias: str,
        *,
        arms: Sequence[Arm],
        expected_generation: int | None,
        request_id: str = "",
        dry_run: bool = False,
    ) -> Alias:
        """Points an alias at one version or at a weighted split; makes it when it is absent.

        Args:
            owner: Tenant that owns the adapter.
            adapter: Name of the adapter.
            alias: Name; empty means `stable`.
            arms: Versions of the adapter that are ready and for one base, none twice.
            expected_generation: Generation that the caller saw, 0 for none; None moves it whatever it is.
            request_id: The caller's own identifier of this move.
            dry_run: Does nothing but say what would be done.

        Raises:
            NotFoundError: The owner has no such adapter, or it no such version.
            AbortedError: The alias has moved since.
            FailedPreconditionError: The alias is frozen, a version is not ready, or they are for different bases.
            InvalidArgumentError: A version is named twice, or the alias cannot have this name.
        """
        name = alias or STABLE
        check_alias_name(name)
        if len({arm.version for arm in arms}) < len(arms):
            raise InvalidArgumentError.of([Violation("arms", "name a version twice")])
        content = [[arm.version, arm.weight] for arm in arms]
        request = Request.of(owner, request_id, "SetAlias", adapter, name, content, expected_generation)

        async def choose(connection: AsyncConnection, present: Alias | None) -> Sequence[Arm]:
            del present
            await check_servable(connection, owner, adapter, [arm.version for arm in arms])
            return arms

        return await self._move(request, adapter, name, choose, expected_generation=expected_generation, dry_run=dry_run)

    async def rollback(
        self,
        owner: str,
        adapter: str,
        alias: str,
        *,
        version: str,
        expected_generation: int | None,
        request_id: str = "",
        dry_run: bool = False,
    ) -> Alias:
        """Points an alias back at a version that it served before.

        Args:
            owner: Tenant that owns the adapter.
            adapter: Name of the adapter.
            alias: Name; empty means `stable`.
            version: One that the alias served before; empty: the last one, still ready and signed as the owner asks, that all of
                its traffic went to before it went where it goes now.
            expected_generation: Generation that the caller saw; None moves it whatever it is.
            request_id: The caller's own identifier of this move.
            dry_run: Does nothing but say what would be done.

        Raises:
            NotFoundError: The owner has no such adapter, it no such alias, or no such version.
            AbortedError: The alias has moved since.
            FailedPreconditionError: There is nothing to go back to, the alias is frozen, or the version is not ready or was never
                served by the alias.
        """
        name = alias or STABLE
        request = Request.of(owner, request_id, "Rollback", adapter, name, version, expected_generation)

        async def choose(connection: AsyncConnection, present: Alias | None) -> Sequence[Arm]:
            if present is None:
                raise NotFoundError(_NO_ALIAS)
            history = await _history(connection, owner, adapter, name)
            target = version or await _last_whole(connection, owner, history, present)
            if version:
                await check_servable(connection, owner, adapter, [version])
                if all(row.version != version for row in history):
                    raise FailedPreconditionError(f"alias {name!r} never served version {version}; set the alias instead")
            return [Arm(target, _WHOLE)]

        return await self._move(request, adapter, name, choose, expected_generation=expected_generation, dry_run=dry_run)

    async def promote(
        self,
        owner: str,
        adapter: str,
        alias: str,
        *,
        source: str,
        version: str,
        expected_generation: int | None,
        request_id: str = "",
        dry_run: bool = False,
    ) -> Alias:
        """Gives all of an alias's traffic to the version that another alias serves, or to one of its own arms.

        Args:
            owner: Tenant that owns the adapter.
            adapter: Name of the adapter.
            alias: Name of the alias that is moved; empty means `stable`.
            source: Alias that serves one version alone; empty: `version` is an arm of the alias itself.
            version: The arm; with a source, what it must serve, or empty.
            expected_generation: Generation that the caller saw; None moves it whatever it is.
            request_id: The caller's own identifier of this move.
            dry_run: Does nothing but say what would be done.

        Raises:
            NotFoundError: The owner has no such adapter, or it no such alias.
            AbortedError: The alias has moved since.
            FailedPreconditionError: The alias is frozen, the source serves a split or another version, the version is no arm of
                the alias, or it is not ready.
            InvalidArgumentError: Neither source nor version is named.
        """
        name = alias or STABLE
        check_alias_name(name)
        if not source and not version:
            raise InvalidArgumentError.of([Violation("source", "or a version must say what is promoted")])
        request = Request.of(owner, request_id, "Promote", adapter, name, source, version, expected_generation)

        async def choose(connection: AsyncConnection, present: Alias | None) -> Sequence[Arm]:
            origin = await present_alias(connection, owner, adapter, source) if source else present
            if origin is None:
                raise NotFoundError(_NO_ALIAS)
            target = version or origin.arms[0].version
            if source and [arm.version for arm in origin.arms] != [target]:
                raise FailedPreconditionError(f"alias {source!r} does not serve this version alone")
            if all(arm.version != target for arm in origin.arms):
                raise FailedPreconditionError(f"version {target} is no arm of alias {name!r}; set the alias instead")
            await check_servable(connection, owner, adapter, [target])
            return [Arm(target, _WHOLE)]

        return await self._move(request, adapter, name, choose, expected_generation=expected_generation, dry_run=dry_run)

    async def freeze(self, owner: str, adapter: str, alias: str, *, frozen: bool, request_id: str = "") -> Alias:
        """Forbids every move of an alias, or allows them again; a second time changes nothing.

        Raises:
            NotFoundError: The owner has no such adapter, or it no such alias.
        """
        name = alias or STABLE
        request = Request.of(owner, request_id, "FreezeAlias", adapter, name, frozen)
        columns = models.aliases.c
        async with self._database.transaction(Scope.of_tenant(owner), refusals=RACED) as connection:
            known = await answered(connection, request)
            if known is not None:
                return alias_from_json(known)
            await lock_adapter(connection, owner, adapter)
            present = await present_alias(connection, owner, adapter, name)
            if present is None:
                raise NotFoundError(_NO_ALIAS)
            mine = (columns.tenant == owner, columns.adapter == adapter, columns.name == name)
            await connection.execute(update(models.aliases).where(*mine).values(frozen=frozen))
            changed = replace(present, frozen=frozen)
            await keep(connection, request, alias_to_json(changed))
        return changed

    async def _move(
        self, request: Request, adapter: str, name: str, choose: _Choose, *, expected_generation: int | None, dry_run: bool
    ) -> Alias:
        owner = request.tenant
        async with self._database.transaction(Scope.of_tenant(owner), refusals=RACED, dry_run=dry_run) as connection:
            known = await answered(connection, request)
            if known is not None:
                return alias_from_json(known)
            await lock_adapter(connection, owner, adapter)
            present = await present_alias(connection, owner, adapter, name)
            compare_generation(present, expected_generation)
            moved = await move(connection, owner, adapter, name, arms=await choose(connection, present))
            await keep(connection, request, alias_to_json(moved))
        return moved


def refuse_frozen(alias: Alias) -> None:
    """Refuses to move a frozen alias.

    Raises:
        FailedPreconditionError: It is frozen.
    """
    if alias.frozen:
        raise FailedPreconditionError(f"alias {alias.name!r} is frozen; unfreeze it first")


async def move(connection: AsyncConnection, owner: str, adapter: str, alias: str, *, arms: Sequence[Arm]) -> Alias:
    """Moves an alias, or makes it, and tells the feed. The caller holds the adapter's lock and has checked the versions.

    Without arms it points at nothing; its generation stays, so that it never seems older than it was.

    Raises:
        FailedPreconditionError: The alias is frozen.
    """
    columns = models.aliases.c
    made = insert(models.aliases).values(tenant=owner, adapter=adapter, name=alias, generation=1)
    next_one = {"generation": columns.generation + 1, "update_time": func.now()}
    query = made.on_conflict_do_update(constraint="pk_aliases", set_=next_one)
    row = (await connection.execute(query.returning(columns.generation, columns.update_time, columns.frozen))).one()
    moved = Alias(alias, row.generation, tuple(arms), row.update_time, row.frozen)
    refuse_frozen(moved)
    assignment = await _assignment(connection, owner, adapter, alias, arms) if len(arms) > 1 else {}
    rows = [
        {
            "tenant": owner,
            "adapter": adapter,
            "alias": alias,
            "generation": row.generation,
            "position": position,
            "version": arm.version,
            "weight": arm.weight,
            "points": assignment.get(arm.version),
        }
        for position, arm in enumerate(arms)
    ]
    if rows:
        await connection.execute(insert(models.arms), rows)
    version = arms[0].version if len(arms) == 1 else ""
    change = Change(kind=ChangeKind.ALIAS, tenant=owner, adapter=adapter, version=version, generation=row.generation)
    await record(connection, change)
    return moved


async def present_alias(connection: AsyncConnection, owner: str, adapter: str, alias: str) -> Alias | None:
    """An alias as it is now; None when it is absent, or points at nothing."""
    found = (await aliases_of(connection, owner, [adapter], alias=alias)).get(adapter)
    return found[0] if found else None


def compare_generation(present: Alias | None, expected_generation: int | None) -> None:
    """Refuses an alias that has moved since its caller saw it.

    Raises:
        AliasMovedError: It is at another generation than the one expected.
    """
    generation = 0 if present is None else present.generation
    if expected_generation is not None and expected_generation != generation:
        raise AliasMovedError(f"the alias is at generation {generation}, not {expected_generation}; read it again")


async def check_servable(connection: AsyncConnection, owner: str, adapter: str, digests: Sequence[str]) -> None:
    """Refuses versions that no alias may serve together.

    Raises:
        NotFoundError: The adapter has no such version.
        FailedPreconditionError: One is not ready or not signed as the owner asks, or they are for different bases.
    """
    columns = models.versions.c
    mine = (columns.tenant == owner, columns.adapter == adapter, columns.digest.in_(digests))
    rows = (await connection.execute(select(columns.digest, columns.state, columns.base_digest).where(*mine))).all()
    if len(rows) < len(set(digests)):
        raise NotFoundError(NO_VERSION)
    for row in rows:
        if row.state != READY:
            raise FailedPreconditionError(f"version {row.digest} is {row.state.lower()}; an alias can only serve ready versions")
    if len({row.base_digest for row in rows}) > 1:
        raise FailedPreconditionError("the versions of a split must be for one base")
    for digest, reason in (await why_untrusted(connection, owner, digests)).items():
        raise FailedPreconditionError(f"version {digest} is not signed as its owner asks, so no data plane loads it: {reason}")


async def _assignment(connection: AsyncConnection, owner: str, adapter: str, alias: str, arms: Sequence[Arm]) -> Assignment:
    """The points of each arm of a split, given the earlier splits of the alias between the same versions."""
    a = models.arms.c
    digests = [arm.version for arm in arms]
    mine = (a.tenant == owner, a.adapter == adapter, a.alias == alias)
    num_same = func.count().filter(a.version.in_(digests))
    same = select(a.generation).where(*mine).group_by(a.generation).having(num_same == len(arms), func.count() == len(arms))
    query = (
        select(a.generation, a.version, a.weight, a.points)
        .where(*mine, a.generation.in_(same))
        .order_by(a.generation.desc(), a.position)
        .limit(_MOST_RECALLED * len(arms))
    )
    rows = (await connection.execute(query)).all()
    earlier: list[tuple[dict[str, int], Assignment]] = []
    for _, split in groupby(rows, key=lambda row: row.generation):
        written = list(split)
        weights = {row.version: row.weight for row in written}
        if all(row.points for row in written):
            earlier.append((weights, {row.version: tuple(row.points) for row in written}))
        else:
            earlier.append((weights, consecutive(list(weights.items()))))
    return assign({arm.version: arm.weight for arm in arms}, earlier)


async def _history(connection: AsyncConnection, owner: str, adapter: str, alias: str) -> Sequence[Row[Any, Any, Any]]:
    """Every arm that the alias ever had, latest generation first, with the present state of its version."""
    a, v = models.arms.c, models.versions.c
    query = (
        select(a.generation, a.version, v.state)
        .join(models.versions, (v.tenant == a.tenant) & (v.digest == a.version))
        .where(a.tenant == owner, a.adapter == adapter, a.alias == alias)
        .order_by(a.generation.desc(), a.position)
    )
    return (await connection.execute(query)).all()


async def _last_whole(connection: AsyncConnection, owner: str, history: Sequence[Row[Any, Any, Any]], present: Alias) -> str:
    """The last good version that had all traffic before the present generation, and is not what all traffic goes to now."""
    num_arms = Counter(row.generation for row in history)
    now = present.arms[0].version if len(present.arms) == 1 else None
    whole = (row for row in history if num_arms[row.generation] == 1 and row.version != now and row.state == READY)
    for version in islice(dict.fromkeys(str(row.version) for row in whole), _MOST_JUDGED):
        if not await why_untrusted(connection, owner, [version]):
            return version
    fault = f"the alias has no earlier good version to go back to (of the last {_MOST_JUDGED}); set the alias instead"
    raise FailedPreconditionError(fault)
