"""Steps in the loop's thread, and beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from dataplane.engine.plan import Plan
from dataplane.engine.stepping import Done, OverlappedStepping, SerialStepping

PLANS = [Plan((), number, frozenset()) for number in (1, 2, 3)]


@pytest.mark.parametrize(("make", "lag"), [(SerialStepping, 0), (OverlappedStepping, 1)])
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
    stepping = OverlappedStepping(lambda plan: [plan.num_tokens] if may_end.wait(20) else [])

    def loop() -> None:
        assert stepping.turn(PLANS[0]) is None, "it returned although the step waits for this thread"
        may_end.set()
        done = stepping.turn(None)
        assert done is not None
        assert done.results == [1]

    stepping.drive(loop)


@pytest.mark.parametrize("make", [SerialStepping, OverlappedStepping])
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
    stepping = OverlappedStepping(lambda plan: ended.append(plan) or [])  # type: ignore[func-returns-value]
    stepping.drive(lambda: stepping.turn(PLANS[0]) and None)
    assert ended == PLANS[:1]
