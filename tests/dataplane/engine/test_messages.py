"""What the messages of the engine can tell of themselves."""

from __future__ import annotations

from dataplane.engine.messages import Delta, Logprobs, Tokens


def test_tokens_of_a_step_come_apart_by_request() -> None:
    score, of_prompt = Logprobs(-0.5, ((6, -0.5),)), (Logprobs(-1.0), Logprobs(-2.0))
    step = Tokens(("a", "b"), (3, 0), (5, 6), (2, 3), ((0, "stop", 1),), ((1, score),), ((1, of_prompt),))
    assert step.deltas() == [Delta("a", 3, (5,), "stop", 2, cached_tokens=1), Delta("b", 0, (6,), None, 3, (score,), of_prompt)]
