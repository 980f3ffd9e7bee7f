"""What the results of a step mean for requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataplane.engine.messages import Delta, Logprobs, Tokens
from dataplane.engine.plan import Chosen, Outcome
from tests.dataplane.engine.driving import FakeAdapters, Loop, assert_idle, make, rows_of, submit


def test_values_that_are_not_finite_end_one_request_only() -> None:
    scheduler = make()
    scheduler.add(submit("bad", (1,)), 0.0)
    scheduler.add(submit("good", (2,)), 0.0)
    plan = scheduler.schedule()
    assert plan is not None
    outcome = scheduler.commit(plan, [None if rows.ids == (1,) else 7 for rows in rows_of(plan)])
    assert [failed.status for failed in outcome.failed] == ["INTERNAL"]
    assert [item.request_id for item in outcome.not_finite] == ["bad"]
    assert outcome.tokens.deltas() == [Delta("good", 0, (7,), None, 1)]
    assert scheduler.request_ids == ("good",)


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
    assert scheduler.commit(second, [9]) == Outcome(Tokens(), (), ())
    assert_idle(scheduler, adapters)


@pytest.mark.parametrize("odd", [None, Chosen(None, fault=("INVALID_ARGUMENT", "no token is left"))])
def test_one_decode_row_that_fails_takes_nothing_from_its_neighbours(odd: Chosen | None) -> None:
    scheduler = make()
    loop = Loop(scheduler)
    for name in "abc":
        scheduler.add(submit(name, (ord(name),), max_tokens=9), 0.0)
    loop.turn()
    plan = scheduler.schedule()
    assert plan is not None
    assert len(plan.decodes) == 3
    outcome = scheduler.commit(plan, [7, odd, 8])
    assert [(delta.request_id, delta.index, delta.ids) for delta in outcome.tokens.deltas()] == [("a", 1, (7,)), ("c", 1, (8,))]
    assert [failed.request_id for failed in outcome.failed] == ["b"]
    assert scheduler.request_ids == ("a", "c")
    assert scheduler.num_running == 2


def test_a_stop_token_ends_its_own_request_only_and_the_last_token_allowed_ends_another() -> None:
    scheduler = make()
    loop = Loop(scheduler)
    scheduler.add(submit("stops", (1,), max_tokens=9, stops=(7,)), 0.0)
    scheduler.add(submit("ends", (2,), max_tokens=2), 0.0)
    scheduler.add(submit("goes on", (3,), max_tokens=9), 0.0)
    loop.turn()
    plan = scheduler.schedule()
    assert plan is not None
    deltas = scheduler.commit(plan, [7, 7, 7]).tokens.deltas()
    assert [(delta.request_id, delta.finish) for delta in deltas] == [("stops", "stop"), ("ends", "length"), ("goes on", None)]
    assert scheduler.request_ids == ("goes on",)


def test_scores_of_a_prompt_whose_mask_comes_late_are_told_with_its_first_token() -> None:
    class Mask:
        is_ready = True

        def begin(self) -> None:
            pass

        def allowed(self, index: int) -> bytes | None:
            raise AssertionError(f"the scheduler asks for no mask, not for {index} either")

        def advance(self, token: int) -> None:
            raise AssertionError(f"the scheduler chooses no token, not {token} either")

        def stop(self) -> None:
            pass

    scheduler = make()
    scored = submit("scored", (1, 2), max_tokens=3)
    scheduler.add(replace(scored, sampling=replace(scored.sampling, prompt_logprobs=0)), 0.0, mask=Mask())
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, [Chosen(None, prompt=(Logprobs(-0.5),), is_held=True)])
    for index, prompt in enumerate([((0, (Logprobs(-0.5),)),), ()]):
        plan = scheduler.schedule()
        assert plan is not None
        tokens = scheduler.commit(plan, [7]).tokens
        assert (tokens.indexes, tokens.prompt_logprobs) == ((index,), prompt)
