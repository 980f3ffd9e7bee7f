"""A whole answer: what came of a stream, gathered into one record."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import Literal

from veneer.dataplane.v1 import generation_pb2
from veneer.errors import UnavailableError

Event = generation_pb2.Served | generation_pb2.Echo | generation_pb2.Chunk | generation_pb2.Finish
"""What a stream is made of: first one `Served`, then an `Echo` where asked for, then `Chunk`s and a `Finish` for each choice."""

FinishReason = Literal["stop", "length"]
"""`stop`: an end token, a stop token or a stop string. `length`: `max_tokens`, or the end of the context."""

_REASONS: dict[int, FinishReason] = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer.

    Attributes:
        index: Its place; 0, 1, 2 …
        text: The text.
        token_ids: Ids of its tokens.
        finish_reason: Why it ended.
        completion_tokens: How many tokens were generated, a final end token or stop token included.
        logprobs: One for each token id, where `logprobs` was asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    completion_tokens: int
    logprobs: tuple[generation_pb2.Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request took.

    Attributes:
        prompt_tokens: Of the prompt, once, however many choices there are.
        completion_tokens: Of all choices.
    """

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; `str(answer)` is the text of its first choice.

    Attributes:
        choices: The choices by index; one unless `n` asked for more.
        usage: Tokens that the request took.
        served: What answered: the version with its digest and number, or the base; and whether and why in place of another.
        echo: The prompt, where `echo` or `prompt_logprobs` was asked for.
    """

    choices: tuple[Choice, ...]
    usage: Usage
    served: generation_pb2.Served
    echo: generation_pb2.Echo | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[generation_pb2.Logprobs, ...]:
        """Logprobs of the first choice."""
        return self.choices[0].logprobs

    @property
    def request_id(self) -> str:
        """Identifier of the request, as in the service's logs."""
        return self.served.request_id


@dataclass(slots=True)
class _Part:
    """A choice while it comes. Owned by the task that gathers."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[generation_pb2.Logprobs] = field(default_factory=list)
    finish: generation_pb2.Finish | None = None


async def gather(events: AsyncIterable[Event]) -> Answer:
    """Reads a stream to its end.

    Raises:
        UnavailableError: It ended before all of its choices did.
        VeneerError: As the stream says.
    """
    served, echo = generation_pb2.Served(), None
    parts: dict[int, _Part] = {}
    async for event in events:
        match event:
            case generation_pb2.Served():
                served = event
            case generation_pb2.Echo():
                echo = event
            case generation_pb2.Chunk():
                part = parts.setdefault(event.choice, _Part())
                part.texts.append(event.text)
                part.ids += event.ids
                part.logprobs += event.logprobs
            case generation_pb2.Finish():
                parts.setdefault(event.choice, _Part()).finish = event
    finishes = [part.finish for part in parts.values() if part.finish is not None]
    if not finishes or len(finishes) < len(parts):
        raise UnavailableError("the stream ended without a finish: the answer is not whole")
    return Answer(
        choices=tuple(_choice(index, parts[index]) for index in sorted(parts)),
        usage=Usage(max(one.prompt_tokens for one in finishes), sum(one.completion_tokens for one in finishes)),
        served=served,
        echo=echo,
    )


def _choice(index: int, part: _Part) -> Choice:
    assert part.finish is not None
    return Choice(
        index=index,
        text="".join(part.texts),
        token_ids=tuple(part.ids),
        finish_reason=_REASONS.get(part.finish.reason, "stop"),
        completion_tokens=part.finish.completion_tokens,
        logprobs=tuple(part.logprobs),
    )
