"""Limits of tenants in rank rows and bytes of the arena: what is beyond waits in its own line, or is refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from dataplane.engine.messages import Submit
from dataplane.engine.sequence import Phase
from kernels.rows import aligned_rank
from tests.dataplane.engine.driving import ArenaAdapters, FakeAdapters, Loop, add, assert_idle, make, submit
from veneer.errors import FailedPreconditionError


def ask(name: str, version: str | None, **fields: Any) -> Submit:
    rank = 0 if version is None else int(version.split("r")[1])
    return submit(name, version=version, rank=rank, **fields)


class Watching(Loop):
    """Fails as soon as a tenant's running adapters exceed its limits, or a copy charged to it does."""

    limits: dict[str, tuple[int, int]]
    num_running: int = 0

    def turn(self) -> bool:
        ran = super().turn()
        running: dict[str, dict[str, int]] = {}
        for sequence in self.scheduler._requests._sequences.values():
            if sequence.lease is not None:
                running.setdefault(sequence.submit.tenant, {})[sequence.lease.version] = sequence.lease.rank
        for tenant, (max_rows, max_units) in self.limits.items():
            rows = sum(map(aligned_rank, running.get(tenant, {}).values()))
            assert not max_rows or rows <= max_rows, (tenant, rows)
            adapters = self.scheduler._leases._adapters
            if max_units and isinstance(adapters, ArenaAdapters):
                assert adapters.residency._charges.booked(tenant) <= max_units
        return ran


def watch(scheduler: Any, **limits: tuple[int, int]) -> Watching:
    loop = Watching(scheduler)
    loop.limits = limits
    return loop


def test_adapters_beyond_the_limit_of_rank_rows_wait_and_nobody_else_does() -> None:
    adapters = FakeAdapters({"ar8", "br16", "cr8", "dr8"})
    scheduler = make(adapters=adapters, max_sequences=8, max_step_tokens=64, max_step_rank_rows=256)
    for name in ("ar8", "br16", "cr8"):
        add(scheduler, ask(name, name, tenant="x", max_rank_rows=32))
    add(scheduler, ask("more-a", "ar8", tenant="x", max_rank_rows=32))
    add(scheduler, ask("base", None, tenant="x", max_rank_rows=32))
    add(scheduler, ask("other", "dr8", tenant="y"))
    loop = watch(scheduler, x=(32, 0))
    loop.turn()
    running = {sequence.request_id for sequence in scheduler._seating.running}
    assert running == {"ar8", "br16", "more-a", "base", "other"}
    assert scheduler.waiting_by_reason()["budget"] == 1
    loop.run()
    assert set(loop.finished) == {"ar8", "br16", "cr8", "more-a", "base", "other"}
    assert_idle(scheduler, adapters)


def test_what_can_never_run_is_refused_with_what_it_needs_is_allowed_and_is_used() -> None:
    scheduler = make(adapters=FakeAdapters({"ar8", "br64"}), max_sequences=8)
    add(scheduler, ask("small", "ar8", tenant="x", max_rank_rows=48))
    loop = watch(scheduler, x=(48, 0))
    loop.turn()
    with pytest.raises(FailedPreconditionError, match="takes 64 rank rows; its tenant may have 48 and uses 16"):
        add(scheduler, ask("large", "br64", tenant="x", max_rank_rows=48))
    add(scheduler, ask("others", "br64", tenant="y", max_rank_rows=64))
    loop.run()
    assert set(loop.finished) == {"small", "others"}


def test_an_image_larger_than_the_tenants_part_of_the_arena_is_refused_with_the_numbers() -> None:
    adapters = ArenaAdapters(9, versions={"ar8": 2, "br8": 4})
    scheduler = make(adapters=adapters, max_sequences=8)
    add(scheduler, ask("small", "ar8", tenant="x", max_arena_bytes=3))
    loop = watch(scheduler, x=(0, 3))
    for _ in range(4):
        loop.turn()
    with pytest.raises(FailedPreconditionError, match="takes 4 bytes on the device; its tenant may have 3 and uses 2"):
        add(scheduler, ask("large", "br8", tenant="x", max_arena_bytes=3))
    loop.run()
    assert set(loop.finished) == {"small"}


def test_a_limit_that_falls_below_what_waits_ends_it() -> None:
    scheduler = make(adapters=FakeAdapters({"ar8", "br16"}), max_sequences=8)
    add(scheduler, ask("first", "ar8", tenant="x", max_rank_rows=32, max_tokens=20))
    loop = watch(scheduler)
    loop.turn()
    add(scheduler, ask("second", "cr32", tenant="x", max_rank_rows=32))
    loop.turn()
    add(scheduler, ask("third", "ar8", tenant="x", max_rank_rows=16))
    loop.run()
    assert loop.failed == {"second": "FAILED_PRECONDITION"}
    assert set(loop.finished) == {"first", "third"}
    assert_idle(scheduler)


def test_requests_that_pass_one_beyond_the_budget_do_so_a_bounded_number_of_times() -> None:
    scheduler = make(128, adapters=FakeAdapters({"ar16", "br16"}), max_passes=5)
    loop = watch(scheduler, x=(16, 0))
    add(scheduler, ask("a", "ar16", tenant="x", max_rank_rows=16, max_tokens=20))
    add(scheduler, ask("b", "br16", tenant="x", max_rank_rows=16))
    count = 0
    for turn in range(300):
        if "b" in loop.finished:
            break
        if turn % 8 == 0:  # a stream without end of requests for the one that runs
            add(scheduler, ask(f"a{count}", "ar16", tenant="x", max_rank_rows=16, max_tokens=20))
            count += 1
        loop.turn()
    assert "b" in loop.finished
    assert count > 5, "some did pass"
    loop.run()
    assert_idle(scheduler)


