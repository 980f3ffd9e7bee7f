from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.instrumentation.grpc import GrpcAioInstrumentorServer
from opentelemetry.sdk.trace import TracerProvider

from tests.veneer.plane import (
    BAD,
    CANARY,
    GOOD,
    KINDS,
    OPERATOR,
    REVOKED,
    SECRET,
    Plane,
    Raw,
    counted,
    digest,
    refusal,
    result_of,
    serving,
)
from veneer.access import Identity, Rule, current_identity
from veneer.call_records import note
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import FailedPreconditionError, ResourceExhaustedError, VeneerError


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with serving(Rule.of("tenant", "operator", roles=["caller"])) as plane:
        yield plane


@pytest.mark.parametrize("kind", KINDS)
async def test_a_good_call_reaches_the_method_with_its_identity(plane: Plane, kind: str) -> None:
    seen: list[Identity] = []

    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        seen.append(current_identity())
        yield pb.GenerateResponse()
        yield pb.GenerateResponse(finish=pb.Finish(completion_tokens=2))

    plane.body = body
    responses = await plane.call(kind, GOOD)
    assert responses[-1].finish.completion_tokens == 2
    assert [identity.tenant for identity in seen] == ["acme"]
    assert plane.seen == [GOOD]
    await counted(plane, kind, "OK")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("secret", [None, "vnr_short", REVOKED, "vnr_" + "u" * 43])
async def test_every_credential_that_is_not_valid_gets_the_same_answer(plane: Plane, kind: str, secret: str | None) -> None:
    error = await refusal(plane, kind, BAD, secret=secret)
    assert (error.status, error.message) == ("UNAUTHENTICATED", "no valid credential: send 'authorization: Bearer <key>'")
    assert plane.seen == []
    await counted(plane, kind, "UNAUTHENTICATED")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_operators_key_is_refused_on_the_callers_listener(plane: Plane, kind: str) -> None:
    assert (await refusal(plane, kind, GOOD, secret=OPERATOR)).status == "PERMISSION_DENIED"
    assert plane.seen == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_key_without_the_role_is_refused(kind: str) -> None:
    async with serving(Rule.of("tenant", roles=["publisher", "owner"])) as plane:
        error = await refusal(plane, kind, GOOD)
    assert error.status == "PERMISSION_DENIED"
    assert "owner, publisher" in error.message


async def test_a_method_without_a_rule_is_refused_whoever_calls(plane: Plane) -> None:
    method = plane.channel.unary_unary("/test.Four/Forgotten", request_serializer=pb.GenerateRequest.SerializeToString)
    for secret in (SECRET, OPERATOR, REVOKED):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(GOOD, metadata=(("authorization", f"Bearer {secret}"),))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert plane.seen == []


async def test_an_unknown_method_is_unimplemented_and_makes_no_label(plane: Plane) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await plane.channel.unary_unary("/test.Four/NoSuch")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "NoSuch" not in str(list(plane.registry.collect()))


async def test_a_bearer_method_gets_the_key_digest_without_a_lookup() -> None:
    async with serving(Rule.of("bearer")) as plane:
        seen: list[Identity] = []

        async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
            seen.append(current_identity())
            yield pb.GenerateResponse()

        plane.body = body
        await plane.call("UnaryStream", GOOD, secret=REVOKED)
        assert (await refusal(plane, "UnaryStream", GOOD, secret=None)).status == "UNAUTHENTICATED"
        assert seen == [Identity(kind="bearer", key_digest=digest(REVOKED))]
        assert plane.keys.asked == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_against_its_rules_is_refused_with_every_violation(plane: Plane, kind: str) -> None:
    requests = (GOOD, BAD) if kind.startswith("Stream") else (BAD,)
    error = await refusal(plane, kind, *requests)
    assert error.status == "INVALID_ARGUMENT"
    assert {violation.field for violation in error.violations} == {"prompt", "sampling.max_tokens", "sampling.stop[1]"}
    assert BAD not in plane.seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [b"\x12\x02\xff\xfe", b"\xff" * 40], ids=["invalid UTF-8", "no message"])
async def test_bytes_that_are_no_message_are_refused_as_such(plane: Plane, kind: str, data: bytes) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await plane.call(kind, Raw(data))  # type: ignore[arg-type]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the request's bytes are no message of its type"
    await counted(plane, kind, "INVALID_ARGUMENT")
    assert not plane.seen


