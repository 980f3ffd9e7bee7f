"""What is done to a request before it reaches the step loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataplane.engine.intake import Intake
from dataplane.engine.messages import Sampling, Submit
from dataplane.engine.prefix import PageKeys
from tests.dataplane.engine.driving import submit
from veneer.errors import InvalidArgumentError

INTAKE = Intake(base_digest="base", page_size=4, vocab_size=100, max_context=32)
SALTED = submit("a", 14, cache_salt="s", version="v", active_from=6)


def test_every_full_page_of_a_prompt_has_its_key_before_the_request_is_queued() -> None:
    arrival = INTAKE.prepare(SALTED)
    chain = PageKeys(salt="s", base_digest="base", version="v", page_size=4, active_from=6)
    keys: list[bytes] = []
    chain.extend(keys, SALTED.prompt)
    assert arrival.keys == tuple(keys)
    assert len(arrival.keys) == 3
    assert arrival.chain is not None
    assert arrival.fault is None


@pytest.mark.parametrize(
    "request_",
    [replace(SALTED, cache_salt=""), replace(SALTED, sampling=Sampling(max_tokens=1, prompt_logprobs=0))],
    ids=["without a salt", "scored"],
)
def test_what_shares_no_page_has_no_keys(request_: Submit) -> None:
    arrival = INTAKE.prepare(request_)
    assert (arrival.chain, arrival.keys, arrival.fault) == (None, (), None)


def test_a_request_that_cannot_be_right_comes_with_every_fault_and_is_not_hashed() -> None:
    arrival = INTAKE.prepare(replace(SALTED, prompt=(1,) * 32, weight=0, active_from=99, deadline_s=float("nan")))
    assert isinstance(arrival.fault, InvalidArgumentError)
    for field in ("prompt", "weight", "active_from", "deadline_s"):
        assert field in arrival.fault.message
    assert arrival.keys == ()
