"""Scheduling in integers: no model, no torch, a fake device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engine.messages import Delta, Failed, Logprobs, Sampling, Submit
from dataplane.engine.plan import Chosen, Outcome, Plan
from dataplane.engine.sequence import Sequence
from kernels.rows import aligned_rank
from tests.dataplane.engine.driving import FakeAdapters, Loop, add, assert_idle, expected, make, submit
from veneer.errors import InvalidArgumentError, ResourceExhaustedError

REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt
        st.integers(1, 14),  # max_tokens
        st.sampled_from(["a", "b", "c"]),  # tenant
        st.sampled_from([None, "v1r3", "v2r16", "v3r40", "v4r1"]),
        st.booleans(),  # may stop
        st.integers(0, 12),  # submitted before this turn
        st.one_of(st.none(), st.integers(0, 20)),  # aborted before this turn
        st.booleans(),  # begins like all others, with its tenant's salt
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(
    requests=REQUESTS,
    num_pages=st.integers(8, 24),
    step_tokens=st.integers(4, 24),
    lag=st.integers(0, 1),
    pauses=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 11), st.booleans()), max_size=12),
)
def test_every_request_gets_its_own_tokens_and_everything_comes_back(
    requests: list[Any], num_pages: int, step_tokens: int, lag: int, pauses: list[tuple[int, int, bool]]
) -> None:
    adapters = FakeAdapters({"v1r3", "v2r16", "v3r40", "v4r1"})
    scheduler = make(num_pages, adapters=adapters, max_step_tokens=step_tokens)
    loop = Loop(scheduler, lag=lag)
    wanted = {}
    aborted = set()
    for turn in range(400):
        for i, (prompt, count, tenant, version, stops, at, abort_at, shares) in enumerate(requests):
            name = str(i)
            if at == turn:
                tokens = tuple(((0 if shares else i * 5) + j) % 50 for j in range(prompt))
                stop_ids = (3, 11, 17, 29, 41) if stops else ()
                salt = f"salt of {tenant}" if shares else ""
                request = submit(name, tokens, max_tokens=count, tenant=tenant, version=version, stops=stop_ids, cache_salt=salt)
                add(scheduler, request)
                wanted[name] = expected(tokens, min(count, 32 - prompt), stop_ids)
            if abort_at == turn and at <= turn and name in scheduler.request_ids:
                scheduler.abort(name)
                aborted.add(name)
            if turn > 20:
                scheduler.pause(name, paused=False)
        for at, i, paused in pauses:
            if at == turn:
                scheduler.pause(str(i), paused=paused)
        if not loop.turn() and turn > 20:
            break
        slots = {rows.slot: 0 for rows in loop.plans[-1].rows if rows.slot >= 0} if loop.plans else {}
        rank_rows = sum(aligned_rank(int(sorted(adapters.resident)[slot].split("r")[1])) for slot in slots)
        assert rank_rows <= 64
        assert not loop.plans or loop.plans[-1].num_tokens <= step_tokens
    for name, tokens in wanted.items():
        if name in aborted:
            output = loop.outputs.get(name, [])
            assert output == tokens[: len(output)]
        else:
            assert loop.outputs[name] == tokens
            assert loop.finished[name] in ("stop", "length")
    assert_idle(scheduler, adapters)


@pytest.mark.parametrize("lag", [0, 1])
def test_preemption_takes_the_newest_and_never_the_oldest(lag: int) -> None:
    scheduler = make(num_pages=8, max_sequences=3)
    loop = Loop(scheduler, lag=lag)
    for name in "abc":
        scheduler.add(submit(name, (ord(name), 1, 2, 3), max_tokens=20), 0.0)
    loop.run()
    assert list(loop.finished) == ["a", "b", "c"]
    starts = [(rows.ids[0], rows.start) for plan in loop.plans for rows in plan.rows if rows.count > 1]
    assert sum(first == ord("a") for first, _ in starts) == 1
    assert sum(first == ord("c") for first, _ in starts) > 1, "the newest was recomputed"
    assert all(loop.outputs[name] == expected((ord(name), 1, 2, 3), 20, ()) for name in "abc")
    assert_idle(scheduler)


def test_a_late_commit_plans_on_the_token_that_is_only_on_the_device_and_drops_the_surplus() -> None:
    scheduler = make()
    stop = expected((1, 2, 3, 4), 2, ())[1]
    scheduler.add(submit("a", max_tokens=10, stops=(stop,)), 0.0)
    loop = Loop(scheduler, lag=1)
    loop.run()
    late = [rows for plan in loop.plans for rows in plan.rows if len(rows.ids) < rows.count]
    assert len(late) == 2, "the second token, and the surplus one"
    assert loop.outputs["a"] == expected((1, 2, 3, 4), 2, ())
    assert loop.finished == {"a": "stop"}
    assert_idle(scheduler)


def test_prefill_chunks_and_decode_rows_share_steps_within_the_token_budget() -> None:
    scheduler = make(max_step_tokens=5, max_sequences=4)
    loop = Loop(scheduler)
    scheduler.add(submit("a", 3, max_tokens=12), 0.0)
    scheduler.add(submit("b", 20, max_tokens=2), 0.0)
    loop.run()
    mixed = [plan for plan in loop.plans if {rows.count == 1 for rows in plan.rows} == {True, False}]
    assert mixed
    assert all(plan.num_tokens <= 5 for plan in loop.plans)
    assert all(rows.count == 1 for plan in mixed for rows in plan.rows[:1])


def test_rows_are_ordered_single_rows_first_then_by_slot() -> None:
    adapters = FakeAdapters({"v1r3", "v2r3"})
    scheduler = make(adapters=adapters)
    loop = Loop(scheduler)
    for i, version in enumerate(["v2r3", None, "v1r3", None]):
        scheduler.add(submit(str(i), version=version), 0.0)
    loop.run()
    for plan in loop.plans:
        keys = [(rows.count > 1, rows.slot) for rows in plan.rows]
        assert keys == sorted(keys)


def test_requests_behind_a_missing_adapter_go_on_and_it_is_reported() -> None:
    adapters = FakeAdapters({"v1r3"})
    scheduler = make(adapters=adapters)
    loop = Loop(scheduler)
    scheduler.add(submit("cold", version="v9r3"), 0.0)
    scheduler.add(submit("base"), 0.0)
    scheduler.add(submit("warm", version="v1r3"), 0.0)
    loop.turn()
    assert loop.plans[0].missed == {"v9r3"}
    assert scheduler.num_running == 2
    loop.run()
    assert set(loop.finished) == {"base", "warm"}
    adapters.resident.add("v9r3")
    loop.run()
    assert loop.finished["cold"] == "length"


def test_a_request_that_lacks_a_slot_is_passed_only_so_often() -> None:
    adapters = FakeAdapters({"v1r3"})
    adapters.starved.add("v9r3")
    scheduler = make(adapters=adapters, max_sequences=2, max_passes=3)
    loop = Loop(scheduler)
    scheduler.add(submit("cold", version="v9r3"), 0.0)
    for i in range(20):
        scheduler.add(submit(f"warm{i}", version="v1r3"), 0.0)
    scheduler.add(submit("base", tenant="u"), 0.0)
    for _ in range(40):
        loop.turn()
    assert adapters.leases == {}, "the slots drained, so that a load can have one"
    assert 0 < sum(name.startswith("warm") for name in loop.finished) < 12
    assert "base" in loop.finished, "rows without adapter take no slot"
    adapters.starved.clear()
    adapters.resident.add("v9r3")
    loop.run()
    assert len(loop.finished) == 22


def test_a_long_prompt_that_lacks_pages_is_passed_only_so_often() -> None:
    scheduler = make(num_pages=8, max_passes=2, max_sequences=3)
    loop = Loop(scheduler)
    scheduler.add(submit("a", 4, max_tokens=8), 0.0)
    loop.turn()
    scheduler.add(submit("long", 27, max_tokens=1), 0.0)
    for i in range(30):
        scheduler.add(submit(f"s{i}", 2, max_tokens=2), 0.0)
    loop.run()
    assert list(loop.finished).index("long") < 15


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


def test_a_full_queue_refuses_and_bad_lengths_are_the_callers_fault() -> None:
    scheduler = make(max_waiting=1)
    scheduler.add(submit("a"), 0.0)
    with pytest.raises(ResourceExhaustedError):
        scheduler.add(submit("b"), 0.0)
    scheduler.abort("a")
    for bad in (submit("c", 32), submit("c", ()), submit("c", max_tokens=0)):
        with pytest.raises(InvalidArgumentError):
            scheduler.add(bad, 0.0)
    scheduler.add(submit("c", 31, max_tokens=9), 0.0)
    loop = Loop(scheduler)
    loop.run()
    assert len(loop.outputs["c"]) == 1, "the context leaves room for one"
    assert_idle(scheduler)


def test_values_that_are_not_finite_end_one_request_only() -> None:
    scheduler = make()
    scheduler.add(submit("bad", (1,)), 0.0)
    scheduler.add(submit("good", (2,)), 0.0)
    plan = scheduler.schedule()
    assert plan is not None
    outcome = scheduler.commit(plan, [None if rows.ids == (1,) else 7 for rows in plan.rows])
    assert [failed.status for failed in outcome.failed] == ["INTERNAL"]
    assert [item.request_id for item in outcome.not_finite] == ["bad"]
    assert outcome.deltas == (Delta("good", 0, (7,), None, 1),)
    assert scheduler.request_ids == ("good",)


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
    assert adapters.withdrawn == ["v1r3", "v2r3"]


def test_a_flooding_tenant_leaves_the_others_their_share() -> None:
    scheduler = make(max_sequences=2, num_pages=64)
    loop = Loop(scheduler)
    for i in range(30):
        scheduler.add(submit(f"flood{i}", 8, max_tokens=8, tenant="x"), 0.0)
    for i in range(5):
        scheduler.add(submit(f"small{i}", 8, max_tokens=8, tenant="y"), 0.0)
    loop.run()
    done = list(loop.finished)
    assert max(done.index(f"small{i}") for i in range(5)) < 14


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


@pytest.mark.parametrize("ending", ["stop", "abort", "not finite"])
def test_what_rows_in_flight_use_is_held_until_they_are_committed(ending: str) -> None:
    adapters = FakeAdapters({"v1r3"})
    scheduler = make(adapters=adapters)
    scheduler.add(submit("a", version="v1r3", stops=(7,)), 0.0)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    if ending == "abort":
        scheduler.abort("a")
    scheduler.commit(first, [None if ending == "not finite" else 7])
    assert scheduler.request_ids == ()
    assert (len(adapters.leases), scheduler.num_pages_used, scheduler.num_running) == (1, 2, 1)
    assert scheduler.schedule() is None
    assert scheduler.commit(second, [9]) == Outcome((), (), ())
    assert_idle(scheduler, adapters)


def test_ended_requests_with_distant_deadlines_are_not_kept() -> None:
    scheduler = make()
    scheduler.add(submit("stays", deadline_s=5000.0), 0.0)
    for number in range(1000):
        scheduler.add(submit(f"r{number}", deadline_s=3600.0), 0.0)
        scheduler.abort(f"r{number}")
    kept = [entry for entry in gc.get_objects() if type(entry) is Sequence and entry.submit.deadline_s == 3600.0]
    assert len(kept) <= 100
    assert scheduler.next_deadline == 5000.0


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
    assert all(rows.start > 0 for plan in loop.plans[num_plans:] for rows in plan.rows), "nothing was computed again"
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


@pytest.mark.parametrize("lag", [0, 1])
def test_prompt_tokens_are_scored_once_each_however_the_prompt_is_cut(lag: int) -> None:
    scheduler = make(num_pages=64, max_step_tokens=100, max_context=250)
    prompts = {name: tuple(range(start, start + 90)) for name, start in (("a", 1), ("b", 500))}
    for name, prompt in prompts.items():
        sampling = Sampling(max_tokens=3, temperature=0.0, prompt_logprobs=0)
        scheduler.add(Submit(request_id=name, tenant="t", prompt=prompt, sampling=sampling), 0.0)
    scheduler.add(submit("plain", 30, max_tokens=9), 0.0)
    scored: dict[int, list[int]] = {}
    pending: list[tuple[Plan, list[Any]]] = []
    while (plan := scheduler.schedule()) is not None or pending:
        if plan is not None:
            assert sum(len(rows.targets) for rows in plan.rows) <= 64
            results: list[Any] = []
            for rows in plan.rows:
                if rows.targets:
                    first = rows.start + rows.score_start
                    scored.setdefault(rows.targets[0] >= 500, []).extend(rows.targets)
                    assert rows.score_start + len(rows.targets) <= rows.count
                    results.append(Chosen(1 if rows.sampling else None, prompt=tuple(Logprobs(-1.0) for _ in rows.targets)))
                    assert prompts["b" if rows.targets[0] >= 500 else "a"][first + 1] == rows.targets[0]
                elif rows.sampling is not None:
                    results.append(1)
            pending.append((plan, results))
        if pending and (len(pending) > lag or plan is None):
            outcome = scheduler.commit(*pending.pop(0))
            for delta in outcome.deltas:
                wants = delta.index == 0 and delta.request_id != "plain"
                assert len(delta.prompt_logprobs) == (89 if wants else 0)
    assert scored == {False: list(prompts["a"][1:]), True: list(prompts["b"][1:])}
    assert_idle(scheduler)
