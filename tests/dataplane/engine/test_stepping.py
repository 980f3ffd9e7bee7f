"""Steps in the loop's thread, and beside it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dataplane.engine.plan import Plan
from dataplane.engine.stepping import Done, OverlappedStepping, Run, SerialStepping

PLANS = [Plan((), number, frozenset()) for number in (1, 2, 3)]


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where whoever started the tests ignores it, as shells do in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def overlapped(run: Run, *, wake: Callable[[], None] = lambda: None) -> OverlappedStepping:
    return OverlappedStepping(run, wake=wake)


@pytest.mark.parametrize(("make", "lag"), [(SerialStepping, 0), (overlapped, 1)])
def test_every_step_runs_once_in_order_in_the_thread_that_drives(make: Callable[[Any], Any], lag: int) -> None:
    threads = set()

    def run(plan: Plan) -> list[Any]:
        threads.add(threading.get_ident())
        return [plan.num_tokens]

    stepping = make(run)
    done: list[Done | None] = []

    def loop() -> None:
        done.extend(stepping.turn(plan) for plan in (*PLANS, None, None))

    stepping.drive(loop)
    assert threads == {threading.get_ident()}
    assert done[:lag] == [None] * lag
    ran = [one for one in done if one is not None]
    assert [one.plan for one in done[lag : lag + 3] if one is not None] == PLANS
    assert [one.results for one in ran] == [[1], [2], [3]]
    assert all(one.seconds >= 0 for one in ran)


def test_overlapped_the_loop_goes_on_while_a_step_runs() -> None:
    may_end = threading.Event()
    stepping = overlapped(lambda plan: [plan.num_tokens] if may_end.wait(60) else [])

    def loop() -> None:
        assert stepping.turn(PLANS[0]) is None, "it returned although the step waits for this thread"
        may_end.set()
        done = stepping.turn(None)
        assert done is not None
        assert done.results == [1]

    stepping.drive(loop)


@pytest.mark.parametrize("make", [SerialStepping, overlapped])
def test_what_a_step_raises_is_raised_in_the_loop_and_what_the_loop_raises_ends_the_drive(make: Callable[[Any], Any]) -> None:
    def run(_step: Plan) -> list[Any]:
        raise ZeroDivisionError

    stepping = make(run)
    seen = []

    def loop() -> None:
        try:
            stepping.turn(PLANS[0])
            stepping.turn(None)
        except ZeroDivisionError as error:
            seen.append(error)
            raise

    with pytest.raises(ZeroDivisionError):
        stepping.drive(loop)
    assert len(seen) == 1


def test_a_loop_that_ends_while_a_step_runs_waits_for_it() -> None:
    ended = []
    stepping = overlapped(lambda plan: ended.append(plan) or [])  # type: ignore[func-returns-value]
    stepping.drive(lambda: stepping.turn(PLANS[0]) and None)
    assert ended == PLANS[:1]


@pytest.mark.usefixtures("interrupts")
def test_a_signal_that_ends_the_drive_ends_a_loop_that_waits_for_something_else() -> None:
    woken, ended, driver = threading.Event(), threading.Event(), threading.get_ident()
    stepping = overlapped(lambda _: [], wake=woken.set)

    def loop() -> None:
        signal.pthread_kill(driver, signal.SIGINT)
        try:
            assert woken.wait(60)
            stepping.turn(None)
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        stepping.drive(loop)
    assert ended.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "engine-loop"]


@pytest.mark.usefixtures("interrupts")
def test_a_signal_while_a_step_runs_is_raised_in_the_loop_that_waits_for_it() -> None:
    seen: list[BaseException] = []

    def run(_plan: Plan) -> list[Any]:
        signal.raise_signal(signal.SIGINT)
        return []

    stepping = overlapped(run)

    def loop() -> None:
        stepping.turn(PLANS[0])
        try:
            stepping.turn(None)
        except KeyboardInterrupt as error:
            seen.append(error)
            raise

    with pytest.raises(KeyboardInterrupt):
        stepping.drive(loop)
    assert len(seen) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "engine-loop"]
