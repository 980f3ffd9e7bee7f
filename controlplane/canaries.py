"""Canaries: starting, reading and stopping them, and how they are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane.aliases import check_alias_name, check_servable, compare_generation, move, present_alias
from controlplane.answers import RACED, Request, answered, keep
from controlplane.canary_plan import RUNNING, STOPPED, Canary, Progress, Step, Window, check_steps
from controlplane.canary_tables import canaries, canary_steps
from controlplane.catalog import STABLE, Arm, lock_adapter
from controlplane.db import Database, Scope
from controlplane.regression import Tally
from veneer.errors import FailedPreconditionError, NotFoundError

MOVED: Final = "the alias was moved"
_ASKED: Final = "it was asked to stop"
_PERCENT = 100


class Canaries:
    """Use cases of canaries. Stateless; any task may call it. The conductor takes their steps."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def start(
        self,
        owner: str,
        adapter: str,
        alias: str,
        *,
        version: str,
        steps: Sequence[Step],
        expected_generation: int | None,
        request_id: str = "",
        dry_run: bool = False,
    ) -> Canary:
        """Starts a canary with its first step.

        Args:
            owner: Tenant that owns the adapter.
            adapter: Name of the adapter.
            alias: Name; empty means `stable`.
            version: Version that is to get the alias's traffic.
            steps: Its schedule, each step with more weight than the one before.
            expected_generation: Generation that the caller saw; None starts whatever it is.
            request_id: The caller's own identifier of this start.
            dry_run: Does nothing but say what would be done.

        Raises:
            NotFoundError: The owner has no such adapter, or it no such alias or version.
            AbortedError: The alias has moved since.
            FailedPreconditionError: The alias is frozen, serves a split, or serves this version, or the version is not ready or
                for another base.
            InvalidArgumentError: A step gives no more weight than the one before.
        """
        name = alias or STABLE
        check_alias_name(name)
        check_steps(steps)
        content = [[step.weight, step.duration_s, step.min_requests] for step in steps]
        request = Request.of(owner, request_id, "StartCanary", adapter, name, version, content, expected_generation)
        async with self._database.transaction(Scope.of_tenant(owner), refusals=RACED, dry_run=dry_run) as connection:
            known = await answered(connection, request)
            if known is not None:
                return canary_from_json(known)
            await lock_adapter(connection, owner, adapter)
            present = await present_alias(connection, owner, adapter, name)
            compare_generation(present, expected_generation)
            if present is None:
                raise NotFoundError("there is no such alias")
            if len(present.arms) > 1:
                raise FailedPreconditionError(f"alias {name!r} serves a split; a canary begins with one version")
            stable = present.arms[0].version
            if stable == version:
                raise FailedPreconditionError(f"alias {name!r} serves this version already")
            await check_servable(connection, owner, adapter, [stable, version])
            before = await running_canary(connection, owner, adapter, name)
            if before is not None:
                await end_canary(connection, before, STOPPED, MOVED)
            canary = await _begin(connection, owner, adapter, name, version=version, stable=stable, steps=steps)
            await keep(connection, request, canary_to_json(canary))
        return canary

    async def get(self, owner: str, adapter: str, alias: str) -> Canary:
        """The present or last canary of an alias.

        Raises:
            NotFoundError: There was none.
        """
        async with self._database.transaction(Scope.of_tenant(owner)) as connection:
            canary = await _last_canary(connection, owner, adapter, alias or STABLE)
            if canary is not None and await _is_outrun(connection, canary):
                await lock_adapter(connection, owner, adapter)  # else it may only have taken its next step between two looks
                canary = await _last_canary(connection, owner, adapter, alias or STABLE)
                if canary is not None and await _is_outrun(connection, canary):
                    return replace(canary, state=STOPPED, reason=MOVED)  # as the conductor will note
        if canary is None:
            raise NotFoundError("there is no such canary")
        return canary

    async def stop(self, owner: str, adapter: str, alias: str, *, request_id: str = "", dry_run: bool = False) -> Canary:
        """Ends a canary and gives all traffic back to the stable version.

        Raises:
            NotFoundError: The owner has no such adapter.
            FailedPreconditionError: No canary runs, or the alias is frozen.
        """
        name = alias or STABLE
        request = Request.of(owner, request_id, "StopCanary", adapter, name)
        async with self._database.transaction(Scope.of_tenant(owner), refusals=RACED, dry_run=dry_run) as connection:
            known = await answered(connection, request)
            if known is not None:
                return canary_from_json(known)
            await lock_adapter(connection, owner, adapter)
            canary = await running_canary(connection, owner, adapter, name)
            present = await present_alias(connection, owner, adapter, name)
            if canary is None or present is None or present.generation != canary.alias_generation:
                raise FailedPreconditionError(f"no canary runs on alias {name!r}")
            await check_servable(connection, owner, adapter, [canary.stable])
            await move(connection, owner, adapter, name, arms=[Arm(canary.stable, 1)])
            ended = await end_canary(connection, canary, STOPPED, _ASKED)
            await keep(connection, request, canary_to_json(ended))
        return ended