@pytest.mark.parametrize("kind", KINDS)
async def test_a_typed_error_becomes_its_status_with_its_retry_delay(plane: Plane, kind: str) -> None:
    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        raise ResourceExhaustedError("the queue is full", retry_after_s=1.5)
        yield

    plane.body = body
    error = await refusal(plane, kind, GOOD)
    assert isinstance(error, ResourceExhaustedError)
    assert (error.message, error.retry_after_s) == ("the queue is full", 1.5)
    await counted(plane, kind, "RESOURCE_EXHAUSTED")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_error_shows_nothing_of_itself(plane: Plane, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        raise KeyError(CANARY)
        yield

    plane.body = body
    caplog.set_level(logging.DEBUG)
    error = await refusal(plane, kind, GOOD)
    assert (error.status, error.message) == ("INTERNAL", "internal error")
    assert CANARY not in caplog.text
    [record] = [record for record in caplog.records if record.message == "call failed unexpectedly"]
    trace = vars(record)["trace"]
    assert trace[0] == "KeyError"
    assert any("test_interceptors.py" in line for line in trace)
    assert not any(CANARY in str(value) for one in caplog.records for value in vars(one).values())


@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_of_the_method_passes_unchanged(plane: Plane, kind: str) -> None:
    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "past the end")
        yield

    plane.body = body
    error = await refusal(plane, kind, GOOD)
    assert (error.status, error.message) == ("OUT_OF_RANGE", "past the end")
    await counted(plane, kind, "OUT_OF_RANGE")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancel_reaches_the_method_and_its_cleanup_runs(plane: Plane, kind: str) -> None:
    waiting, cleaned = asyncio.Event(), asyncio.Event()

    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        try:
            waiting.set()
            await asyncio.Event().wait()
            yield pb.GenerateResponse()
        finally:
            cleaned.set()

    plane.body = body
    call = plane.start(kind, GOOD, metadata=(("authorization", f"Bearer {SECRET}"),))
    reading = asyncio.ensure_future(call.read() if kind.endswith("Stream") else result_of(call))
    await asyncio.wait_for(waiting.wait(), 60)
    assert plane.running() == 1
    call.cancel()
    await asyncio.wait_for(cleaned.wait(), 60)
    await asyncio.wait([reading])
    await counted(plane, kind, "CANCELLED")
    assert plane.running() == 0


@pytest.mark.parametrize("kind", ["UnaryStream", "StreamStream"])
async def test_a_cancel_while_a_message_is_written_ends_the_generator_in_its_own_task(plane: Plane, kind: str) -> None:
    ended_in: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    started_in: list[object] = []

    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        started_in.append(asyncio.current_task())
        try:
            while True:  # a caller that does not read: flow control stops the writer sooner or later
                yield pb.GenerateResponse(chunk=pb.Chunk(text="x" * 100_000))
        finally:
            ended_in.set_result(asyncio.current_task())

    plane.body = body
    call = plane.start(kind, GOOD, metadata=(("authorization", f"Bearer {SECRET}"),))
    await call.read()
    call.cancel()
    assert await asyncio.wait_for(ended_in, 60) is started_in[0]


async def test_a_passed_deadline_is_counted_as_one(plane: Plane) -> None:
    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        await asyncio.Event().wait()
        yield

    plane.body = body
    assert (await refusal(plane, "UnaryStream", GOOD, deadline_s=0.2)).status == "DEADLINE_EXCEEDED"
    await counted(plane, "UnaryStream", "DEADLINE_EXCEEDED")


async def test_hundreds_of_violations_still_reach_a_client_with_default_limits(plane: Plane) -> None:
    requests = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=["é" * 200] * 400))
    error = await refusal(plane, "UnaryUnary", requests)
    assert error.status == "INVALID_ARGUMENT"
    assert len(error.violations) > 10
    assert "more violations" in error.violations[-1].description


async def test_refusals_send_no_headers_before_the_trailers(plane: Plane) -> None:
    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        raise FailedPreconditionError("quarantined")
        yield

    plane.body = body
    call = plane.start("UnaryStream", GOOD, metadata=(("authorization", f"Bearer {SECRET}"),))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert list(caught.value.initial_metadata()) == []


async def test_one_line_is_logged_for_a_call(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="veneer.interceptors")
    await plane.call("UnaryUnary", GOOD)
    [record] = [record for record in caplog.records if record.message == "call ended"]
    facts = vars(record)
    assert (facts["method"], facts["code"], facts["tenant"], facts["key_id"]) == ("/test.Four/UnaryUnary", "OK", "acme", "k1")
    assert facts["organization"] == ""
    assert SECRET not in str(facts)


def line_of(caplog: pytest.LogCaptureFixture, message: str = "call ended") -> dict[str, Any]:
    [record] = [record for record in caplog.records if record.message == message]
    return vars(record)


@pytest.mark.parametrize("end", [None, FailedPreconditionError("quarantined"), RuntimeError(CANARY)])
async def test_what_a_method_notes_of_a_call_is_on_its_line_however_it_ends(
    plane: Plane, caplog: pytest.LogCaptureFixture, end: Exception | None
) -> None:
    caplog.set_level(logging.INFO, logger="veneer.interceptors")

    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        note(request_id="r-1", version="")
        yield pb.GenerateResponse(finish=pb.Finish(completion_tokens=1))
        note(version="abc")
        if end is not None:
            raise end

    plane.body = body
    with contextlib.suppress(VeneerError, grpc.aio.AioRpcError):
        await plane.call("UnaryStream", GOOD)
    facts = line_of(caplog)
    assert (facts["request_id"], facts["version"], facts["tenant"]) == ("r-1", "abc", "acme")
    assert facts.get("error") == ("FailedPreconditionError" if isinstance(end, FailedPreconditionError) else None)
    if isinstance(end, RuntimeError):
        assert line_of(caplog, "call failed unexpectedly")["request_id"] == "r-1"
    assert CANARY not in str([vars(record) for record in caplog.records])


