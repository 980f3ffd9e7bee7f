"""Seats and pages of those that run, and giving way."""

from __future__ import annotations

import pytest

from tests.dataplane.engine.driving import FakeAdapters, Loop, assert_idle, expected, make, rows_of, submit


@pytest.mark.parametrize("lag", [0, 1])
def test_preemption_takes_the_newest_and_never_the_oldest(lag: int) -> None:
    scheduler = make(num_pages=8, max_sequences=3)
    loop = Loop(scheduler, lag=lag)
    for name in "abc":
        scheduler.add(submit(name, (ord(name), 1, 2, 3), max_tokens=20), 0.0)
    loop.run()
    assert list(loop.finished) == ["a", "b", "c"]
    starts = [(rows.ids[0], rows.start) for plan in loop.plans for rows in rows_of(plan) if rows.count > 1]
    assert sum(first == ord("a") for first, _ in starts) == 1
    assert sum(first == ord("c") for first, _ in starts) > 1, "the newest was recomputed"
    assert all(loop.outputs[name] == expected((ord(name), 1, 2, 3), 20, ()) for name in "abc")
    assert_idle(scheduler)


@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode", "in flight", "last"])
def test_an_abort_gives_everything_back_within_one_step(stage: str) -> None:
    adapters = FakeAdapters({"v1r3"})
    scheduler = make(adapters=adapters, max_step_tokens=4)
    loop = Loop(scheduler, lag=int(stage == "in flight"))
    turns: dict[str, int] = {"waiting": 0, "prefill": 1, "decode": 6, "in flight": 6, "last": 8}
    scheduler.add(submit("a", 16, version="v1r3", max_tokens=5), 0.0)
    for _ in range(turns[stage]):
        loop.turn()
    assert scheduler.abort("a") or stage == "last"
    loop.turn()
    loop.turn()
    assert_idle(scheduler, adapters)
    assert not scheduler.abort("a")


def test_a_paused_sequence_keeps_its_pages_and_goes_on_where_it_was() -> None:
    scheduler = make()
    loop = Loop(scheduler)
    scheduler.add(submit("slow", max_tokens=12), 0.0)
    scheduler.add(submit("fast", max_tokens=12), 0.0)
    loop.turn()
    loop.turn()
    scheduler.pause("slow", paused=True)
    seen = len(loop.outputs["slow"])
    loop.run()
    assert list(loop.finished) == ["fast"]
    assert len(loop.outputs["slow"]) == seen
    assert scheduler.num_running == 1
    assert scheduler.num_pages_used > 0
    num_plans = len(loop.plans)
    scheduler.pause("slow", paused=False)
    loop.run()
    assert loop.outputs["slow"] == expected((1, 2, 3, 4), 12, ())
    assert all(rows.start > 0 for plan in loop.plans[num_plans:] for rows in rows_of(plan)), "nothing was computed again"
    assert_idle(scheduler)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_paused_sequence_gives_its_pages_to_others_that_lack_some(lag: int) -> None:
    scheduler = make(num_pages=8)
    loop = Loop(scheduler, lag=lag)
    scheduler.add(submit("slow", 12, max_tokens=15), 0.0)
    for _ in range(3):
        loop.turn()
    scheduler.add(submit("fast", 4, max_tokens=26), 0.0)
    loop.turn()
    scheduler.pause("slow", paused=True)
    loop.run()
    assert loop.finished == {"fast": "length"}
    scheduler.pause("slow", paused=False)
    loop.run()
    assert loop.outputs["slow"] == expected(tuple(range(1, 13)), 15, ())
    assert_idle(scheduler)


def test_a_paused_sequence_that_gave_way_is_in_nobodys_way_and_can_end() -> None:
    scheduler = make(num_pages=8)
    loop = Loop(scheduler)
    scheduler.add(submit("slow", 12, max_tokens=15), 0.0)
    for _ in range(3):
        loop.turn()
    scheduler.add(submit("fast", 4, max_tokens=26), 0.0)
    loop.turn()
    scheduler.pause("slow", paused=True)
    loop.run()
    assert loop.finished == {"fast": "length"}
    assert (scheduler.num_waiting, scheduler.num_pages_used) == (1, 0)
    assert list(scheduler._tenants.active) == []
    scheduler.abort("slow")
    assert_idle(scheduler)
