"""The conductor: takes the steps of canaries, and takes bad versions back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.aliases import move, present_alias
from controlplane.canaries import MOVED, begin_step, end_canary, keep_progress, running_canary
from controlplane.canary_plan import PROMOTED, ROLLED_BACK, STOPPED, Canary, Move
from controlplane.canary_tables import canaries
from controlplane.catalog import READY, Arm, lock_adapter
from controlplane.db import Database, Scope, translated
from controlplane.leader import Leadership
from controlplane.settings import Settings

_LOG = logging.getLogger(__name__)
_RUNNING = text("SELECT tenant, adapter, alias FROM canaries WHERE state = 'RUNNING' ORDER BY tenant, adapter, alias")
_TRIM = text("DELETE FROM outcome_batches WHERE update_time < now() - interval '24 hours'")


class _Place(NamedTuple):
    owner: str
    adapter: str
    alias: str


class Conductor:
    """Looks at every running canary, in one control-plane process at a time. Owned by the process; `run` is its one task.

    The turn only saves work. A process that believes in its turn for too long does no harm: each look is a transaction under the
    adapter's lock, and does something only if the alias is at the generation that the canary itself gave it.
    """

    def __init__(self, database: Database, settings: Settings, *, registry: CollectorRegistry) -> None:
        self._database = database
        self._leadership = Leadership(database, "conductor")
        self._interval_s = settings.canary_interval_s
        self._running = Gauge("veneer_controlplane_canaries_running", "Canaries that take their steps.", registry=registry)
        self._ended = Counter("veneer_controlplane_canaries_ended", "Canaries that ended, by how.", ["state"], registry=registry)
        self._failed = Counter("veneer_controlplane_canary_failures", "Looks at canaries that failed.", registry=registry)

    async def run(self) -> None:
        """Conducts until cancelled. No failure may end it, since nobody would start it again."""
        while True:
            await self._try(self.look)
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Looks at every running canary once, unless another process does.

        Raises:
            UnavailableError: The database is away.
        """
        places = await self._places()
        self._running.set(len(places))
        if not places:
            return
        async with self._leadership.term() as term:
            if term is None:
                return
            for place in places:
                await self._try(partial(self.take, *place))

    async def take(self, owner: str, adapter: str, alias: str) -> None:
        """Looks at the canary of one alias, and does what is due.

        Raises:
            NotFoundError: The adapter is gone.
            UnavailableError: The database is away.
        """
        state = None
        async with self._database.transaction(Scope.of_tenant(owner)) as connection:
            await lock_adapter(connection, owner, adapter)
            canary = await running_canary(connection, owner, adapter, alias)
            if canary is not None:
                state = await _conduct(connection, canary)
        if state is not None:
            self._ended.labels(state).inc()

    async def _places(self) -> list[_Place]:
        with translated():
            async with self._database.relay.begin() as connection:
                await connection.execute(_TRIM)
                return [_Place(*row) for row in (await connection.execute(_RUNNING)).all()]

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from error  # cleaning up failed and took the cancellation's place
            self._failed.inc()
            _LOG.warning("a look at canaries failed; they wait", extra={"cause": type(error).__name__})


async def _conduct(connection: AsyncConnection, canary: Canary) -> str | None:
    """Does what is due; returns the state in which the canary ended, if it did."""
    present = await present_alias(connection, canary.owner, canary.adapter, canary.alias)
    if present is None or present.generation != canary.alias_generation:
        return await _end(connection, canary, STOPPED, MOVED)
    if present.frozen:
        return None
    states = await _states(connection, canary)
    if states.get(canary.stable) != READY:
        return await _end(connection, canary, STOPPED, "the stable version is not ready any more")
    if states.get(canary.version) != READY:
        return await _roll_back(connection, canary, f"the version is {states.get(canary.version, 'gone').lower()}")
    is_due = canary.is_due(await _elapsed_s(connection, canary))
    weighed = await asyncio.to_thread(canary.weighed, is_due=is_due)
    if weighed != canary:
        await keep_progress(connection, weighed)
    match weighed.next_move(is_due=is_due):
        case Move.ROLL_BACK:
            return await _roll_back(connection, weighed, weighed.why_rolled_back())
        case Move.GO_ON:
            return await _go_on(connection, weighed)
        case Move.WAIT:
            return None


async def _go_on(connection: AsyncConnection, canary: Canary) -> str | None:
    if canary.step + 1 < len(canary.steps):
        await begin_step(connection, canary, canary.step + 1)
        return None
    await move(connection, canary.owner, canary.adapter, canary.alias, arms=[Arm(canary.version, 1)])
    return await _end(connection, canary, PROMOTED, "the last step is over")


async def _roll_back(connection: AsyncConnection, canary: Canary, reason: str) -> str:
    await move(connection, canary.owner, canary.adapter, canary.alias, arms=[Arm(canary.stable, 1)])
    return await _end(connection, canary, ROLLED_BACK, reason)


async def _end(connection: AsyncConnection, canary: Canary, state: str, reason: str) -> str:
    await end_canary(connection, canary, state, reason)
    return state


async def _states(connection: AsyncConnection, canary: Canary) -> dict[str, str]:
    columns = models.versions.c
    both = columns.digest.in_([canary.version, canary.stable])
    query = select(columns.digest, columns.state).where(columns.tenant == canary.owner, both)
    return {row.digest: row.state for row in (await connection.execute(query)).all()}


async def _elapsed_s(connection: AsyncConnection, canary: Canary) -> float:
    """Time since the step began, by the database's clock alone."""
    c = canaries.c
    mine = (
        c.tenant == canary.owner,
        c.adapter == canary.adapter,
        c.alias == canary.alias,
        c.generation == canary.generation,
    )
    return float((await connection.execute(select(func.extract("epoch", func.now() - c.step_time)).where(*mine))).scalar_one())
