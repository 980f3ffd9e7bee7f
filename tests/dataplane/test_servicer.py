"""Generate over the wire: what a caller sees, and when."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from dataplane.asked import Echo, GenerationRequest, Part
from dataplane.binding import Served
from dataplane.choices import Choice
from dataplane.engine.messages import Logprobs
from dataplane.fallback import FallbackMode, FallbackReason
from dataplane.frontend.grammars import Constraint
from dataplane.frontend.prompts import ChatPrompt, TextPrompt, TokenPrompt
from dataplane.resolution import Target
from dataplane.token_stream import End, Piece
from tests.dataplane.doubles import BASE, VERSION
from tests.dataplane.scripted import SERVED, Script, serve
from veneer.dataplane.v1 import generation_pb2
from veneer.errors import NotFoundError, ResourceExhaustedError, UnavailableError, VeneerError

SECRET = "vnr_" + "A" * 43
KEY = (("authorization", f"Bearer {SECRET}"),)
TEXT = generation_pb2.GenerateRequest(text="hello")


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def stub(script: Script) -> AsyncIterator[Any]:
    async with serve(script) as made:
        yield made


async def read(call: Any) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in call]


async def test_the_stream_is_served_message_chunks_and_finish(stub: Any) -> None:
    first, last = await read(stub.Generate(TEXT, metadata=KEY))
    assert first.served == generation_pb2.Served(
        request_id="mine",
        base_digest=BASE,
        version=VERSION,
        owner="acme",
        adapter="bot",
        version_number=7,
        alias="stable",
        generation=3,
        arm=1,
        sticky=True,
    )
    assert (first.chunk.index, list(first.chunk.ids), first.chunk.text) == (0, [70], "he")
    assert not first.HasField("finish")
    assert not last.HasField("served")
    assert (last.chunk.index, last.chunk.text) == (1, "llo")
    assert (last.finish.reason, last.finish.prompt_tokens, last.finish.completion_tokens) == (
        generation_pb2.FINISH_REASON_STOP,
        3,
        3,
    )


@pytest.mark.parametrize("reason", list(FallbackReason))
async def test_a_fallback_says_so_and_names_no_adapter(stub: Any, script: Script, reason: FallbackReason) -> None:
    script.parts[0] = Part(Served("mine", BASE, fallback=reason), Piece(0, (70,), "he", None))
    call = stub.Generate(TEXT, metadata=KEY)
    first, _ = await read(call)
    assert dict(await call.trailing_metadata())["veneer-fallback"] == reason.value
    said = generation_pb2.FallbackReason.Value(f"FALLBACK_REASON_{reason.name}")
    assert first.served == generation_pb2.Served(request_id="mine", base_digest=BASE, fallback=True, fallback_reason=said)


async def test_an_earlier_version_in_a_later_ones_place_says_so_and_names_itself(stub: Any, script: Script) -> None:
    script.parts[0] = Part(replace(SERVED, fallback=FallbackReason.NOT_READY), Piece(0, (70,), "he", None))
    call = stub.Generate(TEXT, metadata=KEY)
    served = (await read(call))[0].served
    assert (served.version, served.version_number, served.adapter) == (VERSION, 7, "bot")
    assert (served.fallback, served.fallback_reason) == (True, generation_pb2.FALLBACK_REASON_NOT_READY)
    assert dict(await call.trailing_metadata())["veneer-fallback"] == "not_ready"


@pytest.mark.parametrize("mode", generation_pb2.FallbackMode.values())
async def test_every_mode_reaches_the_generator(stub: Any, script: Script, mode: generation_pb2.FallbackMode.ValueType) -> None:
    call = stub.Generate(generation_pb2.GenerateRequest(text="hello", fallback=mode), metadata=KEY)
    await read(call)
    name = generation_pb2.FallbackMode.Name(mode).removeprefix("FALLBACK_MODE_")
    assert script.requests[0].fallback == (None if name == "UNSPECIFIED" else FallbackMode[name])
    assert "veneer-fallback" not in dict(await call.trailing_metadata())


async def test_nothing_at_all_is_on_the_wire_before_the_first_token(stub: Any, script: Script) -> None:
    gate = script.gates[0] = asyncio.Event()
    call = stub.Generate(TEXT, metadata=KEY)
    headers = asyncio.create_task(call.initial_metadata())
    await script.started.wait()
    done, _ = await asyncio.wait({headers}, timeout=0.1)
    assert not done
    gate.set()
    await read(call)
    await headers


@pytest.mark.parametrize(
    "error",
    [
        NotFoundError("no such adapter, alias or version"),
        ResourceExhaustedError("full", retry_after_s=2.5),
        UnavailableError("away"),
    ],
)
async def test_a_refusal_is_the_whole_answer(stub: Any, script: Script, error: VeneerError) -> None:
    script.parts = [error]
    call = stub.Generate(TEXT, metadata=KEY)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert (caught.value.code().name, caught.value.details()) == (error.status, error.message)
    assert list(await call.initial_metadata()) == [], "trailers only, so that a client may try again"
    pushback = dict(await call.trailing_metadata()).get("grpc-retry-pushback-ms")
    assert pushback == (None if error.retry_after_s is None else f"{error.retry_after_s * 1000:.0f}")


async def test_a_stream_that_breaks_ends_without_a_finish_and_not_ok(stub: Any, script: Script) -> None:
    script.parts[1] = UnavailableError("the engine ended")
    call = stub.Generate(TEXT, metadata=KEY)
    assert (await call.read()).chunk.text == "he"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("place", [0, 1])
async def test_a_caller_that_leaves_ends_the_generation(stub: Any, script: Script, place: int) -> None:
    script.gates[place] = asyncio.Event()
    call = stub.Generate(TEXT, metadata=KEY)
    if place:
        await call.read()
    await script.started.wait()
    call.cancel()
    await script.ended.wait()


async def test_a_deadline_reaches_the_generation_and_ends_it(stub: Any, script: Script) -> None:
    script.gates[0] = asyncio.Event()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stub.Generate(TEXT, metadata=KEY, timeout=1.5))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await script.ended.wait()
    deadline_s = script.requests[0].deadline_s
    assert deadline_s is not None
    assert 0 < deadline_s <= 1.5


async def test_a_reader_that_stops_reading_still_learns_why_its_stream_ended(stub: Any, script: Script) -> None:
    big = "x" * 60_000
    script.parts = [
        Part(SERVED, Piece(0, (70,), big, None)),
        *(Part(None, Piece(number, (70,), big, None)) for number in range(1, 40)),
        ResourceExhaustedError("the stream was not read for 10 s"),
    ]
    call = stub.Generate(TEXT, metadata=KEY)
    await call.read()
    await script.started.wait()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_without_a_credential_nothing_runs(stub: Any, script: Script) -> None:
    for metadata in ((), (("authorization", "Bearer nonsense"),)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(stub.Generate(TEXT, metadata=metadata))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert script.requests == []


@pytest.mark.parametrize(
    "request_",
    [
        generation_pb2.GenerateRequest(),
        generation_pb2.GenerateRequest(text=""),
        generation_pb2.GenerateRequest(tokens=generation_pb2.TokenPrompt()),
        generation_pb2.GenerateRequest(chat=generation_pb2.ChatPrompt()),
        generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.SamplingParams(temperature=float("nan"))),
        generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.SamplingParams(max_tokens=0)),
        generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.SamplingParams(top_p=0)),
        generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.SamplingParams(stop=[""])),
        generation_pb2.GenerateRequest(text="x", priority=101),
        generation_pb2.GenerateRequest(text="x", adapter=generation_pb2.AdapterRef(adapter="../x")),
        generation_pb2.GenerateRequest(text="x", adapter=generation_pb2.AdapterRef(version=VERSION)),
        generation_pb2.GenerateRequest(text="x", adapter=generation_pb2.AdapterRef(alias="stable")),
        generation_pb2.GenerateRequest(text="x", adapter=generation_pb2.AdapterRef(owner="acme")),
    ],
)
async def test_a_request_that_cannot_be_right_is_refused_before_it_runs(
    stub: Any, script: Script, request_: generation_pb2.GenerateRequest
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stub.Generate(request_, metadata=KEY))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert script.requests == []


async def test_every_field_of_the_request_arrives(stub: Any, script: Script) -> None:
    request = generation_pb2.GenerateRequest(
        adapter=generation_pb2.AdapterRef(adapter="bot", owner="other", alias="canary"),
        tokens=generation_pb2.TokenPrompt(ids=[5, 6]),
        sampling=generation_pb2.SamplingParams(
            max_tokens=9,
            temperature=0,
            top_p=0.5,
            top_k=3,
            min_p=0.25,
            repetition_penalty=2,
            seed=2**64 - 1,
            stop=["END"],
            stop_token_ids=[4],
            ignore_eos=True,
        ),
        fallback=generation_pb2.FALLBACK_MODE_ANY,
        request_id="mine",
        split_unit="eve",
        cache_salt=b"pepper",
        priority=-7,
    )
    await read(stub.Generate(request, metadata=KEY))
    assert script.requests == [
        GenerationRequest(
            key_digest=hashlib.sha256(SECRET.encode()).digest(),
            target=Target("bot", "other", "canary"),
            prompt=TokenPrompt((5, 6)),
            choice=Choice(
                max_tokens=9,
                temperature=0,
                top_p=0.5,
                top_k=3,
                min_p=0.25,
                repetition_penalty=2,
                seed=2**64 - 1,
                stop=("END",),
                stop_token_ids=(4,),
                ignore_eos=True,
            ),
            fallback=FallbackMode.ANY,
            request_id="mine",
            split_unit="eve",
            sub_salt=b"pepper",
            priority=-7,
        )
    ]


async def test_what_is_not_set_has_its_default(stub: Any, script: Script) -> None:
    chat = generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    version = generation_pb2.AdapterRef(adapter="bot", version=VERSION)
    await read(stub.Generate(generation_pb2.GenerateRequest(chat=chat, adapter=version), metadata=KEY))
    await read(stub.Generate(TEXT, metadata=KEY))
    first, second = script.requests
    assert (first.prompt, first.target) == (ChatPrompt((("user", "hi"),)), Target("bot", version=VERSION))
    assert (second.prompt, second.target, second.choice) == (TextPrompt("hello"), Target(), Choice())
    assert (second.fallback, second.deadline_s) == (None, None)


async def test_a_message_without_new_tokens_has_no_chunk(stub: Any, script: Script) -> None:
    script.parts = [Part(SERVED, Piece(0, (), "", End("length", 3, 0)))]
    (only,) = await read(stub.Generate(TEXT, metadata=KEY))
    assert only.HasField("served")
    assert not only.HasField("chunk")
    assert only.finish.reason == generation_pb2.FINISH_REASON_LENGTH


async def test_what_shapes_the_choice_reaches_the_generator_under_its_name(stub: Any, script: Script) -> None:
    sampling = generation_pb2.SamplingParams(
        frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={9: 2.0, 3: -100.0}, min_tokens=2, bad_words=["x"],
        logprobs=0, prompt_logprobs=4, n=3, echo=True,
    )  # fmt: skip
    await read(stub.Generate(generation_pb2.GenerateRequest(text="hello", sampling=sampling), metadata=KEY))
    assert script.requests[0].choice == Choice(
        frequency_penalty=0.5, presence_penalty=-0.5, logit_bias=((3, -100.0), (9, 2.0)), min_tokens=2, bad_words=("x",),
        logprobs=0, prompt_logprobs=4, n=3, echo=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("sampling.frequency_penalty", generation_pb2.SamplingParams(frequency_penalty=2.1)),
        ("sampling.presence_penalty", generation_pb2.SamplingParams(presence_penalty=float("nan"))),
        ("sampling.logit_bias", generation_pb2.SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0))),
        ("sampling.logit_bias[5]", generation_pb2.SamplingParams(logit_bias={5: 101.0})),
        ("sampling.bad_words", generation_pb2.SamplingParams(bad_words=["x"] * 65)),
        ("sampling.bad_words[0]", generation_pb2.SamplingParams(bad_words=[""])),
        ("sampling.logprobs", generation_pb2.SamplingParams(logprobs=21)),
        ("sampling.prompt_logprobs", generation_pb2.SamplingParams(prompt_logprobs=21)),
        ("sampling.n", generation_pb2.SamplingParams(n=9)),
    ],
)
async def test_a_value_out_of_range_is_refused_by_its_name(
    stub: Any, script: Script, field: str, sampling: generation_pb2.SamplingParams
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stub.Generate(generation_pb2.GenerateRequest(text="hello", sampling=sampling), metadata=KEY))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")
    assert script.requests == []


async def test_choices_logprobs_and_the_prompt_are_on_the_wire(stub: Any, script: Script) -> None:
    one = Logprobs(-0.25, ((70, -0.25), (5, -2.0)))
    script.parts = [
        Part(SERVED, Piece(0, (70,), "he", None, (one,)), 1),
        Part(None, Piece(0, (71,), "l", End("length", 2, 1)), 0, Echo((1, 2), "hi", (one,))),
        Part(None, Piece(1, (), "", End("stop", 2, 1)), 1),
    ]
    first, second, last = await read(stub.Generate(TEXT, metadata=KEY))
    wire = generation_pb2.Logprobs(
        logprob=-0.25, top=[generation_pb2.TokenLogprob(id=70, logprob=-0.25), generation_pb2.TokenLogprob(id=5, logprob=-2)]
    )
    assert (first.chunk.choice, list(first.chunk.logprobs)) == (1, [wire])
    assert second.echo == generation_pb2.Echo(ids=[1, 2], text="hi", logprobs=[wire])
    assert (second.chunk.choice, second.finish.choice, last.finish.choice) == (0, 0, 1)
    assert not first.HasField("echo")


@pytest.mark.parametrize("kind", ["json", "regex", "grammar"])
async def test_what_the_text_must_match_reaches_the_generator(stub: Any, script: Script, kind: str) -> None:
    outputs = generation_pb2.StructuredOutputs(**{kind: "x"})
    sampling = generation_pb2.SamplingParams(structured_outputs=outputs)
    await read(stub.Generate(generation_pb2.GenerateRequest(text="hello", sampling=sampling), metadata=KEY))
    assert script.requests[0].choice.constraint == Constraint(kind, "x")
    sampling = generation_pb2.SamplingParams(structured_outputs=generation_pb2.StructuredOutputs())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stub.Generate(generation_pb2.GenerateRequest(text="hello", sampling=sampling), metadata=KEY))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
