"""Who may queue."""

from __future__ import annotations

import pytest

from dataplane.engine.limits import Prices
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


def test_a_wait_longer_than_the_deadline_is_refused_with_the_time_to_come_back() -> None:
    scheduler = make(max_sequences=1, num_pages=64)
    add(scheduler, submit("first", 16, max_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, [7], seconds=1.0)  # 16 tokens a second
    for i in range(4):
        add(scheduler, submit(f"r{i}", 16, max_tokens=1, deadline_s=60.0))
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


def test_the_estimate_is_the_tenants_own_queue_over_its_part_of_the_best_speed_of_late() -> None:
    scheduler = make(prices=Prices(prefill_token=1, decode_token=2))
    admission = scheduler._admission
    add(scheduler, submit("first", 20))
    assert admission.estimate_s(submit("next")) == 0, "no speed is known"
    admission.observe(100, 1.0)
    admission.observe(1, 1.0)
    speed = 100 * 0.995
    assert admission.estimate_s(submit("next")) == pytest.approx(20 / speed), "a step with little to do says nothing"
    admission.finished(20)
    assert admission.estimate_s(submit("next")) == pytest.approx((20 + 1 * 2) / speed), "answers are about as long as of late"
    add(scheduler, submit("other", 30, tenant="u", weight=3))
    assert admission.estimate_s(submit("next")) == pytest.approx(4 * (20 + 1 * 2) / speed), "one part of four is its own"
    assert admission.estimate_s(submit("next", tenant="new")) == 0
