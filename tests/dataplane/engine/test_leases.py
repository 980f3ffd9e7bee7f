"""Leases of running requests."""

from __future__ import annotations

from tests.dataplane.engine.driving import FakeAdapters, Loop, make, submit


def test_rank_rows_of_running_adapters_stay_within_the_limit() -> None:
    adapters = FakeAdapters({"v1r40", "v2r16", "v3r17"})
    scheduler = make(adapters=adapters, max_step_rank_rows=64)
    loop = Loop(scheduler)
    for i, version in enumerate(["v1r40", "v3r17", "v2r16", "v1r40"]):
        scheduler.add(submit(str(i), version=version), 0.0)
    loop.turn()
    assert sorted(adapters.leases.values()) == ["v1r40", "v1r40", "v2r16"]
    loop.run()
    assert len(loop.finished) == 4


def test_an_adapter_of_the_largest_rank_runs_alone_however_small_the_limit() -> None:
    adapters = FakeAdapters({"v1r64", "v2r16"})
    scheduler = make(adapters=adapters, max_step_rank_rows=64)
    loop = Loop(scheduler)
    for i, version in enumerate(["v2r16", "v1r64", "v2r16"]):
        scheduler.add(submit(str(i), version=version), 0.0)
    most = 0
    while loop.turn():
        most = max(most, scheduler._leases.num_rank_rows)
    assert (most, len(loop.finished)) == (64, 3)


def test_what_was_computed_under_a_lease_is_told_at_its_end_so_that_a_quantum_can_be_counted() -> None:
    adapters = FakeAdapters({"v1r3"})
    scheduler = make(adapters=adapters)
    loop = Loop(scheduler)
    scheduler.add(submit("a", 6, version="v1r3", max_tokens=4), 0.0)
    scheduler.add(submit("base", 6, max_tokens=4), 0.0)
    loop.run()
    assert adapters.served == 6 + 3, "the last token is not computed on"
