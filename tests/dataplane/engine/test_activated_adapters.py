"""Adapters that start later in a prompt: what the base computes before, what is shared, and what is done while they load."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataplane.engine.driving import FakeAdapters, Loop, add, assert_idle, expected, make, rows_of, submit

PROMPT = tuple(range(10, 24))
"""Three full pages of four tokens, and two tokens more."""


def activated(name: str, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Any:
    """A request of `v1r3` that starts at position 10, in the third page."""
    return submit(name, prompt, **({"version": "v1r3", "active_from": 10, "cache_salt": "s", "max_tokens": 3} | fields))


def planned(loop: Loop) -> list[tuple[int, int, int, int]]:
    """(slot, start, count, num_base) of all rows so far."""
    return [(rows.slot, rows.start, rows.count, rows.num_base) for plan in loop.plans for rows in rows_of(plan)]


def hits(loop: Loop, request: Any) -> int:
    """Runs one request to its end and returns how many of its tokens were found in the cache."""
    before = loop.scheduler.prefix.hits
    add(loop.scheduler, request)
    loop.run()
    assert loop.outputs[request.request_id] == expected(request.prompt, request.sampling.max_tokens, ())
    return loop.scheduler.prefix.hits - before


def test_rows_before_the_adapter_starts_are_the_bases() -> None:
    loop = Loop(make(adapters=FakeAdapters({"v1r3"}), max_step_tokens=6))
    hits(loop, activated("a"))
    assert planned(loop) == [(-1, 0, 6, 6), (0, 6, 6, 4), (0, 12, 2, 0), (0, 14, 1, 0), (0, 15, 1, 0)]


@pytest.mark.parametrize(("start", "rows"), [(0, (0, 0, 14, 0)), (13, (0, 0, 14, 13)), (1, (0, 0, 14, 1))])
def test_an_adapter_may_start_anywhere_in_a_prompt(start: int, rows: tuple[int, ...]) -> None:
    loop = Loop(make(adapters=FakeAdapters({"v1r3"})))
    hits(loop, activated("a", active_from=start))
    assert planned(loop)[0] == rows


def test_rank_rows_are_charged_from_the_start_of_the_adapter_on() -> None:
    def cost(**fields: Any) -> float:
        loop = Loop(make(adapters=FakeAdapters({"v1r3"}), max_step_tokens=10))
        add(loop.scheduler, activated("a", **fields))
        loop.turn()
        return loop.scheduler._tenants.least()

    assert cost() == cost(version=None, active_from=0) < cost(active_from=9)


def test_pages_before_the_start_are_shared_with_the_base_and_with_other_versions_of_the_tenant_only() -> None:
    loop = Loop(make(adapters=FakeAdapters({"v1r3", "v2r3"})))
    assert hits(loop, activated("base", version=None, active_from=0)) == 0
    assert hits(loop, activated("first")) == 8, "two pages lie before the adapter starts"
    assert hits(loop, activated("again")) == 12, "and one more is its own"
    assert hits(loop, activated("second", version="v2r3")) == 8
    assert hits(loop, activated("later", active_from=12)) == 12
    assert hits(loop, activated("plain", active_from=0)) == 0
    assert hits(loop, activated("foreign", tenant="u", cache_salt="other")) == 0
    assert hits(loop, activated("theirs", tenant="u", cache_salt="other", version=None, active_from=0)) == 8
    assert_idle(loop.scheduler)


def test_a_version_that_is_taken_away_leaves_the_pages_of_the_base() -> None:
    loop = Loop(make(adapters=FakeAdapters({"v1r3"})))
    hits(loop, activated("a"))
    loop.scheduler.prefix.bar("v1r3")
    assert hits(loop, activated("base", version=None, active_from=0)) == 8


def test_values_that_are_not_finite_leave_nothing_of_version_and_base() -> None:
    loop = Loop(make(adapters=FakeAdapters({"v1r3"})))
    hits(loop, activated("a"))
    add(loop.scheduler, activated("bad"))
    plan = loop.scheduler.schedule()
    assert plan is not None
    loop.scheduler.commit(plan, [None])
    assert hits(loop, activated("base", version=None, active_from=0)) == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_the_pages_before_the_start_are_computed_while_the_adapter_loads(lag: int) -> None:
    adapters = FakeAdapters()
    loop = Loop(make(adapters=adapters, max_step_tokens=5), lag=lag)
    add(loop.scheduler, activated("a"))
    loop.run()
    assert planned(loop) == [(-1, 0, 5, 5), (-1, 5, 3, 3)], "whole pages only: what is not kept would be computed twice"
    assert (loop.scheduler.num_running, loop.scheduler.num_pages_used, loop.outputs) == (0, 0, {}), "it holds nothing meanwhile"
    adapters.resident.add("v1r3")
    loop.run()
    assert loop.outputs["a"] == expected(PROMPT, 3, ())
    assert loop.device.num_computed == len(PROMPT) + 2
    assert loop.scheduler.prefix.hits == 0, "what it finds of its own is no hit"
    assert planned(loop)[2] == (0, 8, 5, 2)
    assert_idle(loop.scheduler, adapters)


def test_what_was_computed_ahead_is_charged_once() -> None:
    def service(*, cold: bool) -> float:
        adapters = FakeAdapters() if cold else FakeAdapters({"v1r3"})
        loop = Loop(make(adapters=adapters, max_step_tokens=8))
        add(loop.scheduler, activated("a", max_tokens=9))
        if cold:
            loop.run()
            adapters.resident.add("v1r3")
        while len(loop.outputs.get("a", ())) < 2:
            loop.turn()
        return loop.scheduler._tenants.least()

    assert service(cold=True) == service(cold=False)


@pytest.mark.parametrize(
    "fields",
    [{"cache_salt": ""}, {"active_from": 3}, {"active_from": 0}],
    ids=["nothing is kept", "no whole page", "from the first token"],
)
def test_a_request_waits_where_nothing_can_be_done_ahead(fields: dict[str, Any]) -> None:
    adapters = FakeAdapters()
    loop = Loop(make(adapters=adapters))
    add(loop.scheduler, activated("a", **fields))
    loop.run()
    assert planned(loop) == []
    adapters.resident.add("v1r3")
    loop.run()
    assert loop.outputs["a"] == expected(PROMPT, 3, ())
    assert_idle(loop.scheduler, adapters)


def test_what_the_cache_has_already_is_not_computed_ahead() -> None:
    loop = Loop(make())
    hits(loop, activated("base", version=None, active_from=0))
    before = len(planned(loop))
    add(loop.scheduler, activated("a"))
    loop.run()
    assert len(planned(loop)) == before


def test_a_version_of_which_nothing_is_kept_is_computed_ahead_once_at_most() -> None:
    adapters = FakeAdapters()
    loop = Loop(make(adapters=adapters))
    loop.scheduler.prefix.bar("v1r3")
    add(loop.scheduler, activated("a"))
    loop.run()
    assert planned(loop) == [(-1, 0, 8, 8)]
    adapters.resident.add("v1r3")
    loop.run()
    assert loop.outputs["a"] == expected(PROMPT, 3, ())


def test_loading_requests_hold_no_seat_that_others_need() -> None:
    adapters = FakeAdapters()
    scheduler = make(adapters=adapters, max_sequences=2)
    loop = Loop(scheduler)
    for i in range(6):
        add(scheduler, activated(f"cold{i}", (i, *PROMPT[1:])))
    for i in range(4):
        add(scheduler, submit(f"base{i}", 4, tenant="u"))
    loop.run()
    assert set(loop.finished) == {f"base{i}" for i in range(4)}
    adapters.resident.add("v1r3")
    loop.run()
    assert len(loop.finished) == 10
    assert_idle(scheduler, adapters)


@pytest.mark.parametrize("how", ["abort", "fail", "expire"])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_request_that_runs_ahead_ends_like_one_that_waits(how: str, lag: int) -> None:
    adapters = FakeAdapters()
    scheduler = make(adapters=adapters, max_step_tokens=4)
    loop = Loop(scheduler, lag=lag)
    add(scheduler, activated("a", deadline_s=5.0))
    loop.turn()
    assert scheduler.num_running == 1
    scheduler.pause("a", paused=True)
    if how == "abort":
        scheduler.abort("a")
    elif how == "fail":
        assert [failed.status for failed in scheduler.fail_waiting("v1r3", status="NOT_FOUND", message="gone")] == ["NOT_FOUND"]
    else:
        assert [failed.status for failed in scheduler.expire(9.0)] == ["DEADLINE_EXCEEDED"]
    loop.run()
    assert adapters.withdrawn == ["v1r3"], "nobody waits for the version any more"
    assert loop.outputs == {}
    assert_idle(scheduler, adapters)


def test_a_request_that_runs_ahead_has_no_reader_that_could_be_slow() -> None:
    adapters = FakeAdapters()
    loop = Loop(make(adapters=adapters, max_step_tokens=4))
    add(loop.scheduler, activated("a"))
    loop.turn()
    loop.scheduler.pause("a", paused=True)
    adapters.resident.add("v1r3")
    loop.run()
    assert loop.outputs["a"] == expected(PROMPT, 3, ())


def test_only_as_many_run_ahead_as_there_are_pages_for() -> None:
    adapters = FakeAdapters()
    loop = Loop(make(num_pages=8, adapters=adapters, max_step_tokens=64), lag=1)
    for i in range(3):
        add(loop.scheduler, activated(f"a{i}", (i, *PROMPT, *PROMPT[1:])))
    loop.turn()
    assert loop.scheduler.num_running == 1
    loop.run()
    adapters.resident.add("v1r3")
    loop.run()
    assert len(loop.finished) == 3
    assert_idle(loop.scheduler, adapters)


def test_a_request_that_runs_ahead_gives_way_and_starts_when_its_adapter_is_there() -> None:
    adapters = FakeAdapters()
    scheduler = make(num_pages=9, adapters=adapters, max_step_tokens=4, max_sequences=2)
    loop = Loop(scheduler)
    add(scheduler, activated("a", (*PROMPT, *PROMPT), active_from=20, max_tokens=1))
    loop.turn()
    loop.turn()
    scheduler._seating.preempt(scheduler._seating.running[0])
    loop.run()
    assert (scheduler.num_running, scheduler.num_pages_used) == (0, 0)
    adapters.resident.add("v1r3")
    loop.run()
    assert loop.outputs["a"] == expected((*PROMPT, *PROMPT), 1, ())
    assert_idle(scheduler, adapters)


def test_a_preempted_request_goes_on_where_its_adapter_starts() -> None:
    adapters = FakeAdapters({"v1r3"})
    scheduler = make(num_pages=10, adapters=adapters, max_sequences=2)
    loop = Loop(scheduler)
    for name in "ab":
        add(scheduler, activated(name, (ord(name), *range(1, 8)), active_from=6, max_tokens=16))
    loop.run()
    assert sum(len(rows_of(plan)) < 2 for plan in loop.plans) > 1, "one was preempted"
    assert all(loop.outputs[name] == expected((ord(name), *range(1, 8)), 16, ()) for name in "ab")
    assert_idle(scheduler, adapters)


@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 20), st.integers(1, 12), st.sampled_from("xy"), st.sampled_from([None, "v1r3", "v2r16", "v3r40"]),
            st.integers(0, 19), st.integers(0, 12), st.integers(0, 30), st.booleans(),
        ),
        min_size=1, max_size=10,
    ),
    arrivals=st.lists(st.integers(0, 25), min_size=3, max_size=3),
    num_pages=st.integers(8, 20),
    step_tokens=st.integers(4, 20),
    lag=st.integers(0, 1),
)  # fmt: skip
def test_every_request_gets_its_own_tokens_however_late_its_adapter_comes(
    requests: list[Any], arrivals: list[int], num_pages: int, step_tokens: int, lag: int
) -> None:
    adapters = FakeAdapters()
    scheduler = make(num_pages, adapters=adapters, max_step_tokens=step_tokens)
    loop = Loop(scheduler, lag=lag)
    wanted, aborted = {}, set()
    for turn in range(400):
        for version, at in zip(("v1r3", "v2r16", "v3r40"), arrivals, strict=True):
            if at == turn:
                adapters.resident.add(version)
        for i, (length, count, tenant, version, start, at, abort_at, shares) in enumerate(requests):
            name, tokens = str(i), tuple((i * 7 * (not shares) + j) % 50 for j in range(length))
            if at == turn:
                active_from = 0 if version is None else min(start, length - 1)
                add(
                    scheduler,
                    submit(
                        name, tokens, max_tokens=count, tenant=tenant, version=version, active_from=active_from, cache_salt=tenant
                    ),
                )
                wanted[name] = expected(tokens, min(count, 32 - length), ())
            if abort_at == turn and name in scheduler.request_ids:
                scheduler.abort(name)
                aborted.add(name)
        if not loop.turn() and turn > 25:
            break
    for name, tokens in wanted.items():
        output = loop.outputs.get(name, [])
        assert output == (tokens[: len(output)] if name in aborted else tokens)
    assert_idle(scheduler, adapters)
