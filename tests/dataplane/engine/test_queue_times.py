"""How long requests waited, and what for."""

from __future__ import annotations

from dataplane.engine.queue_times import BOUNDS_S, QueueTimes
from tests.dataplane.engine.driving import FakeAdapters, Loop, add, make, submit


def test_waits_are_counted_by_bucket() -> None:
    times = QueueTimes()
    times.observe([10.0, 10.0005, 4.0], now=10.001)
    times.observe([0.0], now=1000.0)
    assert len(times.counts) == len(BOUNDS_S) + 1
    assert (sum(times.counts), times.counts[-1]) == (4, 1)
    assert times.counts[BOUNDS_S.index(7.5)] == 1
    assert times.total_s == 0.001 + 0.0005 + 6.001 + 1000


def test_a_request_is_told_once_when_it_first_runs_also_after_it_gave_way() -> None:
    scheduler = make(num_pages=8, max_sequences=2)
    loop = Loop(scheduler)
    for i in range(3):
        scheduler.add(submit(f"{i}", (i, 1, 2, 3), max_tokens=20), float(i))
    loop.turn()
    assert scheduler.take_admitted() == [0.0, 1.0]
    loop.run()
    assert sum(rows.start == 0 for plan in loop.plans for rows in plan.rows) > 3, "somebody was preempted"
    assert scheduler.take_admitted() == [2.0]


def test_everybody_who_waits_is_counted_under_one_reason() -> None:
    adapters = FakeAdapters({"v1r40", "v2r40"})
    adapters.starved.add("v9r3")
    scheduler = make(num_pages=14, max_sequences=3, max_step_tokens=64, adapters=adapters)
    loop = Loop(scheduler)
    add(scheduler, submit("runs", 24, version="v1r40", max_tokens=8))
    loop.turn()
    for name, version in (("loads", "v8r3"), ("no room", "v9r3"), ("no rows", "v2r40")):
        add(scheduler, submit(name, version=version))
    add(scheduler, submit("no pages", 30, tenant="u", max_tokens=1))
    loop.turn()
    reasons = scheduler.waiting_by_reason()
    assert reasons == {"pages": 1, "rank_rows": 1, "arena": 1, "budget": 0, "image": 1, "paused": 0, "capacity": 0, "turn": 0}
    for i in range(4):
        add(scheduler, submit(f"more{i}", 2, tenant="v", max_tokens=9))
    loop.turn()
    loop.turn()
    reasons = scheduler.waiting_by_reason()
    assert (scheduler.num_running, reasons["capacity"] + reasons["pages"], reasons["image"]) == (3, 5, 1)
    assert sum(reasons.values()) == scheduler.num_waiting == 6