def test_nobody_is_preempted_for_a_tenant_that_waits_for_its_own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(adapters=FakeAdapters({"ar16", "br16"}), max_sequences=4, num_pages=128)
    preempted: list[str] = []
    original = scheduler._seating.preempt

    def preempt(sequence: Any) -> None:
        preempted.append(sequence.request_id)
        original(sequence)

    monkeypatch.setattr(scheduler._seating, "preempt", preempt)
    add(scheduler, ask("a", "ar16", tenant="x", max_rank_rows=16, max_tokens=25))
    for number in range(6):
        add(scheduler, ask(f"y{number}", None, tenant="y", max_tokens=20))
    loop = watch(scheduler, x=(16, 0))
    loop.turn()
    for number in range(3):
        add(scheduler, ask(f"b{number}", "br16", tenant="x", max_rank_rows=16))
    while "a" not in loop.finished:
        assert preempted == []
        loop.turn()
    loop.run()
    assert len(loop.finished) == 10


def test_a_tenant_that_waits_for_its_own_budget_banks_no_credit() -> None:
    scheduler = make(adapters=FakeAdapters({"ar16", "br16"}), max_sequences=8, num_pages=256, max_waiting=400)
    loop = watch(scheduler, x=(16, 0))
    add(scheduler, ask("a", "ar16", tenant="x", max_rank_rows=16, max_tokens=27))
    add(scheduler, ask("b", "br16", tenant="x", max_rank_rows=16, max_tokens=1))
    for number in range(160):
        add(scheduler, ask(f"y{number}", None, tenant="y", max_tokens=2))
    while "a" not in loop.finished:
        loop.turn()
    served = len([name for name in loop.finished if name.startswith("y")])
    for number in range(60):
        add(scheduler, ask(f"x{number}", None, tenant="x", max_rank_rows=16, max_tokens=2))
    while len([name for name in loop.finished if name.startswith("x")]) < 20:
        loop.turn()
    since = len([name for name in loop.finished if name.startswith("y")]) - served
    assert since >= 14, "both go on in turns from then on"


@pytest.mark.parametrize("seed", range(12))
def test_within_all_limits_everything_ends_whatever_is_asked_for(seed: int) -> None:
    draw = random.Random(seed)
    versions = {"ar1": 1, "br8": 2, "cr16": 2, "dr17": 3, "er32": 3, "fr48": 4, "gr4": 1, "hr16": 5}
    adapters = ArenaAdapters(9, versions=versions, max_slots=4)
    scheduler = make(64, adapters=adapters, max_sequences=4, max_step_rank_rows=96, max_context=32, max_passes=8)
    limits = {"x": (32, 4), "y": (0, 3), "z": (48, 0), "w": (0, 0)}
    loop = watch(scheduler, **limits)
    asked: dict[str, Submit] = {}
    refused = set()
    numbers = itertools.count()
    for _ in range(400):
        if len(asked) < 80 and draw.random() < 0.5:
            tenant, version = draw.choice(list(limits)), draw.choice([None, *versions])
            rows, units = limits[tenant]
            request = ask(
                f"r{next(numbers)}", version, tenant=tenant, max_rank_rows=rows, max_arena_bytes=units,
                max_tokens=draw.choice([1, 4, 12]), weight=1 + (tenant == "y"), prompt=draw.choice([1, 5, 14]),
            )  # fmt: skip
            asked[request.request_id] = request
            try:
                add(scheduler, request)
            except FailedPreconditionError:
                refused.add(request.request_id)
            else:
                if version is not None:
                    adapters.want(version, tenant, weight=request.weight, max_bytes=units)
        if draw.random() < 0.03 and scheduler.request_ids:
            name = draw.choice(scheduler.request_ids)
            scheduler.abort(name)
            asked.pop(name)
        loop.turn()
        adapters.residency.take_freed()
    loop.run(max_turns=4000)
    for name, request in asked.items():
        rows, units = limits[request.tenant]
        too_large = request.version is not None and (
            (rows and aligned_rank(request.rank) > rows) or (units and versions[request.version] > units)
        )
        assert (name in refused) == bool(too_large)
        assert (name in loop.finished) != (name in refused)
    assert loop.failed == {}
    assert_idle(scheduler)
    assert adapters.num_leases == 0
    assert all(sequence.phase is not Phase.WAITING for sequence in scheduler._requests._sequences.values())


def test_a_request_for_a_copy_that_its_tenant_uses_but_nobody_pays_for_any_more_waits_and_ends() -> None:
    scheduler = make(adapters=ArenaAdapters(9, versions={"ar8": 2, "br8": 2}), max_sequences=8, num_pages=128)
    loop = watch(scheduler)
    add(scheduler, ask("a", "ar8", tenant="x", max_arena_bytes=2, max_tokens=27))
    for _ in range(4):
        loop.turn()
    add(scheduler, ask("other", "ar8", tenant="y", max_tokens=8))  # now y pays
    for _ in range(2):
        loop.turn()
    add(scheduler, ask("b", "br8", tenant="x", max_arena_bytes=2, max_tokens=27))  # what x may hold is b
    while "other" not in loop.finished:
        loop.turn()
    assert not {"a", "b"} & set(loop.finished)
    add(scheduler, ask("more-a", "ar8", tenant="x", max_arena_bytes=2, max_tokens=2))
    loop.turn()
    assert scheduler.waiting_by_reason()["budget"] == 1
    loop.run(400)
    assert set(loop.finished) == {"a", "other", "b", "more-a"}
