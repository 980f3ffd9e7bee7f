"""Who has room for a load under way, and who waits: never more than there is, and nobody for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.load_line import Ticket, Urgency
from dataplane.load_room import Amount, LoadRoom, NoRoomError
from tests.dataplane.doubles import until
from tests.dataplane.test_throttle import Clock

WAITED, EXPECTED, HINTED = Urgency
CAPACITY = Amount(memory=10, disk=100, image=10)


@dataclass(eq=False)
class Run:
    """An attempt: it enters, and stays until the test says otherwise.

    Attributes:
        go: Lets it ask for its image, if it has one, and end.
        inside: Whether its files have room.
        task: Runs it.
    """

    ticket: Ticket
    go: asyncio.Event = field(default_factory=asyncio.Event)
    inside: bool = False
    task: asyncio.Task[None] = field(init=False)


class Rooms:
    """A room, and attempts in it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.room = LoadRoom(CAPACITY, patience_s=10.0, max_wait_s=60.0, clock=self.clock)
        self.runs: list[Run] = []

    def run(self, amount: Amount, urgency: Urgency = WAITED, *, tenant: str = "", image: int = 0) -> Run:
        run = Run(Ticket(f"v{len(self.runs)}", tenant, urgency, number=len(self.runs) + 1))
        self.runs.append(run)
        run.task = asyncio.create_task(self._run(run, amount, image))
        return run

    async def _run(self, run: Run, amount: Amount, image: int) -> None:
        async with self.room.attempt(run.ticket):
            await self.room.enter(run.ticket, amount, on_wait=lambda: None)
            run.inside = True
            try:
                await run.go.wait()
                if image:
                    await self.room.enter(run.ticket, Amount(image=image), on_wait=lambda: None)
            finally:
                run.inside = False


@contextlib.asynccontextmanager
async def rooms() -> AsyncIterator[Rooms]:
    made = Rooms()
    try:
        yield made
    finally:
        for run in made.runs:
            run.task.cancel()
        await asyncio.gather(*(run.task for run in made.runs), return_exceptions=True)
        assert made.room.held == Amount()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_the_first_lacks_is_kept_for_it_and_others_have_what_it_does_not_need() -> None:
    async with rooms() as it:
        one = it.run(Amount(memory=1, disk=60))
        await turns()
        large, other, small = it.run(Amount(memory=1, disk=80)), it.run(Amount(memory=1, disk=30)), it.run(Amount(memory=7))
        await turns()
        assert [run.inside for run in (one, large, other, small)] == [True, False, False, True]
        one.go.set()
        await turns()
        assert [run.inside for run in (large, other, small)] == [True, False, True]
        large.go.set()
        await until(lambda: other.inside)


async def test_of_those_that_are_waited_for_the_tenant_goes_first_that_has_least() -> None:
    async with rooms() as it:
        flood = [it.run(Amount(memory=5), tenant="flood") for _ in range(6)]
        await turns()
        small = it.run(Amount(memory=5), tenant="small")
        await turns()
        flood[0].go.set()
        await until(lambda: small.inside)
        assert [run.inside for run in flood] == [False, True, False, False, False, False]


async def test_loads_ahead_wait_behind_all_that_are_waited_for() -> None:
    async with rooms() as it:
        first = it.run(Amount(memory=10))
        await turns()
        ahead = it.run(Amount(memory=5), EXPECTED)
        await turns()
        waited = it.run(Amount(memory=10))
        first.go.set()
        await until(lambda: waited.inside)
        assert not ahead.inside
        waited.go.set()
        await until(lambda: ahead.inside)


async def test_as_few_loads_ahead_as_are_needed_give_way_the_newest_first_and_none_in_vain() -> None:
    async with rooms() as it:
        busy = it.run(Amount(memory=4))
        ahead = [it.run(Amount(memory=2), HINTED) for _ in range(3)]
        await turns()
        it.run(Amount(memory=2))
        await turns()
        assert [run.inside for run in ahead] == [True, True, False]
        with pytest.raises(NoRoomError):
            await ahead[2].task
        it.run(Amount(memory=9))
        await turns()
        assert [run.inside for run in ahead] == [True, True, False], "what is waited for keeps its room: it would be in vain"
        busy.go.set()
        await turns()
        assert [run.inside for run in ahead] == [True, True, False]


async def test_what_makes_its_image_gives_no_way() -> None:
    async with rooms() as it:
        builds = it.run(Amount(memory=5), image=8)
        await turns()
        builds.go.set()
        waits = it.run(Amount(memory=5), HINTED, image=8)
        await turns()
        waits.go.set()
        await turns()
        it.clock.now_s += 100
        request = it.run(Amount(memory=10))
        await until(lambda: request.inside)
        assert not builds.task.exception()
        assert not waits.task.exception()


async def test_who_gives_way_while_it_is_cancelled_is_cancelled() -> None:
    async with rooms() as it:
        ahead = it.run(Amount(memory=10), HINTED)
        await turns()
        request = it.run(Amount(memory=10))
        await asyncio.sleep(0)
        ahead.task.cancel()
        await until(lambda: request.inside)
        assert ahead.task.cancelled()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "ahead", "go", "cancel", "urge", "calm", "hang"]),
        st.integers(0, 9),
        st.integers(0, 14),
        st.integers(0, 130),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_whatever_comes_the_room_suffices_and_everybody_has_some_in_the_end(steps: list[tuple[str, int, int, int]]) -> None:
    asyncio.run(at_random(steps))


async def at_random(steps: list[tuple[str, int, int, int]]) -> None:
    async with rooms() as it:
        for what, number, memory, disk in steps:
            run = it.runs[number % len(it.runs)] if it.runs else None
            match what, run:
                case (("begin" | "ahead"), _):
                    urgency = WAITED if what == "begin" else HINTED
                    it.run(Amount(memory, disk), urgency, tenant="xyz"[number % 3], image=memory)
                case "go", Run():
                    run.go.set()
                case "cancel", Run():
                    it.room.ends(run.ticket)
                    run.task.cancel()
                case (("urge" | "calm"), Run()):
                    run.ticket.urgency = WAITED if what == "urge" else EXPECTED
                    it.room.settle()
                case "hang", Run():
                    it.clock.now_s += 10
                    it.room.settle()
            await asyncio.sleep(0)
            assert it.room.held.fits(CAPACITY)
        for run in it.runs:
            run.go.set()
        done, late = await asyncio.wait([run.task for run in it.runs], timeout=60) if it.runs else (set(), set())
        assert not late
        for task in done:
            assert task.cancelled() or isinstance(task.exception(), NoRoomError | type(None)), task
