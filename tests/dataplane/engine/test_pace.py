"""Steps that keep their time: the fit against steps of a known law, then what it does to chunks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.engine.pace import Pace
from dataplane.engine.plan import Plan
from tests.dataplane.engine.driving import Loop, add, assert_idle, expected, make, rows_of, submit


@given(
    fixed=st.floats(0.001, 0.05),
    each=st.floats(1e-5, 1e-3),
    works=st.lists(st.integers(1, 3000), min_size=30, max_size=30, unique=True),
)
def test_a_linear_law_is_learned(fixed: float, each: float, works: list[int]) -> None:
    pace = Pace(1.0)
    for work in works:
        pace.observe(work, fixed + each * work)
    for work in (1, 500, 3000):
        assert pace.predict(work) == pytest.approx(fixed + each * work, rel=0.1, abs=0.01)


def test_the_law_may_change_and_a_stall_turns_nothing_over() -> None:
    pace, draw = Pace(0.1), random.Random(1)
    for each in (1e-4, 3e-4):
        for _ in range(300):
            work = draw.randrange(50, 1000)
            pace.observe(work, 0.01 + each * work)
        assert pace.predict(500) == pytest.approx(0.01 + each * 500, rel=0.05)
    pace.observe(500, 30.0)
    assert pace.predict(500) < 0.5, "a process that was stopped for half a minute"
    for _ in range(50):
        work = draw.randrange(50, 1000)
        pace.observe(work, 0.01 + 3e-4 * work)
    assert pace.predict(500) == pytest.approx(0.16, rel=0.1)


def test_thousands_of_equal_steps_leave_an_estimate_that_one_other_step_does_not_upset() -> None:
    pace = Pace(0.1)
    for work in (128, 600, 400):
        pace.observe(work, 0.02 + 1e-4 * work)
    for step in range(5000):
        pace.observe(128, 0.0328 + 1e-4 * (step % 3 - 1))
    pace.observe(640, 0.084)
    assert pace.predict(640) == pytest.approx(0.084, rel=0.1)
    assert pace.predict(128) == pytest.approx(0.0328, rel=0.1)


def test_before_anything_is_known_nothing_is_bounded_and_a_page_always_fits() -> None:
    pace = Pace(0.01)
    assert pace.room_for(100, price=1.0, at_least=4, at_most=50) == 50
    for work in (10, 1000, 10, 1000):
        pace.observe(work, 1e-3 * work)
    assert pace.room_for(100, price=1.0, at_least=4, at_most=50) == 4
    assert pace.room_for(100, price=1.0, at_least=4, at_most=2) == 2


class TimedLoop(Loop):
    """A loop on a device whose steps take what a law says."""

    def seconds_of(self, plan: Plan) -> float:
        num_single = sum(rows.count == 1 for rows in rows_of(plan))
        return 0.010 + 0.002 * num_single + 0.001 * (plan.num_tokens - num_single)


@pytest.mark.parametrize("max_step_ms", [0, 35])
def test_prompts_are_cut_so_that_those_who_decode_get_their_tokens_in_time(max_step_ms: int) -> None:
    scheduler = make(num_pages=512, max_sequences=8, max_step_tokens=128, max_context=512, max_step_ms=max_step_ms)
    loop = TimedLoop(scheduler)
    for i in range(2):
        add(scheduler, submit(f"talks{i}", 4, max_tokens=100, tenant="a"))
    for _ in range(5):
        loop.turn()
    for i in range(4):
        add(scheduler, submit(f"long{i}", tuple((i + j) % 50 for j in range(200)), max_tokens=2, tenant="b"))
    loop.run()
    decoding = [loop.seconds_of(plan) for plan in loop.plans if any(rows.count == 1 for rows in rows_of(plan))]
    if not max_step_ms:
        assert max(decoding) > 0.1
    else:
        assert sum(seconds > 0.0365 for seconds in decoding) <= 1, "the first, before the price of a prompt is known"
        assert max(decoding) < 0.07
        assert sum(seconds > 0.03 for seconds in decoding) > 20, "the time is used"
    for i in range(4):
        assert loop.outputs[f"long{i}"] == expected(tuple((i + j) % 50 for j in range(200)), 2, ())
    assert_idle(scheduler)


def test_a_limit_below_every_step_leaves_prompts_a_page_a_step() -> None:
    scheduler = make(num_pages=512, max_sequences=4, max_step_tokens=64, max_context=512, max_step_ms=1)
    loop = TimedLoop(scheduler)
    add(scheduler, submit("talks", 4, max_tokens=60))
    for _ in range(4):
        loop.turn()
    add(scheduler, submit("long", 100, max_tokens=1))
    num_before = len(loop.plans)
    loop.run()
    chunks = [rows.count for plan in loop.plans[num_before:] for rows in plan.rows if rows.count > 1]
    assert chunks == [4] * 25
    assert set(loop.finished) == {"talks", "long"}
