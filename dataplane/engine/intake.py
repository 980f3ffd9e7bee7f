"""Checks and prepares a request before it reaches the step loop, where bad input would be everybody's fault."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dataplane.engine.messages import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SCORES,
    Sampling,
    Submit,
)
from dataplane.engine.prefix import PageKeys
from veneer.errors import InvalidArgumentError, VeneerError, Violation


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
    last = num_prompt - 1 if submit.version is not None else 0
    require(0 <= submit.active_from <= last, "active_from", f"0 to {last}", submit.active_from)
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
    faults += check_rules(sampling, num_prompt=num_prompt, vocab_size=vocab_size)
    require(submit.weight >= 1, "weight", "at least 1", submit.weight)
    for name in ("rank", "max_rank_rows", "max_arena_bytes"):
        require(getattr(submit, name) >= 0, name, "at least 0", getattr(submit, name))
    if submit.deadline_s is not None:
        require(math.isfinite(submit.deadline_s), "deadline_s", "finite", submit.deadline_s)
    if faults:
        raise InvalidArgumentError.of(faults)


def check_rules(sampling: Sampling, *, num_prompt: int, vocab_size: int) -> list[Violation]:
    """Returns what is wrong with penalties, bias, bans and what is to be reported."""
    faults: list[Violation] = []

    def require(holds: bool, field: str, rule: str, value: object) -> None:  # noqa: FBT001 - reads as a sentence
        if not holds:
            faults.append(Violation(f"sampling.{field}", f"must be {rule}, is {value!r}"))

    for name in ("frequency_penalty", "presence_penalty"):
        number = getattr(sampling, name)
        require(-2 <= number <= 2, name, "in [-2, 2]", number)
    biased = sampling.logit_bias
    require(len(biased) <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} tokens", len(biased))
    for token, number in biased:
        require(0 <= token < vocab_size, "logit_bias", f"of ids in [0, {vocab_size})", token)
        require(-100 <= number <= 100, f"logit_bias[{token}]", "in [-100, 100]", number)
    for token in sampling.stop_token_ids:
        require(0 <= token < vocab_size, "stop_token_ids", f"ids in [0, {vocab_size})", token)
    most = sampling.max_tokens
    require(0 <= sampling.min_tokens <= most, "min_tokens", f"0 to max_tokens = {most}", sampling.min_tokens)
    words = sampling.bad_words
    require(len(words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} sequences", len(words))
    for place, word in enumerate(words):
        rule = f"1 to {MAX_BAD_WORD_TOKENS} tokens"
        require(1 <= len(word) <= MAX_BAD_WORD_TOKENS, f"bad_words[{place}]", rule, len(word))
        require(all(0 <= token < vocab_size for token in word), f"bad_words[{place}]", f"ids in [0, {vocab_size})", word)
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(sampling, name)
        require(number is None or 0 <= number <= MAX_LOGPROBS, name, f"0 to {MAX_LOGPROBS}", number)
    if sampling.prompt_logprobs is not None:
        size = num_prompt * (sampling.prompt_logprobs + 1)
        rule = f"so few that prompt tokens × (prompt_logprobs + 1) is at most {MAX_SCORES}"
        require(size <= MAX_SCORES, "prompt_logprobs", rule, size)
    size = len(sampling.grammar.encode())
    require(size <= MAX_GRAMMAR_BYTES, "grammar", f"at most {MAX_GRAMMAR_BYTES} bytes", size)
    return faults


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as the step loop gets it: checked, and its prompt's pages hashed.

    Attributes:
        submit: The request.
        fault: Why it is refused; None when it is in order.
        chain: What computes the keys of its pages; None when none is shared, or the prompt is scored.
        keys: Keys of the full pages of its prompt.
    """

    submit: Submit
    fault: VeneerError | None = None
    chain: PageKeys | None = None
    keys: tuple[bytes, ...] = ()


class Intake:
    """Prepares requests in the thread that brings them, so that the step loop neither checks nor hashes prompts.

    Args:
        base_digest: Digest of the base model.
        page_size: Tokens in a KV page.
        vocab_size: Token ids are below it.
        max_context: Tokens of prompt and output together.
    """

    def __init__(self, *, base_digest: str, page_size: int, vocab_size: int, max_context: int) -> None:
        self._base_digest = base_digest
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._max_context = max_context

    def prepare(self, submit: Submit) -> Arrival:
        """Checks a request and computes its keys; any thread may call it."""
        try:
            check_submit(submit, vocab_size=self._vocab_size, max_context=self._max_context)
        except VeneerError as error:
            return Arrival(submit, fault=error)
        if not submit.cache_salt or submit.sampling.prompt_logprobs is not None:  # what is scored is computed
            return Arrival(submit)
        chain = PageKeys(
            salt=submit.cache_salt,
            base_digest=self._base_digest,
            version=submit.version,
            page_size=self._page_size,
            active_from=submit.active_from,
        )
        keys: list[bytes] = []
        chain.extend(keys, submit.prompt)
        return Arrival(submit, chain=chain, keys=tuple(keys))
