"""The choices of one request: how each is sampled, and their streams as one."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dataplane.engine.intake import check_rules
from dataplane.engine.messages import Sampling
from dataplane.frontend.grammars import Constraint
from dataplane.frontend.prompts import Budget, Prompts
from dataplane.token_stream import Piece, TokenStream
from veneer.errors import InvalidArgumentError, Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How tokens are chosen; see `veneer.dataplane.v1.SamplingParams`. None means the default."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    echo: bool = False
    constraint: Constraint | None = None


def samplings_of(choice: Choice, budget: Budget, prompts: Prompts, *, seed: int, grammar: str = "") -> list[Sampling]:
    """Returns what the engine is told of each choice; the prompt's logprobs are reported with the first.

    Args:
        choice: What was asked.
        budget: The prompt and how many tokens may follow.
        prompts: Knows the model's own stop tokens, and how words are cut.
        seed: Seed of the request.
        grammar: What the text must match.

    Raises:
        InvalidArgumentError: Lists what this prompt and this vocabulary do not allow.
    """
    if grammar and choice.ignore_eos:
        raise InvalidArgumentError.of([Violation("sampling.ignore_eos", "must be false with structured_outputs")])
    eos_ids = () if choice.ignore_eos else prompts.eos_ids
    stop_ids = prompts.stop_ids(choice.stop) if choice.stop else ()
    _check_stop_ids(choice.stop_token_ids, vocab_size=prompts.vocab_size)
    sampling = Sampling(
        max_tokens=budget.max_tokens,
        temperature=choice.temperature,
        top_p=choice.top_p,
        top_k=choice.top_k,
        min_p=choice.min_p,
        repetition_penalty=choice.repetition_penalty,
        seed=seed,
        stop_token_ids=tuple(dict.fromkeys((*eos_ids, *choice.stop_token_ids, *stop_ids))),
        frequency_penalty=choice.frequency_penalty,
        presence_penalty=choice.presence_penalty,
        logit_bias=choice.logit_bias,
        min_tokens=choice.min_tokens,
        bad_words=prompts.cut_words(choice.bad_words) if choice.bad_words else (),
        logprobs=choice.logprobs,
        prompt_logprobs=choice.prompt_logprobs,
        grammar=grammar,
    )
    if not sampling.is_plain or sampling.prompt_logprobs is not None:
        faults = check_rules(sampling, num_prompt=len(budget.ids), vocab_size=prompts.vocab_size)
        if faults:
            raise InvalidArgumentError.of(faults)
    others = (replace(sampling, seed=seed_of(seed, index), prompt_logprobs=None) for index in range(1, choice.n))
    return [sampling, *others]


def _check_stop_ids(ids: Sequence[int], *, vocab_size: int) -> None:
    faults = [
        Violation(f"sampling.stop_token_ids[{place}]", f"{id_} is not below the vocabulary's size, {vocab_size}")
        for place, id_ in enumerate(ids)
        if not 0 <= id_ < vocab_size
    ]
    if faults:
        raise InvalidArgumentError.of(faults)


def seed_of(seed: int, index: int) -> int:
    """Returns the seed of a choice: the request's own for the first, so that `n` does not change it."""
    if index == 0:
        return seed
    material = b"veneer.choice\0" + seed.to_bytes(8, "big") + index.to_bytes(4, "big")
    return int.from_bytes(hashlib.sha256(material).digest()[:8], "big") >> 1


class ChoiceStreams:
    """The streams of a request's choices, read as one. Owned by the request's handler.

    Args:
        streams: One for each choice, in order.
    """

    def __init__(self, streams: Sequence[TokenStream]) -> None:
        self._streams = tuple(streams)
        self._open = set(range(len(streams)))
        self._reading: dict[asyncio.Task[Piece], int] = {}
        self._ready: deque[tuple[int, Piece]] = deque()

    @property
    def is_open(self) -> bool:
        """Whether `next` may be called again: some choice has not ended."""
        return bool(self._open)

    async def next(self) -> tuple[int, Piece]:
        """Returns the next piece of any choice, and which one it is of; no choice with tokens waits for more than the others.

        A call that is cancelled loses nothing.

        Raises:
            VeneerError: A stream ended badly.
        """
        if len(self._streams) == 1:
            piece = await self._streams[0].next()
            if piece.end is not None:
                self._open.clear()
            return 0, piece
        while not self._ready:
            for index in sorted(self._open.difference(self._reading.values())):
                self._reading[asyncio.create_task(self._streams[index].next(), name="choice")] = index
            done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=self._reading.__getitem__):
                index = self._reading.pop(task)
                self._ready.append((index, task.result()))
        index, piece = self._ready.popleft()
        if piece.end is not None:
            self._open.discard(index)
        return index, piece

    async def close(self) -> None:
        """Aborts what still runs and waits, for a bounded time, until that is done. Idempotent."""
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*(stream.close() for stream in self._streams))
        await asyncio.gather(*self._reading, return_exceptions=True)
