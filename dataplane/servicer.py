"""The Generate call: proto in, generation, proto out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from dataplane.asked import Echo, GenerationRequest, Part
from dataplane.binding import Served
from dataplane.choices import Choice
from dataplane.engine.messages import Logprobs
from dataplane.fallback import FallbackMode, FallbackReason
from dataplane.frontend.grammars import Constraint
from dataplane.frontend.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from dataplane.generation import Generator
from dataplane.resolution import Target
from veneer.access import current_identity
from veneer.dataplane.v1 import generation_pb2, generation_pb2_grpc
from veneer.errors import InvalidArgumentError, Violation

_MODES = {
    generation_pb2.FALLBACK_MODE_UNSPECIFIED: None,
    generation_pb2.FALLBACK_MODE_NONE: FallbackMode.NONE,
    generation_pb2.FALLBACK_MODE_NOT_READY: FallbackMode.NOT_READY,
    generation_pb2.FALLBACK_MODE_ANY: FallbackMode.ANY,
    generation_pb2.FALLBACK_MODE_PREVIOUS: FallbackMode.PREVIOUS,
    generation_pb2.FALLBACK_MODE_FAIL: FallbackMode.FAIL,
}
_REASONS = {
    None: generation_pb2.FALLBACK_REASON_UNSPECIFIED,
    FallbackReason.NOT_FOUND: generation_pb2.FALLBACK_REASON_NOT_FOUND,
    FallbackReason.NOT_READY: generation_pb2.FALLBACK_REASON_NOT_READY,
    FallbackReason.NOT_INVOKED: generation_pb2.FALLBACK_REASON_NOT_INVOKED,
}
_FINISHES = {"stop": generation_pb2.FINISH_REASON_STOP, "length": generation_pb2.FINISH_REASON_LENGTH}


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves `veneer.dataplane.v1.GenerationService`. Validation, identity and errors are the interceptor's."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Streams one completion; no message and no header goes out before the first token."""
        wanted = _request(request, key_digest=current_identity().key_digest, deadline_s=context.time_remaining())
        async with aclosing(self._generator.run(wanted)) as parts:
            async for part in parts:
                if part.served is not None and part.served.fallback is not None:
                    context.set_trailing_metadata((("veneer-fallback", part.served.fallback.value),))
                yield _response(part)


def _request(request: generation_pb2.GenerateRequest, *, key_digest: bytes, deadline_s: float | None) -> GenerationRequest:
    reference = request.adapter
    if not reference.adapter and (reference.owner or reference.alias or reference.version):
        fault = "is needed beside owner, alias or version; without all of them the base answers"
        raise InvalidArgumentError.of([Violation("adapter.adapter", fault)])
    return GenerationRequest(
        key_digest=key_digest,
        target=Target(reference.adapter, reference.owner, reference.alias, reference.version),
        prompt=_prompt(request),
        choice=_choice(request.sampling),
        fallback=_MODES[request.fallback],
        request_id=request.request_id,
        split_unit=request.split_unit,
        sub_salt=request.cache_salt,
        deadline_s=deadline_s,
        priority=request.priority,
    )


def _prompt(request: generation_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "chat":
            return ChatPrompt(tuple((message.role, message.content) for message in request.chat.messages))
        case "tokens":
            return TokenPrompt(tuple(request.tokens.ids))
        case _:
            return TextPrompt(request.text)


def _choice(sampling: generation_pb2.SamplingParams) -> Choice:
    return Choice(
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        min_tokens=sampling.min_tokens,
        bad_words=tuple(sampling.bad_words),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        n=sampling.n or 1,
        echo=sampling.echo,
        constraint=_constraint(sampling.structured_outputs),
    )


def _constraint(outputs: generation_pb2.StructuredOutputs) -> Constraint | None:
    kind = outputs.WhichOneof("constraint")
    return None if kind is None else Constraint(kind, getattr(outputs, kind))


def _response(part: Part) -> generation_pb2.GenerateResponse:
    response = generation_pb2.GenerateResponse()
    if part.served is not None:
        response.served.CopyFrom(_served(part.served))
    if part.echo is not None:
        response.echo.CopyFrom(_echo(part.echo))
    piece = part.piece
    if piece.ids or piece.text:
        response.chunk.index = piece.index
        response.chunk.ids.extend(piece.ids)
        response.chunk.text = piece.text
        response.chunk.choice = part.choice
        if piece.logprobs:
            response.chunk.logprobs.extend(map(_logprobs, piece.logprobs))
    if piece.end is not None:
        response.finish.reason = _FINISHES[piece.end.reason]
        response.finish.prompt_tokens = piece.end.prompt_tokens
        response.finish.completion_tokens = piece.end.completion_tokens
        response.finish.choice = part.choice
    return response


def _echo(echo: Echo) -> generation_pb2.Echo:
    return generation_pb2.Echo(ids=echo.ids, text=echo.text, logprobs=map(_logprobs, echo.logprobs))


def _logprobs(one: Logprobs) -> generation_pb2.Logprobs:
    top = [generation_pb2.TokenLogprob(id=token, logprob=number) for token, number in one.top]
    return generation_pb2.Logprobs(logprob=one.logprob, top=top)


def _served(served: Served) -> generation_pb2.Served:
    return generation_pb2.Served(
        request_id=served.request_id,
        base_digest=served.base_digest,
        version=served.version or "",
        owner=served.owner,
        adapter=served.adapter,
        version_number=served.version_number,
        alias=served.alias,
        generation=served.generation,
        arm=served.arm,
        sticky=served.sticky,
        fallback=served.fallback is not None,
        fallback_reason=_REASONS[served.fallback],
        priority=served.priority,
    )
