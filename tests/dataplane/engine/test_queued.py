"""The next step is launched before the one in front of it is waited for."""

from __future__ import annotations

from typing import Any

from dataplane.engine.plan import Plan
from dataplane.engine.queued import QueuedStepping


class Log:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def launch(self, plan: Plan) -> int:
        self.calls.append(f"launch {plan.num_tokens}")
        return plan.num_tokens

    def finish(self, launched: int) -> list[Any]:
        self.calls.append(f"finish {launched}")
        return [launched]


def plan(number: int) -> Plan:
    return Plan((), number, frozenset())


def test_a_turn_launches_its_plan_and_returns_the_step_before() -> None:
    log = Log()
    stepping = QueuedStepping(log)
    done = [stepping.turn(plan(1)), stepping.turn(plan(2)), stepping.turn(None), stepping.turn(None), stepping.turn(plan(3))]
    assert log.calls == ["launch 1", "launch 2", "finish 1", "finish 2", "launch 3"]
    assert [None if one is None else (one.plan.num_tokens, one.results) for one in done] == [None, (1, [1]), (2, [2]), None, None]


def test_a_step_counts_from_the_end_of_the_one_before(monkeypatch: Any) -> None:
    times = iter([1.0, 5.0, 8.0, 20.0, 30.0, 33.0])
    monkeypatch.setattr("dataplane.engine.queued.time.monotonic", lambda: next(times))
    stepping = QueuedStepping(Log())
    stepping.turn(plan(1))  # launched at 1
    first = stepping.turn(plan(2))  # launched at 5, the first ended at 8
    second = stepping.turn(None)  # ended at 20
    stepping.turn(plan(3))  # launched at 30
    third = stepping.turn(None)  # ended at 33
    assert [done.seconds for done in (first, second, third) if done] == [7.0, 12.0, 3.0]


def test_drive_runs_the_loop_in_the_callers_thread() -> None:
    ran: list[int] = []
    QueuedStepping(Log()).drive(lambda: ran.append(1))
    assert ran == [1]