async def test_calls_at_once_keep_their_facts_apart(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="veneer.interceptors")
    names, both = iter(("a", "b")), asyncio.Barrier(2)

    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        name = next(names)
        note(first=name)
        await both.wait()
        note(second=name)
        yield pb.GenerateResponse(finish=pb.Finish(completion_tokens=1))

    plane.body = body
    await asyncio.gather(plane.call("UnaryStream", GOOD), plane.call("UnaryStream", GOOD))
    lines = [vars(record) for record in caplog.records if record.message == "call ended"]
    assert sorted((line["first"], line["second"]) for line in lines) == [("a", "a"), ("b", "b")]


def test_a_note_outside_of_calls_does_nothing() -> None:
    note(request_id="r")


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (f"00-{TRACE}-{SPAN}-01", (TRACE, SPAN)),
        (f"00-{TRACE}-{SPAN}-00", (TRACE, SPAN)),
        (None, None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("nonsense", None),
    ],
)
async def test_a_line_has_the_trace_that_the_caller_names(
    plane: Plane, caplog: pytest.LogCaptureFixture, header: str | None, found: tuple[str, str] | None
) -> None:
    caplog.set_level(logging.INFO, logger="veneer.interceptors")
    headers = () if header is None else (("traceparent", header),)
    call = plane.start("UnaryUnary", GOOD, metadata=(("authorization", f"Bearer {SECRET}"), *headers))
    await call
    facts = line_of(caplog)
    assert (facts.get("trace_id"), facts.get("span_id")) == (found or (None, None))


async def test_the_span_of_opentelemetry_goes_before_the_header(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="veneer.interceptors")
    provider = TracerProvider()
    seen: list[Any] = []

    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        span = provider.get_tracer("test").start_span("here")
        seen.append(span.get_span_context())
        otel_context.attach(trace.set_span_in_context(span))
        yield pb.GenerateResponse(finish=pb.Finish(completion_tokens=1))

    plane.body = body
    headers = (("authorization", f"Bearer {SECRET}"), ("traceparent", f"00-{TRACE}-{SPAN}-01"))
    await plane.start("UnaryUnary", GOOD, metadata=headers)
    facts, (context,) = line_of(caplog), seen
    assert (facts["trace_id"], facts["span_id"]) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")


@pytest.fixture
def instrumented() -> Iterator[None]:
    """OpenTelemetry's automatic instrumentation of gRPC servers."""
    GrpcAioInstrumentorServer().instrument(tracer_provider=TracerProvider())
    yield
    GrpcAioInstrumentorServer().uninstrument()


@pytest.mark.usefixtures("instrumented")
@pytest.mark.parametrize("kind", KINDS)
async def test_calls_go_on_under_opentelemetrys_instrumentation_and_name_its_trace(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="veneer.interceptors")
    async with serving(Rule.of("tenant", roles=["caller"])) as plane:
        headers = (("authorization", f"Bearer {SECRET}"), ("traceparent", f"00-{TRACE}-{SPAN}-01"))
        call = plane.start(kind, GOOD, metadata=headers)
        responses = [response async for response in call] if kind.endswith("Stream") else [await call]
        assert responses[-1].finish.completion_tokens == 1
        facts = line_of(caplog)
        assert (facts["code"], facts["trace_id"]) == ("OK", TRACE)
        assert facts["span_id"] != SPAN, "the span of this server"
        error = await refusal(plane, kind, BAD)
        assert error.status == "INVALID_ARGUMENT"


@pytest.mark.usefixtures("instrumented")
async def test_a_caller_that_leaves_ends_the_method_under_instrumentation_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="veneer.interceptors")
    ended = asyncio.Event()

    async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
        try:
            yield pb.GenerateResponse(finish=pb.Finish(completion_tokens=1))
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(Rule.of("tenant", roles=["caller"])) as plane:
        plane.body = body
        call = plane.start("UnaryStream", GOOD, metadata=(("authorization", f"Bearer {SECRET}"),))
        await call.read()
        call.cancel()
        await asyncio.wait_for(ended.wait(), 60)
        await counted(plane, "UnaryStream", "CANCELLED")
    assert line_of(caplog)["code"] == "CANCELLED"


async def test_details_carry_a_bad_request_that_any_client_can_read(plane: Plane) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await plane.call("UnaryUnary", BAD)
    trailers = dict(tuple(caught.value.trailing_metadata() or ()))
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert len(bad_request.field_violations) == 3
