"""Who gives way: the arena's bytes, and that nobody within its share loses its oldest request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engine.sequence import Sequence
from tests.dataplane.engine.driving import ArenaAdapters, FakeAdapters, Loop, add, assert_idle, expected, make, submit

PROMPT = (7, 8, 9)


def watch(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """Returns the list that everybody who is preempted is put on."""
    gone: list[Sequence] = []
    seating = scheduler._seating
    real = seating.preempt

    def preempt(sequence: Sequence) -> None:
        gone.append(sequence)
        real(sequence)

    monkeypatch.setattr(seating, "preempt", preempt)
    return gone


@pytest.mark.parametrize("lag", [0, 1])
def test_a_load_below_its_tenants_share_takes_the_place_of_the_newest_of_the_tenant_most_above(
    lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = ArenaAdapters(4, versions={"v1r3": 1, "v2r3": 1, "v3r3": 2, "m1r3": 2})
    scheduler = make(num_pages=64, max_sequences=8, adapters=adapters, max_step_tokens=64)
    loop = Loop(scheduler, lag=lag)
    for i, version in enumerate(["v1r3", "v2r3", "v3r3", "v3r3", "v2r3"]):
        add(scheduler, submit(f"x{i}", (i, *PROMPT), tenant="x", version=version, max_tokens=24))
        for _ in range(4):
            loop.turn()
    assert scheduler.num_running == 5
    gone = watch(scheduler, monkeypatch)
    add(scheduler, submit("v", PROMPT, tenant="v", version="m1r3", max_tokens=2))
    for _ in range(12):
        loop.turn()
        assert "x0" not in {sequence.submit.request_id for sequence in gone}, "the oldest stays"
    assert loop.finished["v"] == "length"
    assert {sequence.submit.request_id for sequence in gone} >= {"x4", "x1"}, "all who used the newest one's adapter"
    loop.run()
    for i in range(5):
        assert loop.outputs[f"x{i}"] == expected((i, *PROMPT), 24, ())
    assert adapters.num_leases == 0
    assert_idle(scheduler)


def test_copies_that_nobody_uses_go_before_anybody_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = ArenaAdapters(3, versions={"v1r3": 1, "v2r3": 1, "v3r3": 1, "m1r3": 1})
    scheduler = make(num_pages=64, adapters=adapters)
    loop = Loop(scheduler)
    for version in ("v1r3", "v2r3", "v3r3"):
        add(scheduler, submit(version, PROMPT, tenant="x", version=version, max_tokens=1 if version == "v2r3" else 25))
    for _ in range(8):
        loop.turn()
    gone = watch(scheduler, monkeypatch)
    add(scheduler, submit("v", PROMPT, tenant="v", version="m1r3", max_tokens=2))
    for _ in range(8):
        loop.turn()
    assert loop.finished["v"] == "length"
    assert adapters.resident == {"v1r3", "v3r3", "m1r3"}
    assert gone == []


def test_a_tenant_at_its_share_waits_for_room_and_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = ArenaAdapters(4, versions={f"{tenant}{i}r3": 1 for tenant in "xy" for i in range(3)})
    scheduler = make(num_pages=64, max_sequences=8, adapters=adapters, max_step_tokens=64)
    loop = Loop(scheduler)
    for i in range(2):
        for tenant in "xy":
            add(scheduler, submit(f"{tenant}{i}", PROMPT, tenant=tenant, version=f"{tenant}{i}r3", max_tokens=20))
    for _ in range(6):
        loop.turn()
    assert scheduler.num_running == 4
    gone = watch(scheduler, monkeypatch)
    add(scheduler, submit("x2", PROMPT, tenant="x", version="x2r3"))
    for _ in range(10):
        loop.turn()
    assert gone == []
    loop.run()
    assert loop.finished["x2"] == "length"


def test_an_adapter_that_another_tenant_uses_too_is_not_taken_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = ArenaAdapters(3, versions={"v1r3": 1, "v2r3": 1, "both1r3": 1, "m1r3": 1})
    scheduler = make(num_pages=64, max_sequences=8, adapters=adapters, max_step_tokens=64)
    loop = Loop(scheduler)
    for i, (tenant, version) in enumerate([("x", "v1r3"), ("x", "v2r3"), ("y", "both1r3"), ("x", "both1r3")]):
        add(scheduler, submit(f"{tenant}{i}", PROMPT, tenant=tenant, version=version, max_tokens=25))
        for _ in range(3):
            loop.turn()
    gone = watch(scheduler, monkeypatch)
    add(scheduler, submit("v", PROMPT, tenant="v", version="m1r3", max_tokens=1))
    for _ in range(8):
        loop.turn()
    assert [sequence.submit.request_id for sequence in gone] == ["x1"]
    assert loop.finished["v"] == "length"


def test_the_adapter_of_a_tenants_oldest_request_stays_however_far_above_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = ArenaAdapters(4, versions={"v1r3": 3, "m1r3": 2})
    scheduler = make(num_pages=64, adapters=adapters)
    loop = Loop(scheduler)
    add(scheduler, submit("x", PROMPT, tenant="x", version="v1r3", max_tokens=20))
    for _ in range(4):
        loop.turn()
    gone = watch(scheduler, monkeypatch)
    add(scheduler, submit("v", PROMPT, tenant="v", version="m1r3"))
    for _ in range(40):
        loop.turn()
    assert list(loop.finished) == ["x", "v"]
    assert gone == []


def test_room_is_made_for_one_load_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {f"v{i}r3" for i in range(4)}
    adapters = FakeAdapters(set(versions))
    adapters.num_slots = 4
    scheduler = make(num_pages=64, max_sequences=8, adapters=adapters, max_step_tokens=64)
    loop = Loop(scheduler)
    for version in sorted(versions):
        add(scheduler, submit(version, PROMPT, tenant="x", version=version, max_tokens=25))
        loop.turn()
    adapters.starved.add("m1r3")
    gone = watch(scheduler, monkeypatch)
    add(scheduler, submit("v", PROMPT, tenant="v", version="m1r3"))
    adapters.weights["v"] = 1
    counts = []
    for _ in range(6):
        loop.turn()
        counts.append(len(gone))
    assert counts == [0, 0, 1, 1, 2, 2], "a load is waited for as long as a tenant may be kept waiting"


def test_a_paused_request_that_gives_way_keeps_no_adapter_on_the_device() -> None:
    adapters = ArenaAdapters(1, versions={"v1r3": 1, "v2r3": 1})
    scheduler = make(num_pages=8, adapters=adapters)
    loop = Loop(scheduler)
    scheduler.add(submit("slow", 12, version="v1r3", max_tokens=15), 0.0)
    for _ in range(5):
        loop.turn()
    scheduler.add(submit("fast", 4, max_tokens=26), 0.0)
    loop.turn()
    scheduler.pause("slow", paused=True)
    loop.run()
    assert adapters.num_leases == 0
    scheduler.add(submit("other", 4, version="v2r3"), 0.0)
    for _ in range(10):
        loop.turn()
    assert set(loop.finished) == {"fast", "other"}
    scheduler.pause("slow", paused=False)
    for _ in range(30):
        loop.turn()
    assert loop.outputs["slow"] == expected(tuple(range(1, 13)), 15, ())
    assert_idle(scheduler)


def test_a_request_whose_adapter_was_taken_and_whose_reader_is_slow_is_waited_for_by_no_load() -> None:
    adapters = ArenaAdapters(2, versions={"v1r3": 1, "v2r3": 1, "v3r3": 2, "m1r3": 1})
    scheduler = make(num_pages=64, max_sequences=8, adapters=adapters, max_step_tokens=64)
    loop = Loop(scheduler)
    for i, version in enumerate(["v1r3", "v2r3"]):
        add(scheduler, submit(f"x{i}", (i, *PROMPT), tenant="x", version=version, max_tokens=24))
        for _ in range(4):
            loop.turn()
    add(scheduler, submit("y", PROMPT, tenant="y", version="m1r3", max_tokens=6))
    while not scheduler._tenants.num_loading or "y" not in loop.outputs:
        assert loop.turn(), "the adapter of x1 is taken for y, and is asked for again"
    scheduler.pause("x1", paused=True)
    for _ in range(40):
        loop.turn()
    assert set(loop.finished) == {"x0", "y"}
    assert not adapters.residency.wanted()
    for name in ("v3r3", "v1r3"):
        add(scheduler, submit(name, PROMPT, tenant="x", version=name))
        for _ in range(10):
            loop.turn()
        assert loop.finished[name] == "length"
    scheduler.pause("x1", paused=False)
    for _ in range(40):
        loop.turn()
    assert loop.outputs["x1"] == expected((1, *PROMPT), 24, ())
    assert_idle(scheduler)


def test_a_request_that_waits_keeps_no_adapter_on_the_device_from_when_its_reader_is_slow() -> None:
    adapters = ArenaAdapters(1, versions={"v1r3": 1, "v2r3": 1})
    scheduler = make(num_pages=8, adapters=adapters)
    loop = Loop(scheduler)
    add(scheduler, submit("first", 4, max_tokens=26))
    add(scheduler, submit("slow", 12, version="v1r3", max_tokens=15))
    while scheduler.num_waiting or scheduler.num_running < 2:
        loop.turn()
    while not scheduler.num_waiting:
        loop.turn()
    assert adapters.num_leases == 1, "it gave way for want of pages and waits for its turn"
    scheduler.pause("slow", paused=True)
    assert adapters.num_leases == 0
    add(scheduler, submit("other", 4, version="v2r3"))
    for _ in range(40):
        loop.turn()
    assert set(loop.finished) == {"first", "other"}
    scheduler.pause("slow", paused=False)
    for _ in range(30):
        loop.turn()
    assert loop.outputs["slow"] == expected(tuple(range(1, 13)), 15, ())
    assert_idle(scheduler)


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_one_that_ends_while_its_reader_is_slow_takes_no_load_from_others_that_wait(end: str) -> None:
    adapters = FakeAdapters({"v1r3"})
    scheduler = make(num_pages=8, adapters=adapters)
    loop = Loop(scheduler)
    add(scheduler, submit("slow", 12, version="v1r3", max_tokens=15, deadline_s=9.0))
    for _ in range(3):
        loop.turn()
    add(scheduler, submit("fast", 4, max_tokens=26))
    loop.turn()
    scheduler.pause("slow", paused=True)
    loop.run()
    assert (scheduler.num_waiting, adapters.leases) == (1, {})
    adapters.resident.clear()
    add(scheduler, submit("other", version="v1r3"))
    loop.turn()
    adapters.withdrawn.clear()
    if end == "abort":
        scheduler.abort("slow")
    else:
        assert [failed.status for failed in scheduler.expire(10.0)] == ["DEADLINE_EXCEEDED"]
    assert adapters.withdrawn == [], "the other one waits still"
    adapters.resident.add("v1r3")
    loop.run()
    assert loop.finished["other"] == "length"
    assert_idle(scheduler, adapters)


@pytest.mark.parametrize("lag", [0, 1])
def test_who_alone_takes_more_than_its_share_waits_for_those_within_theirs(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(num_pages=8, max_sequences=4)
    loop = Loop(scheduler, lag=lag)
    add(scheduler, submit("large", 20, tenant="x", max_tokens=11))
    loop.turn()
    add(scheduler, submit("small", 1, tenant="y", max_tokens=8))
    gone = watch(scheduler, monkeypatch)
    loop.run()
    assert list(loop.finished) == ["small", "large"], "no page was left for the eighth of large until small ended"
    assert gone == [], "neither was computed again"
    assert loop.outputs["large"] == expected(tuple(range(1, 21)), 11, ())
    assert_idle(scheduler)


def test_one_that_stood_back_goes_on_in_the_step_in_which_another_gave_way() -> None:
    scheduler = make(num_pages=8, max_step_tokens=8)
    loop = Loop(scheduler)
    for name in "ab":
        add(scheduler, submit(name, 4, tenant=name, max_tokens=14))
    loop.run()
    assert set(loop.finished) == {"a", "b"}, "no step was left empty while there was something to do"
    assert_idle(scheduler)


def test_the_oldest_of_all_goes_last_of_those_above_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(num_pages=16, max_sequences=4, max_step_tokens=64)
    loop = Loop(scheduler)
    for name, prompt, max_tokens in (("a", 24, 7), ("b", 21, 9), ("c", 1, 12)):
        add(scheduler, submit(name, prompt, tenant=name, max_tokens=max_tokens))
        loop.turn()
    gone = watch(scheduler, monkeypatch)
    while not gone:
        assert loop.turn()
    assert [sequence.request_id for sequence in gone] == ["b"], "a is further above its share, and older"
    loop.run()
    assert len(loop.finished) == 3
    assert_idle(scheduler)


def test_who_alone_takes_more_than_its_share_gives_way_to_one_that_needs_its_own() -> None:
    scheduler = make(num_pages=8, max_sequences=4)
    loop = Loop(scheduler)
    add(scheduler, submit("large", 20, tenant="x", max_tokens=11))
    loop.turn()
    add(scheduler, submit("small", 3, tenant="y", max_tokens=13))
    loop.run()
    assert list(loop.finished) == ["small", "large"], "of four pages each small needs all, and large seven"
    assert loop.outputs["large"] == expected(tuple(range(1, 21)), 11, ())
    assert_idle(scheduler)


@settings(max_examples=2 * settings.default.max_examples)
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from("xyz"),
            st.integers(0, 3),  # adapter; 0 is the base
            st.integers(1, 22),  # prompt
            st.integers(1, 10),  # max_tokens
            st.integers(0, 15),  # submitted before this turn
            st.integers(-1, 1),  # priority
        ),
        min_size=1,
        max_size=14,
    ),
    pauses=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 13), st.booleans()), max_size=10),
    aborts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 13)), max_size=3),
    num_units=st.integers(3, 6),
    num_pages=st.integers(8, 20),
    lag=st.integers(0, 1),
    max_passes=st.sampled_from([1, 2, 64]),
    max_step_tokens=st.sampled_from([5, 64]),
)
def test_everything_comes_to_its_end_in_a_small_arena_and_the_oldest_within_its_share_goes_last(
    requests: list[Any],
    pauses: list[Any],
    aborts: list[Any],
    num_units: int,
    num_pages: int,
    lag: int,
    max_passes: int,
    max_step_tokens: int,
) -> None:
    versions = {f"{tenant}{i}r3": i for tenant in "xyz" for i in range(1, 4)}
    adapters = ArenaAdapters(num_units, versions=versions)
    scheduler = make(
        num_pages=num_pages, max_sequences=4, adapters=adapters, max_passes=max_passes, max_step_tokens=max_step_tokens
    )
    loop = Loop(scheduler, lag=lag)
    relief, seating = scheduler._seating.relief, scheduler._seating
    real = seating.preempt

    def preempt(sequence: Sequence) -> None:
        account = sequence.account
        is_oldest = sequence is min((*account.running, *account.returning), key=lambda one: one.order)
        held = relief._excess_of_pages(account) + 1  # a page that it asks for counts
        if is_oldest and not sequence.paused:
            assert held > 0 or adapters.excess_of(account.name) > 0, "it stays, whoever else would have to wait"
        real(sequence)

    seating.preempt = preempt  # type: ignore[method-assign]
    aborted = set()
    for turn in range(500):
        for i, (tenant, adapter, prompt, count, at, priority) in enumerate(requests):
            if at == turn:
                version = f"{tenant}{adapter}r3" if adapter else None
                tokens = tuple((i * 5 + j) % 50 for j in range(prompt))
                add(scheduler, submit(f"{i}", tokens, tenant=tenant, version=version, max_tokens=count, priority=priority))
        for at, i, paused in pauses:
            if at == turn:
                scheduler.pause(f"{i}", paused=paused)
        for at, i in aborts:
            if at == turn and scheduler.abort(f"{i}"):
                aborted.add(f"{i}")
        if turn > 30:
            for i in range(len(requests)):
                scheduler.pause(f"{i}", paused=False)
        if not loop.turn() and turn > 40 and not scheduler.request_ids:
            break
    for i, (_, _, prompt, count, _, _) in enumerate(requests):
        if f"{i}" not in aborted:
            assert loop.outputs[f"{i}"] == expected(tuple((i * 5 + j) % 50 for j in range(prompt)), count, ())
    assert adapters.num_leases == 0
    assert_idle(scheduler)
    shares = adapters.residency._shares
    assert not shares._claims
    assert not adapters.residency.wanted()
