"""The calls that answer: `chat` for conversations, `complete` for raw text, each whole or as a stream.

Both use `Client.generate`, the one call of the API below them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypedDict, Unpack

from veneer.answer import Answer, Event, gather
from veneer.connection import Connection
from veneer.dataplane.v1 import generation_pb2
from veneer.errors import InvalidArgumentError, Violation
from veneer.messages import Messages, Prompt, read_messages, read_raw


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams` as keywords; names, ranges and defaults are those of the API."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    bad_words: Sequence[str]
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    n: int
    echo: bool
    structured_outputs: generation_pb2.StructuredOutputs | Mapping[str, str]


class GenerateOptions(SamplingOptions, total=False):
    """Keywords of all calls that answer.

    Beside the fields of `SamplingParams`, which may also be given together as `sampling`:

    Attributes:
        adapter: Name of the adapter; empty is the base.
        owner: Tenant that owns it; empty is the caller's own.
        alias: Alias of the adapter; None is the default one.
        version: Digest of a version instead of an alias.
        sampling: How tokens are chosen; None is all defaults.
        fallback: What happens when the version cannot be had in time; not set: the tenant's default.
        request_id: The caller's own identifier; empty: the service makes one.
        split_unit: Unit of a traffic split, e.g. an end user.
        cache_salt: Parts users of one tenant in the prefix cache.
        priority: Place among the tenant's own waiting requests: higher goes first. Capped by the key's roles.
        timeout_s: Deadline of the whole answer.
    """

    adapter: str
    owner: str
    alias: str | None
    version: str | None
    sampling: generation_pb2.SamplingParams | None
    fallback: generation_pb2.FallbackMode.ValueType
    request_id: str
    split_unit: str
    cache_salt: bytes
    priority: int
    timeout_s: float


class GenerationCalls(Connection, ABC):
    """Asks a model. Owned by one event loop."""

    @abstractmethod
    def generate(
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        owner: str = "",
        alias: str | None = None,
        version: str | None = None,
        sampling: generation_pb2.SamplingParams | None = None,
        fallback: generation_pb2.FallbackMode.ValueType = generation_pb2.FALLBACK_MODE_UNSPECIFIED,
        request_id: str = "",
        split_unit: str = "",
        cache_salt: bytes = b"",
        priority: int = 0,
        timeout_s: float = 600.0,
    ) -> AsyncGenerator[Event]:
        """See `Client.generate`."""

    async def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Answer:
        """Asks a question, or goes on with a conversation, and returns the whole answer. The base's chat template is applied.

        `await client.chat("May I keep a hen?", adapter="counsel", max_tokens=64)`

        Args:
            messages: A question; or messages, oldest first, each `{"role": …, "content": …}`, `(role, content)` or a
                `ChatMessage`. Roles are `system`, `user` and `assistant`.
            options: See `GenerateOptions`.

        Raises:
            InvalidArgumentError: A message or an option is not what it must be.
            UnavailableError: The stream ended before the answer was whole.
            VeneerError: As the service said.
        """
        return await self._gather(read_messages(messages), options)

    def stream_chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Event]:
        """As `chat`, but streams: one `Served`, then `Chunk`s, last a `Finish` (of each choice, where several were asked for).

        Closing the iterator, or cancelling the task that reads it, cancels the request.

        Raises:
            VeneerError: As `chat`.
        """
        return self._generate(read_messages(messages), options)

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Answer:
        """Continues raw text, or token ids, and returns the whole continuation. No chat template is applied.

        A model that was trained to chat often ends at once on a bare question: that is what `chat` is for.

        Args:
            prompt: Text or token ids, taken as they are.
            options: See `GenerateOptions`.

        Raises:
            VeneerError: As `chat`.
        """
        return await self._gather(read_raw(prompt), options)

    def stream_complete(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> AsyncGenerator[Event]:
        """As `complete`, but streams as `stream_chat` does.

        Raises:
            VeneerError: As `chat`.
        """
        return self._generate(read_raw(prompt), options)

    def _generate(self, prompt: Prompt, options: GenerateOptions) -> AsyncGenerator[Event]:
        given: dict[str, Any] = dict(options)
        fields = {name: given.pop(name) for name in SamplingOptions.__annotations__ if name in given}
        if fields:
            if given.get("sampling") is not None:
                names = ", ".join(fields)
                raise InvalidArgumentError.of([Violation("sampling", f"give the fields there or as keywords, not both: {names}")])
            given["sampling"] = _sampling(fields)
        return self.generate(prompt, **given)

    async def _gather(self, prompt: Prompt, options: GenerateOptions) -> Answer:
        async with aclosing(self._generate(prompt, options)) as events:
            return await gather(events)


def _sampling(fields: dict[str, Any]) -> generation_pb2.SamplingParams:
    """The fields as the API's message.

    Raises:
        InvalidArgumentError: A value has a type or size that its field does not take; every fault is listed.
    """
    whole, faults = generation_pb2.SamplingParams(), list[Violation]()
    for name, value in fields.items():
        if fault := _fault(name, value):
            faults.append(Violation(name, fault))
            continue
        try:
            whole.MergeFrom(generation_pb2.SamplingParams(**{name: value}))
        except (TypeError, ValueError, AttributeError) as error:
            faults.append(Violation(name, str(error) or f"does not take a {type(value).__name__}"))
    if faults:
        raise InvalidArgumentError.of(faults)
    return whole


def _fault(name: str, value: Any) -> str:
    """Returns what is wrong with a value that the message would take as something else, or refuse without naming the cause."""
    if name in ("stop", "bad_words") and value is not None:
        if isinstance(value, str | bytes | Mapping):
            return f"is a {'string' if isinstance(value, str) else type(value).__name__}; give a list of strings"
    elif name == "structured_outputs" and isinstance(value, Mapping):
        if len(value) > 1:
            return f"has {', '.join(sorted(map(str, value)))}; give one of these"
        odd = [f"{key} is a {type(one).__name__}; it must be a string" for key, one in value.items() if not isinstance(one, str)]
        return f"{odd[0]}, such as json.dumps makes of a schema" if odd and "json" in value else "".join(odd)
    return ""
