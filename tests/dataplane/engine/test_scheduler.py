"""Scheduling in integers: no model, no torch, a fake device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rows import aligned_rank
from tests.dataplane.engine.driving import FakeAdapters, Loop, add, assert_idle, expected, make, rows_of, submit
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


@settings(max_examples=5 * settings.default.max_examples)
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
        slots = {rows.slot: 0 for rows in rows_of(loop.plans[-1]) if rows.slot >= 0} if loop.plans else {}
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
