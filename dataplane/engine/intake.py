"""Checks a request before it reaches the step loop, where bad input would be everybody's fault."""

from __future__ import annotations

import math

from dataplane.engine.messages import Submit
from veneer.errors import InvalidArgumentError, Violation


def check_submit(submit: Submit, *, vocab_size: int, max_context: int) -> None:
    """Refuses what no engine state could make right.

    Raises:
        InvalidArgumentError: Lists every violation.
    """
    faults: list[Violation] = []

    def require(holds: bool, field: str, rule: str, value: object) -> None:  # noqa: FBT001 - reads as a sentence
        if not holds:
            faults.append(Violation(field, f"must be {rule}, is {value!r}"))

    num_prompt = len(submit.prompt)
    require(1 <= num_prompt < max_context, "prompt", f"1 to {max_context - 1} tokens (context of {max_context})", num_prompt)
    if submit.prompt:
        least, largest = min(submit.prompt), max(submit.prompt)
        require(least >= 0 and largest < vocab_size, "prompt", f"ids in [0, {vocab_size})", (least, largest))
    sampling = submit.sampling
    require(sampling.max_tokens >= 1, "sampling.max_tokens", "at least 1", sampling.max_tokens)
    require(
        math.isfinite(sampling.temperature) and sampling.temperature >= 0,
        "sampling.temperature", "finite and at least 0", sampling.temperature,
    )  # fmt: skip
    require(0 < sampling.top_p <= 1, "sampling.top_p", "in (0, 1]", sampling.top_p)
    require(sampling.top_k >= 0, "sampling.top_k", "at least 0", sampling.top_k)
    require(0 <= sampling.min_p <= 1, "sampling.min_p", "in [0, 1]", sampling.min_p)
    require(
        math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0,
        "sampling.repetition_penalty", "finite and above 0", sampling.repetition_penalty,
    )  # fmt: skip
    require(submit.weight >= 1, "weight", "at least 1", submit.weight)
    if submit.deadline_s is not None:
        require(math.isfinite(submit.deadline_s), "deadline_s", "finite", submit.deadline_s)
    if faults:
        raise InvalidArgumentError.of(faults)
