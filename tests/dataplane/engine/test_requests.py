"""Requests that have not ended, and their deadlines."""

from __future__ import annotations

import gc

from dataplane.engine.messages import Failed
from dataplane.engine.sequence import Sequence
from tests.dataplane.engine.driving import FakeAdapters, Loop, assert_idle, make, submit


def test_an_expired_request_fails_and_is_never_prefilled() -> None:
    scheduler = make(max_sequences=1)
    loop = Loop(scheduler)
    scheduler.add(submit("runs", deadline_s=5.0, max_tokens=10), 0.0)
    scheduler.add(submit("waits", deadline_s=1.0), 0.0)
    loop.turn()
    assert scheduler.next_deadline == 1.0
    assert [(failed.request_id, failed.status) for failed in scheduler.expire(1.0)] == [("waits", "DEADLINE_EXCEEDED")]
    loop.turn()
    assert [failed.request_id for failed in scheduler.expire(5.5)] == ["runs"]
    loop.run()
    assert_idle(scheduler)
    assert "waits" not in loop.outputs


def test_failing_a_version_ends_its_waiting_requests_only() -> None:
    adapters = FakeAdapters({"v1r3"})
    scheduler = make(adapters=adapters)
    loop = Loop(scheduler)
    scheduler.add(submit("runs", version="v1r3", max_tokens=9), 0.0)
    loop.turn()
    adapters.resident.clear()
    scheduler.add(submit("waits", version="v1r3"), 0.0)
    scheduler.add(submit("other", version="v2r3"), 0.0)
    failed = scheduler.fail_waiting("v1r3", status="UNAVAILABLE", message="no image")
    assert failed == [Failed("waits", "UNAVAILABLE", "no image")]
    assert scheduler.request_ids == ("runs", "other")
    scheduler.abort("other")
    assert adapters.withdrawn == ["v1r3", "v1r3", "v2r3"], "with a lease, with a failure, with an end nobody waits any more"


def test_ended_requests_with_distant_deadlines_are_not_kept() -> None:
    scheduler = make()
    scheduler.add(submit("stays", deadline_s=5000.0), 0.0)
    for number in range(1000):
        scheduler.add(submit(f"r{number}", deadline_s=3600.0), 0.0)
        scheduler.abort(f"r{number}")
    kept = [entry for entry in gc.get_objects() if type(entry) is Sequence and entry.submit.deadline_s == 3600.0]
    assert len(kept) <= 100
    assert scheduler.next_deadline == 5000.0