async def _is_outrun(connection: AsyncConnection, canary: Canary) -> bool:
    """Whether somebody else has moved the alias of a canary that runs."""
    if canary.state != RUNNING:
        return False
    present = await present_alias(connection, canary.owner, canary.adapter, canary.alias)
    return present is None or present.generation != canary.alias_generation


async def running_canary(connection: AsyncConnection, owner: str, adapter: str, alias: str) -> Canary | None:
    """The canary that runs on an alias, locked. The caller holds the adapter's lock."""
    c = canaries.c
    mine = (c.tenant == owner, c.adapter == adapter, c.alias == alias, c.state == RUNNING)
    row = (await connection.execute(select(canaries).where(*mine).with_for_update())).one_or_none()
    return None if row is None else await _whole(connection, row, is_locked=True)


async def begin_step(connection: AsyncConnection, canary: Canary, step: int) -> None:
    """Gives a canary its next step. The caller holds the adapter's lock and knows that nobody else has moved the alias."""
    weight = canary.steps[step].weight
    arms = [Arm(canary.stable, _PERCENT - weight), Arm(canary.version, weight)]
    moved = await move(connection, canary.owner, canary.adapter, canary.alias, arms=arms)
    assert moved.generation == canary.generation + step
    await _add_step(connection, canary, moved.generation)
    await connection.execute(update(canaries).where(*_is(canary)).values(step=step, step_time=func.now()))


async def end_canary(connection: AsyncConnection, canary: Canary, state: str, reason: str) -> Canary:
    """Notes how a canary ended; the alias is its caller's business."""
    values = {"state": state, "reason": reason, "end_time": func.now()}
    query = update(canaries).where(*_is(canary)).values(values).returning(canaries.c.end_time)
    return replace(canary, state=state, reason=reason, end_time=(await connection.execute(query)).scalar_one())


async def keep_progress(connection: AsyncConnection, canary: Canary) -> None:
    """Keeps what was weighed of a canary."""
    columns = canary_steps.c
    for index, one in enumerate(canary.progress):
        mine = (
            columns.tenant == canary.owner,
            columns.adapter == canary.adapter,
            columns.alias == canary.alias,
            columns.generation == canary.generation + index,
        )
        windows = [dataclasses.asdict(window) for window in one.windows]
        await connection.execute(update(canary_steps).where(*mine).values(windows=windows))


def canary_to_json(canary: Canary) -> dict[str, Any]:
    """A canary as it is kept for an answer."""
    times = {name: None if time is None else time.isoformat() for name, time in _times(canary).items()}
    return {**dataclasses.asdict(canary), **times}


