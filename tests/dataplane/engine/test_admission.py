"""Who may queue."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.engine.admission import _WARM_UP_STEPS as WARM_UP
from dataplane.engine.limits import Prices
from dataplane.engine.scheduler import Scheduler
from tests.dataplane.engine.driving import Loop, add, make, submit
from veneer.errors import ResourceExhaustedError


def test_each_tenant_has_a_bound_of_its_own() -> None:
    scheduler = make(max_waiting_per_tenant=2)
    for i in range(2):
        add(scheduler, submit(f"x{i}", tenant="x"))
    with pytest.raises(ResourceExhaustedError, match="of the tenant") as caught:
        add(scheduler, submit("x2", tenant="x"))
    assert caught.value.retry_after_s is not None
    add(scheduler, submit("y0", tenant="y"))
    Loop(scheduler).run()
    add(scheduler, submit("x2", tenant="x"))


def test_the_whole_queue_has_a_bound() -> None:
    scheduler = make(max_waiting=3)
    for i in range(3):
        add(scheduler, submit(f"r{i}", tenant=f"t{i}"))
    with pytest.raises(ResourceExhaustedError, match="at most 3"):
        add(scheduler, submit("r3", tenant="t3"))


def run_steps(scheduler: Scheduler, number: int, *, seconds: float) -> None:
    """Runs steps whose time is known."""
    for _ in range(number):
        plan = scheduler.schedule()
        assert plan is not None
        rows = len(plan.decodes) + sum(rows.sampling is not None for rows in plan.rows)
        scheduler.commit(plan, [7] * rows, seconds=seconds)


def fill(scheduler: Scheduler, number: int, *, prefix: str = "fill", **fields: Any) -> None:
    for i in range(number):
        add(scheduler, submit(f"{prefix}{i}", 16, max_tokens=1, **fields))


def test_a_wait_longer_than_the_deadline_is_refused_with_the_time_to_come_back() -> None:
    scheduler = make(max_sequences=1, num_pages=64, max_waiting=2000)
    fill(scheduler, WARM_UP + 1)
    run_steps(scheduler, WARM_UP, seconds=1.0)  # 16 tokens a second
    run_steps(scheduler, 1, seconds=1.0)
    fill(scheduler, 4, prefix="r", deadline_s=60.0)
    with pytest.raises(ResourceExhaustedError, match="deadline") as caught:
        add(scheduler, submit("late", 16, deadline_s=2.0))
    assert caught.value.retry_after_s == pytest.approx(2.0, abs=0.5)
    add(scheduler, submit("patient", 16, deadline_s=10.0))
    add(scheduler, submit("timeless", 16))
    add(scheduler, submit("other", 16, deadline_s=0.01, tenant="u"), 0.0)


def test_nothing_is_refused_for_its_deadline_while_no_speed_is_known() -> None:
    scheduler = make()
    for i in range(20):
        add(scheduler, submit(f"r{i}", 16, deadline_s=0.001))
    assert scheduler.num_waiting == 20


@pytest.mark.parametrize("num_cold", [1, 5, WARM_UP - 1])
def test_the_first_steps_of_an_engine_are_no_reason_to_refuse(num_cold: int) -> None:
    scheduler = make(max_sequences=1, num_pages=64, max_waiting=2000)
    fill(scheduler, WARM_UP + 2)
    run_steps(scheduler, num_cold, seconds=2.0)  # 8 tokens a second
    fill(scheduler, 40, prefix="burst", deadline_s=10.0)
    run_steps(scheduler, WARM_UP - num_cold, seconds=0.01)  # 1,600
    fill(scheduler, 40, prefix="more", deadline_s=10.0)
    with pytest.raises(ResourceExhaustedError, match="deadline"):
        add(scheduler, submit("late", 16, deadline_s=0.1))


def test_steps_with_little_to_do_are_no_reason_to_refuse_a_burst() -> None:
    scheduler = make(max_sequences=4, num_pages=64, max_step_tokens=64, max_waiting=2000)
    fill(scheduler, 4 * (WARM_UP + 1), deadline_s=60.0)
    run_steps(scheduler, WARM_UP + 1, seconds=0.04)  # 64 tokens each: 1,600 a second
    for i in range(100):  # 25 a second, and nobody waits
        add(scheduler, submit(f"alone{i}", 1, max_tokens=8))
        run_steps(scheduler, 8, seconds=0.04)
    fill(scheduler, 40, prefix="burst", deadline_s=1.0)  # 640 tokens, and answers of 8
    with pytest.raises(ResourceExhaustedError, match="deadline"):
        fill(scheduler, 60, prefix="more", deadline_s=1.0)


def test_a_request_that_runs_alone_after_the_start_is_no_evidence_against_those_after_it() -> None:
    scheduler = make(max_sequences=4, num_pages=64, max_step_tokens=64, max_waiting=2000)
    for i in range(WARM_UP):
        add(scheduler, submit(f"alone{i}", 1, max_tokens=8))
        run_steps(scheduler, 8, seconds=0.5)
    fill(scheduler, 100, deadline_s=10.0)
    assert scheduler.num_waiting == 100


def test_an_engine_that_became_slow_is_believed_after_a_while() -> None:
    scheduler = make(max_sequences=1, num_pages=64, max_waiting=2000)
    fill(scheduler, 1000)
    run_steps(scheduler, WARM_UP, seconds=0.01)
    quick = scheduler._admission.estimate_s(submit("next"))
    run_steps(scheduler, 900, seconds=1.0)
    assert scheduler._admission.estimate_s(submit("next")) > 5 * quick


def test_the_estimate_is_the_tenants_own_queue_over_its_part_of_the_best_speed_of_late() -> None:
    scheduler = make(prices=Prices(prefill_token=1, decode_token=2))
    admission = scheduler._admission
    add(scheduler, submit("first", 20))
    assert admission.estimate_s(submit("next")) == 0, "no speed is known"
    for _ in range(WARM_UP):
        admission.observe(100, 1.0, is_full=True)
    admission.observe(1, 1.0, is_full=True)
    admission.observe(1, 1.0, is_full=False)
    speed = 100 * 0.995
    assert admission.estimate_s(submit("next")) == pytest.approx(20 / speed), "a step with little to do says nothing"
    admission.finished(20)
    assert admission.estimate_s(submit("next")) == pytest.approx((20 + 1 * 2) / speed), "answers are about as long as of late"
    add(scheduler, submit("other", 30, tenant="u", weight=3))
    assert admission.estimate_s(submit("next")) == pytest.approx(4 * (20 + 1 * 2) / speed), "one part of four is its own"
    assert admission.estimate_s(submit("next", tenant="new")) == 0
