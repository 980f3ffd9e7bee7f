"""Records one history: clients, a reader of the feed and, if asked for, faults, all at the same time on one system."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from benchmarks.histories.calls import Connection
from benchmarks.histories.clients import Client, World
from benchmarks.histories.faults import KINDS, Injector
from benchmarks.histories.feed_reader import FeedReader
from benchmarks.histories.history import Change, Entry, History
from benchmarks.histories.journal import moves_in
from benchmarks.histories.recorder import Recorder
from benchmarks.histories.records import Moved, ReadAliases
from benchmarks.histories.system import System
from veneer.errors import VeneerError

_PAUSE_S = 0.05
_FEED_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much a history holds.

    Attributes:
        num_clients: Clients at a time.
        num_adapters: Adapters that they share.
        num_keys: Keys that they may revoke.
        min_calls: They go on until they have made so many, and all faults are over.
        pause_s: A client's mean pause between its calls.
        settle_s: Most time that each adapter may take to be written to surely at the end.
        must_settle: Whether it has to; a control plane with a planted fault may never, and what it showed until then is checked.
        limit_s: Most time that all of it may take, many times what it does take.
    """

    num_clients: int = 6
    num_adapters: int = 2
    num_keys: int = 4
    min_calls: int = 320
    pause_s: float = 0.03
    settle_s: float = 120.0
    must_settle: bool = True
    limit_s: float = 240.0


class StalledError(Exception):
    """A history did not come to its end: the message says how far it came."""


async def record(system: System, *, number: int, kinds: Sequence[str] = KINDS, load: Load | None = None) -> History:
    """Records a history with tenants of its own.

    Args:
        system: Runs.
        number: Of the history on this system; it seeds what is drawn at random too.
        kinds: Faults that strike the system meanwhile, each until it has hit.
        load: How much of it.

    Raises:
        StalledError: It was not over in time, or a process did not come back from a fault.
    """
    load = load or Load()
    recorder = Recorder()
    injector = Injector(system, recorder, seed=number, kinds=kinds)
    try:
        async with asyncio.timeout(load.limit_s):
            return await _record(system, recorder, injector, number=number, load=load)
    except (TimeoutError, VeneerError, ExceptionGroup) as error:
        if isinstance(error, ExceptionGroup) and error.split((TimeoutError, VeneerError))[1] is not None:
            raise  # an error of this program
        text = f"{recorder.num_calls} calls had an answer, {recorder.num_in_flight(None)} writes had none yet"
        raise StalledError(f"not over within {load.limit_s:g} s: {text}; {injector}; {error!r}") from error


async def _record(system: System, recorder: Recorder, injector: Injector, *, number: int, load: Load) -> History:
    world = World(
        owner=await system.tenant(f"owner-{number}"),
        guest=await system.tenant(f"guest-{number}"),
        spare=[await system.key(f"owner-{number}") for _ in range(load.num_keys)],
        num_adapters=load.num_adapters,
        first_content=1_000_000 + 10_000 * number,
    )
    async with contextlib.AsyncExitStack() as stack:

        def connect() -> list[Connection]:
            made = [
                Connection(address, owner=world.owner, node_key=system.node_key, content=world.content)
                for address in system.callers
            ]
            for one in made:
                stack.push_async_callback(one.close)
            return made

        reader = FeedReader(connect(), world.owner.tenant)
        await reader.start()
        clients = [Client(at, connect(), world, recorder, seed=1000 * number + at) for at in range(load.num_clients)]
        following = asyncio.create_task(reader.run())
        try:
            await clients[0].begin()
            await _work(clients, injector, recorder, load)
            with contextlib.nullcontext() if load.must_settle else contextlib.suppress(TimeoutError):
                await clients[0].settle(timeout_s=load.settle_s)
            await reader.wait_for(_last_moves(recorder), timeout_s=_FEED_TIMEOUT_S)
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
        journal = await _journal(clients[0].connections)
    recorder.note_service(journal)
    return recorder.history(reader.feed, injector.faults, journal)


async def _journal(connections: Sequence[Connection]) -> tuple[Entry, ...]:
    """What the audit log says, from whichever control plane answers."""
    while True:
        for one in connections:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return moves_in(await one.audit())
        await asyncio.sleep(_PAUSE_S)


async def _work(clients: Sequence[Client], injector: Injector, recorder: Recorder, load: Load) -> None:
    def is_over() -> bool:
        return recorder.num_calls >= load.min_calls and injector.is_over

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.run(until=is_over, pause_s=load.pause_s))
        group.create_task(injector.run(ready=lambda: recorder.num_calls >= load.min_calls // 10))


def _last_moves(recorder: Recorder) -> list[Change]:
    """The events of where all aliases stood at the end."""
    last: dict[tuple[str, str], Moved] = {}
    for one in recorder.operations:
        if isinstance(one.what, ReadAliases):
            for item in getattr(one.outcome, "items", ()):
                key = (one.subject, item.alias)
                if key not in last or last[key].generation <= item.generation:
                    last[key] = item
    return [
        Change("ALIAS", adapter, moved.arms[0][0] if len(moved.arms) == 1 else "", moved.generation)
        for (adapter, _), moved in last.items()
    ]