def canary_from_json(fields: Mapping[str, Any]) -> Canary:
    """A canary as it was kept for an answer."""
    progress = tuple(
        Progress(version=Tally(**one["version"]), stable=Tally(**one["stable"]), windows=_windows(one.get("windows", ())))
        for one in fields["progress"]
    )
    times = {
        name: None if fields[name] is None else datetime.fromisoformat(fields[name])
        for name in ("create_time", "step_time", "end_time")
    }
    steps = tuple(Step(**step) for step in fields["steps"])
    return Canary(**{**fields, **times, "steps": steps, "progress": progress})


def _times(canary: Canary) -> dict[str, datetime | None]:
    return {"create_time": canary.create_time, "step_time": canary.step_time, "end_time": canary.end_time}


def _is(canary: Canary) -> tuple[Any, ...]:
    c = canaries.c
    return (
        c.tenant == canary.owner,
        c.adapter == canary.adapter,
        c.alias == canary.alias,
        c.generation == canary.generation,
    )


async def _begin(
    connection: AsyncConnection, owner: str, adapter: str, alias: str, *, version: str, stable: str, steps: Sequence[Step]
) -> Canary:
    weight = steps[0].weight
    moved = await move(connection, owner, adapter, alias, arms=[Arm(stable, _PERCENT - weight), Arm(version, weight)])
    row = {
        "tenant": owner,
        "adapter": adapter,
        "alias": alias,
        "generation": moved.generation,
        "version": version,
        "stable": stable,
        "steps": [dataclasses.asdict(step) for step in steps],
        "step": 0,
        "state": RUNNING,
        "reason": "",
    }
    stored = (await connection.execute(insert(canaries).values(row).returning(*canaries.c))).one()
    canary = _canary(stored, (Progress(),))
    await _add_step(connection, canary, moved.generation)
    return canary


async def _add_step(connection: AsyncConnection, canary: Canary, generation: int) -> None:
    row = {
        "tenant": canary.owner,
        "adapter": canary.adapter,
        "alias": canary.alias,
        "generation": generation,
        "canary": canary.generation,
    }
    await connection.execute(insert(canary_steps).values(row))


async def _last_canary(connection: AsyncConnection, owner: str, adapter: str, alias: str) -> Canary | None:
    c = canaries.c
    mine = (c.tenant == owner, c.adapter == adapter, c.alias == alias)
    query = select(canaries).where(*mine).order_by(c.generation.desc()).limit(1)
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else await _whole(connection, row, is_locked=False)


async def _whole(connection: AsyncConnection, row: Row[Any], *, is_locked: bool) -> Canary:
    columns = canary_steps.c
    mine = (
        columns.tenant == row.tenant,
        columns.adapter == row.adapter,
        columns.alias == row.alias,
        columns.canary == row.generation,
    )
    query = select(canary_steps).where(*mine).order_by(columns.generation)
    rows = (await connection.execute(query.with_for_update() if is_locked else query)).all()
    return _canary(row, tuple(map(_progress, rows)))


def _progress(row: Row[Any]) -> Progress:
    return Progress(
        version=Tally(row.version_ok, row.version_failed),
        stable=Tally(row.stable_ok, row.stable_failed),
        windows=_windows(row.windows),
    )


def _windows(kept: Sequence[Mapping[str, Any]]) -> tuple[Window, ...]:
    return tuple(Window(one["place"], Tally(**one["version"]), Tally(**one["stable"]), one["evidence"]) for one in kept)


def _canary(row: Row[Any], progress: tuple[Progress, ...]) -> Canary:
    return Canary(
        owner=row.tenant,
        adapter=row.adapter,
        alias=row.alias,
        generation=row.generation,
        version=row.version,
        stable=row.stable,
        steps=tuple(Step(**step) for step in row.steps),
        step=row.step,
        state=row.state,
        reason=row.reason,
        progress=progress,
        create_time=row.create_time,
        step_time=row.step_time,
        end_time=row.end_time,
    )
