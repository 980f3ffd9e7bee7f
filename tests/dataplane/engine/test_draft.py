"""Which rows a step holds."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.engine.messages import Logprobs, Sampling, Submit
from dataplane.engine.plan import Chosen, Plan
from tests.dataplane.engine.driving import FakeAdapters, Loop, assert_idle, expected, make, rows_of, submit


def test_a_late_commit_plans_on_the_token_that_is_only_on_the_device_and_drops_the_surplus() -> None:
    scheduler = make()
    stop = expected((1, 2, 3, 4), 2, ())[1]
    scheduler.add(submit("a", max_tokens=10, stops=(stop,)), 0.0)
    loop = Loop(scheduler, lag=1)
    loop.run()
    late = [rows for plan in loop.plans for rows in rows_of(plan) if len(rows.ids) < rows.count]
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
    mixed = [plan for plan in loop.plans if {rows.count == 1 for rows in rows_of(plan)} == {True, False}]
    assert mixed
    assert all(plan.num_tokens <= 5 for plan in loop.plans)
    assert all(rows.count == 1 for plan in mixed for rows in rows_of(plan)[:1])


def test_rows_are_ordered_single_rows_first_then_by_slot() -> None:
    adapters = FakeAdapters({"v1r3", "v2r3"})
    scheduler = make(adapters=adapters)
    loop = Loop(scheduler)
    for i, version in enumerate(["v2r3", None, "v1r3", None]):
        scheduler.add(submit(str(i), version=version), 0.0)
    loop.run()
    for plan in loop.plans:
        keys = [(rows.count > 1, rows.slot) for rows in rows_of(plan)]
        assert keys == sorted(keys)


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
            assert sum(len(rows.targets) for rows in rows_of(plan)) <= 64
            results: list[Any] = []
            for rows in rows_of(plan):
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
            for delta in outcome.tokens.deltas():
                wants = delta.index == 0 and delta.request_id != "plain"
                assert len(delta.prompt_logprobs) == (89 if wants else 0)
    assert scored == {False: list(prompts["a"][1:]), True: list(prompts["b"][1:])}
    assert_idle(scheduler)
