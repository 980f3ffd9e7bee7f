"""Which requests reuse whose pages, seen through the scheduler and through the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.decoders import NAME_AFTER
from dataplane.engine.intake import Intake
from dataplane.engine.messages import Sampling, Submit
from tests.dataplane.engine.driving import FakeAdapters, Loop, add, assert_idle, expected, make, rows_of, submit

PROMPT = tuple(range(10, 22))
"""Three full pages of four tokens."""


def hits(loop: Loop, *, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> int:
    """Runs one request to its end and returns how many of its tokens were found in the cache."""
    before = loop.scheduler.prefix.hits
    name = f"r{len(loop.finished)}"
    fields = {"max_tokens": 1, "tenant": "x", "cache_salt": "sx"} | fields
    add(loop.scheduler, submit(name, prompt, **fields))
    loop.run()
    assert loop.outputs[name] == expected(prompt, fields["max_tokens"], ())
    return loop.scheduler.prefix.hits - before


def test_a_repeated_prompt_is_reused_but_for_its_last_page() -> None:
    loop = Loop(make())
    assert hits(loop) == 0
    assert hits(loop) == 8, "the last token is computed, so that there is a result"
    assert hits(loop, prompt=(*PROMPT, 5)) == 12
    assert hits(loop, prompt=(*PROMPT[:7], 5, *PROMPT[8:])) == 4
    assert hits(loop, prompt=(5, *PROMPT)) == 0, "nothing is found by its position alone"
    assert_idle(loop.scheduler)


def test_nothing_is_shared_across_tenants_salts_or_versions() -> None:
    loop = Loop(make(adapters=FakeAdapters({"v1r3", "v2r3"})))
    kinds = [
        {"tenant": tenant, "cache_salt": salt, "version": version}
        for tenant, salt in (("x", "sx"), ("x", "part"), ("y", "sy"))
        for version in (None, "v1r3", "v2r3")
    ]
    assert [hits(loop, **kind) for kind in kinds] == [0] * 9
    assert [hits(loop, **kind) for kind in kinds] == [8] * 9


def test_without_a_salt_nothing_is_kept_and_nothing_reused() -> None:
    loop = Loop(make())
    assert [hits(loop, cache_salt=""), hits(loop, cache_salt=""), hits(loop)] == [0, 0, 0]
    assert loop.scheduler._pool.num_kept == 3


def test_a_prompt_whose_tokens_are_scored_is_computed_whole_and_leaves_nothing() -> None:
    loop = Loop(make())
    assert [hits(loop), hits(loop)] == [0, 8]
    kept, before = loop.scheduler._pool.num_kept, loop.device.num_computed
    sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    request = Submit(request_id="scored", tenant="x", prompt=PROMPT, sampling=sampling, cache_salt="sx")
    arrival = Intake(base_digest="base", page_size=4, vocab_size=1000, max_context=32).prepare(request)
    loop.scheduler.add(arrival.submit, 0.0, chain=arrival.chain, keys=arrival.keys)
    plan = loop.scheduler.schedule()
    assert plan is not None
    (rows,) = plan.rows
    assert (rows.start, rows.count, rows.num_shared_pages) == (0, len(PROMPT), 0)
    assert (loop.scheduler.prefix.hits, loop.scheduler._pool.num_kept, loop.device.num_computed) == (8, kept, before)


def test_generated_tokens_serve_the_next_turn_of_a_conversation() -> None:
    loop = Loop(make())
    hits(loop, max_tokens=9)
    answer = expected(PROMPT, 9, ())
    assert hits(loop, prompt=(*PROMPT, *answer, 1, 2)) == 20


def test_generated_tokens_of_a_long_answer_serve_others_before_it_ends() -> None:
    loop = Loop(make(max_context=64, num_pages=64))
    add(loop.scheduler, submit("long", PROMPT, max_tokens=50, tenant="x", cache_salt="sx"))
    while len(loop.outputs.get("long", ())) < 40:
        loop.turn()
    beginning = (*PROMPT, *loop.outputs["long"])
    assert hits(loop, prompt=beginning) == NAME_AFTER * 4


@pytest.mark.parametrize("lag", [0, 1])
def test_a_preempted_request_reuses_its_own_pages(lag: int) -> None:
    def computed(salt: str) -> int:
        scheduler = make(num_pages=10, max_sequences=2)
        loop = Loop(scheduler, lag=lag)
        for name in "ab":
            add(scheduler, submit(name, (ord(name), *range(1, 8)), max_tokens=16, cache_salt=salt))
        loop.run()
        assert sum(len(rows_of(plan)) < 2 for plan in loop.plans) > 1, "one was preempted"
        assert all(loop.outputs[name] == expected((ord(name), *range(1, 8)), 16, ()) for name in "ab")
        assert_idle(scheduler)
        return loop.device.num_computed

    assert computed("s") < computed("")


def test_requests_that_run_share_their_pages_and_each_gives_back_its_own() -> None:
    scheduler = make(num_pages=12, max_sequences=3)
    loop = Loop(scheduler)
    hits(loop)
    for i in range(3):
        add(scheduler, submit(f"s{i}", (*PROMPT, i), max_tokens=9, tenant="x", cache_salt="sx"))
    loop.turn()
    assert scheduler.num_running == 3
    assert scheduler.num_pages_used == 3 + 3
    scheduler.abort("s1")
    loop.run()
    assert_idle(scheduler)


def test_shared_pages_make_room_that_a_whole_prompt_would_not_have() -> None:
    scheduler = make(num_pages=9, max_sequences=2, max_step_tokens=64)
    loop = Loop(scheduler)
    prompt = tuple(range(24))
    hits(loop, prompt=prompt)
    for i in range(2):
        add(scheduler, submit(f"s{i}", (*prompt, i), max_tokens=2, tenant="x", cache_salt="sx"))
    loop.turn()
    assert scheduler.num_running == 2
    loop.run()
    assert_idle(scheduler)


@pytest.mark.parametrize("version", [None, "v1r3"])
def test_values_that_are_not_finite_leave_nothing_in_the_cache(version: str | None) -> None:
    loop = Loop(make(adapters=FakeAdapters({"v1r3", "v2r3"})))
    scheduler = loop.scheduler
    kept = {"version": "v2r3" if version else "v1r3"}
    assert [hits(loop, version=version), hits(loop, **kept)] == [0, 0]
    add(scheduler, submit("bad", (*PROMPT, 1), tenant="x", cache_salt="sx", version=version))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, [None])
    assert [hits(loop, version=version), hits(loop, **kept)] == [0, 8]
    again = hits(loop, version=version)
    assert again == (8 if version is None else 0), "of a version that did it nothing is kept any more"
    assert_idle(scheduler)


def test_a_version_that_is_taken_away_leaves_nothing_and_may_come_back() -> None:
    loop = Loop(make(adapters=FakeAdapters({"v1r3"})))
    scheduler = loop.scheduler
    assert hits(loop, version="v1r3") == 0
    scheduler.prefix.bar("v1r3")
    assert [hits(loop, version="v1r3"), hits(loop, version="v1r3")] == [0, 0]
    scheduler.prefix.unbar("v1r3")
    assert [hits(loop, version="v1r3"), hits(loop, version="v1r3")] == [0, 8]
    scheduler.prefix._barred["v1r3"] = True
    scheduler.prefix.unbar("v1r3")
    assert "v1r3" in scheduler.prefix._barred


async def test_the_model_gives_the_same_tokens_with_a_warm_cache(tiny_config: Callable[..., EngineConfig], plain: Any) -> None:
    client = await EngineClient.start(tiny_config(page_size=4), in_process=True)
    try:
        shared = [7, 3, 9, 40, 41, 42, 43, 44, 100, 101, 102, 103]
        prompts = [[*shared, *tail] for tail in ([1], [2, 3], [], [1], [4, 5, 6, 7, 8], [])]
        for tenant in ("x", "y"):
            for index, prompt in enumerate(prompts):
                sampling = Sampling(max_tokens=10, temperature=0.0)
                request = Submit(
                    request_id=f"{tenant}{index}", tenant=tenant, prompt=tuple(prompt), sampling=sampling, cache_salt=tenant
                )
                ids = [token async for delta in client.submit(request) for token in delta.ids]
                assert ids == plain.greedy(prompt, 10)
        state = await client.state()
        assert state.prefix_queries == 2 * sum(map(len, prompts))
        assert state.prefix_hits == 2 * (12 + 8 + 12 + 12 + 8)
        assert (state.kv_pages_used, state.running) == (0, 0)
        assert state.kv_pages_kept > 0
    finally:
        await client.stop()
