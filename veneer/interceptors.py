"""What happens around every call of a plane: identity, validation, errors, the log line, metrics.

One interceptor does it all, because each layer around a stream costs time per message, and because the order matters: nothing of
a request is read before its caller is known, and every outcome, refusals included, is counted and logged once. Answers that
were given before are logged together, a line a second for each key.

gRPC reads the request of a method with one request before it calls the method, for as long as the caller takes to send it. So to
gRPC every method is one with a stream of requests, and the interceptor reads the one request itself, once it knows the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc
from google.protobuf.message import DecodeError, Message

from veneer.access import (
    Authenticator,
    Identity,
    ListenerName,
    Rule,
    Rules,
    current_identity,
    key_digest_of,
    set_identity,
    set_peer,
)
from veneer.call_records import CallMetrics, CallSummary, MethodMetrics, collect_facts, trace_facts
from veneer.errors import InternalError, InvalidArgumentError, PermissionDeniedError, UnauthenticatedError, VeneerError
from veneer.running_calls import RunningCalls
from veneer.statuses import code_of, message_of, trailers_of
from veneer.validation import validate

_LOG = logging.getLogger(__name__)
_ALARMING = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE"})  # codes that an operator should look at

_TURNS = 2

_Context = grpc.aio.ServicerContext[Any, Any]


class Shortcut(Protocol):
    """Answers of one unary method that were given before, as bytes. It is asked once the caller is known, and may know none."""

    def find(self, identity: Identity, request: bytes) -> bytes | None:
        """The answer to these bytes from this caller, if it would be the same now; None: the method is to be called."""

    def mark(self) -> int:
        """Told before the method is called, and handed back to `keep`."""

    def keep(self, mark: int, identity: Identity, request: bytes, response: Any, answer: bytes) -> None:
        """Takes what the method answered, as a message and as bytes; it may keep it."""


@dataclass(frozen=True, slots=True)
class _Method:
    """A served method: its full name, who may call it, its metrics, and the answers that it gave before."""

    name: str
    rule: Rule | None
    metrics: MethodMetrics
    shortcut: Shortcut | None


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A method's own handler, and the one that guards it."""

    handler: grpc.RpcMethodHandler[Any, Any]
    method: _Method
    guarded: grpc.RpcMethodHandler[Any, Any]


@dataclass(slots=True)
class _Call:
    """A running call, whose block fills in who makes it and whether the method was called; what `note` adds is in `facts`."""

    facts: dict[str, object]
    identity: Identity | None = None
    is_short: bool = False


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Guards all calls of one listener. Used by the event loop's thread only.

    A streaming method reads its requests from the iterator that it is given, never by `context.read()`: only the iterator
    validates.
    """

    def __init__(
        self,
        *,
        listener: ListenerName,
        rules: Rules,
        authenticator: Authenticator,
        metrics: CallMetrics,
        shortcuts: Mapping[str, Shortcut] | None = None,
        running: RunningCalls | None = None,
    ) -> None:
        self._running = RunningCalls() if running is None else running
        self._listener: ListenerName = listener
        self._rules = rules
        self._authenticator = authenticator
        self._metrics = metrics
        self._shortcuts = shortcuts or {}
        self._wrapped: dict[str, _Wrapped] = {}
        self._summary = CallSummary(listener)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the method's handler; see the module."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # no such method: UNIMPLEMENTED
        name = handler_call_details.method
        known = self._wrapped.get(name)
        if known is None or known.handler is not handler:
            metrics = self._metrics.of(self._listener, name)
            method = _Method(name, self._rules.get(name), metrics, self._shortcuts.get(name))
            known = self._wrapped[name] = _Wrapped(handler, method, self._wrap(handler, method))
        rule = known.method.rule
        is_open = rule is not None and rule.open
        refusal = self._running.arrive(self._listener, is_open=is_open)
        if refusal is None and not is_open and all(key != "authorization" for key, _ in handler_call_details.invocation_metadata):
            refusal = _no_credential()
        return known.guarded if refusal is None else self._refuse(known.method, refusal)

    def _wrap(self, handler: grpc.RpcMethodHandler[Any, Any], method: _Method) -> grpc.RpcMethodHandler[Any, Any]:
        codec = {
            "request_deserializer": _decoder(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if method.shortcut is not None:
            return grpc.stream_unary_rpc_method_handler(self._short(handler, method, method.shortcut))

        if not handler.request_streaming and not handler.response_streaming:
            unary_unary: Any = handler.unary_unary

            async def call_unary_unary(_: AsyncIterator[Message], context: _Context) -> Any:
                async with self._call(method, context) as call:
                    await self._admit(call, method.rule, context)
                    return await unary_unary(await self._request(context), context)

            return grpc.stream_unary_rpc_method_handler(call_unary_unary, **codec)

        if not handler.response_streaming:
            stream_unary: Any = handler.stream_unary

            async def call_stream_unary(requests: AsyncIterator[Message], context: _Context) -> Any:
                async with self._call(method, context) as call:
                    await self._admit(call, method.rule, context)
                    return await stream_unary(_validated(requests), context)

            return grpc.stream_unary_rpc_method_handler(call_stream_unary, **codec)

        if not handler.request_streaming:
            unary_stream: Any = handler.unary_stream

            async def call_unary_stream(_: AsyncIterator[Message], context: _Context) -> None:
                async with self._call(method, context) as call:
                    await self._admit(call, method.rule, context)
                    await _write_all(unary_stream(await self._request(context), context), context)

            async def iterate_unary_stream(_: AsyncIterator[Message], context: _Context) -> AsyncIterator[Any]:
                async with self._call(method, context) as call:
                    await self._admit(call, method.rule, context)
                    request = await self._request(context)
                    async with contextlib.aclosing(_each(unary_stream(request, context))) as responses:
                        async for response in responses:
                            yield response

            respond: Any = iterate_unary_stream if _is_iterated_over() else call_unary_stream
            return grpc.stream_stream_rpc_method_handler(respond, **codec)

        stream_stream: Any = handler.stream_stream

        async def call_stream_stream(requests: AsyncIterator[Message], context: _Context) -> None:
            async with self._call(method, context) as call:
                await self._admit(call, method.rule, context)
                await _write_all(stream_stream(_validated(requests), context), context)

        async def iterate_stream_stream(requests: AsyncIterator[Message], context: _Context) -> AsyncIterator[Any]:
            async with self._call(method, context) as call:
                await self._admit(call, method.rule, context)
                async with contextlib.aclosing(_each(stream_stream(_validated(requests), context))) as responses:
                    async for response in responses:
                        yield response

        answer: Any = iterate_stream_stream if _is_iterated_over() else call_stream_stream
        return grpc.stream_stream_rpc_method_handler(answer, **codec)

    def _short(
        self, handler: grpc.RpcMethodHandler[Any, Any], method: _Method, shortcut: Shortcut
    ) -> Callable[[AsyncIterator[bytes], _Context], Awaitable[bytes]]:
        """The method over bytes: what it answered before to the same bytes from the same caller needs neither codec nor rules."""
        unary_unary: Any = handler.unary_unary
        decode: Any = _decoder(handler.request_deserializer)
        encode: Any = handler.response_serializer

        async def call_short(_: AsyncIterator[bytes], context: _Context) -> bytes:
            async with self._call(method, context) as call:
                await self._admit(call, method.rule, context)
                data = await self._message(context)
                assert call.identity is not None
                known = shortcut.find(call.identity, data)
                if known is not None:
                    call.is_short = True
                    return known
                mark = shortcut.mark()
                request = decode(data)
                _check(request)
                response = await unary_unary(request, context)
                answer: bytes = encode(response)
                shortcut.keep(mark, call.identity, data, response, answer)
                return answer

        return call_short

    def _refuse(self, method: _Method, refusal: VeneerError) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler for one call that is refused before anything of it is read.

        A connection may open and reset such calls thousands of times a second; of a call whose caller has gone, nothing is kept.
        """

        async def refuse(_: AsyncIterator[bytes], context: _Context) -> None:
            await _until_a_reset_shows()
            async with self._call(method, context):
                raise refusal

        return grpc.stream_unary_rpc_method_handler(refuse)

    async def _request(self, context: _Context) -> Message:
        """The one request of a call, checked."""
        return _check(await self._message(context))

    async def _message(self, context: _Context) -> Any:
        with self._running.hearing():
            message = await context.read()
        if message is grpc.aio.EOF:
            raise InvalidArgumentError("the call ended without a request")
        return message

    def flush(self) -> None:
        """Logs what is to be logged together, if something is left."""
        self._summary.flush()

    @contextlib.asynccontextmanager
    async def _call(self, method: _Method, context: _Context) -> AsyncIterator[_Call]:
        """One call from its first look at the credential to its log line."""
        start = time.monotonic()
        method.metrics.started()
        call = _Call(collect_facts())
        code = "UNKNOWN"
        try:
            with self._running.interruptible():
                yield call
            code = _code_name(context.code())
        except grpc.aio.AbortError:
            code = _code_name(context.code())
            raise
        except asyncio.CancelledError:
            remaining = cast("float | None", context.time_remaining())  # None without a deadline, whatever its stub says
            code = "CANCELLED" if remaining is None or remaining > 0 else "DEADLINE_EXCEEDED"
            raise
        except GeneratorExit:  # the interceptor that iterates over the responses stopped
            code = "CANCELLED"
            raise
        except VeneerError as error:
            code = error.status
            call.facts["error"] = type(error).__name__
            await _abort(context, error)
        except Exception as error:  # noqa: BLE001  a fault of one call must not show its text to the caller nor end the server
            code = "INTERNAL"
            facts = call.facts | trace_facts(_metadata(context))
            _LOG.error("call failed unexpectedly", extra=facts | {"method": method.name, "trace": _trace(error)})
            await _abort(context, InternalError("internal error"))
        finally:
            seconds = time.monotonic() - start
            method.metrics.ended(code, seconds=seconds)
            if call.is_short and code == "OK":
                assert call.identity is not None
                self._summary.add(method.name, call.identity.key_id, seconds=seconds)
            else:
                self._log(method, call, context, code=code, seconds=seconds)

    async def _admit(self, call: _Call, rule: Rule | None, context: _Context) -> None:
        if rule is None:
            raise PermissionDeniedError("this method is not for anyone")
        if rule.open:
            return
        set_peer(context.peer)
        metadata = dict(_metadata(context))
        key_digest = key_digest_of(metadata.get("authorization"))
        identity: Identity | None = None
        if key_digest is not None:
            if rule.kinds == {"bearer"}:
                identity = Identity(kind="bearer", key_digest=key_digest)
            else:
                identity = await self._authenticator.authenticate(key_digest)
        if identity is None:
            raise _no_credential()
        rule.admit(identity, self._listener)
        set_identity(identity)
        call.identity = identity

    def _log(self, method: _Method, call: _Call, context: _Context, *, code: str, seconds: float) -> None:
        is_open = method.rule is not None and method.rule.open
        level = logging.WARNING if code in _ALARMING else logging.DEBUG if is_open else logging.INFO
        if not _LOG.isEnabledFor(level):
            return
        facts: dict[str, object] = {"method": method.name, "listener": self._listener, "code": code, "seconds": round(seconds, 6)}
        if call.identity is not None:
            identity = current_identity()  # a method that was open to any bearer may have found out whose key it is
            facts |= {"kind": identity.kind, "key_id": identity.key_id, "tenant": identity.tenant}
            facts |= {"organization": identity.organization}
        _LOG.log(level, "call ended", extra=call.facts | facts | trace_facts(_metadata(context)))


def _metadata(context: _Context) -> tuple[tuple[str, str | bytes], ...]:
    return tuple(context.invocation_metadata() or ())


async def _validated(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
    async for request in requests:
        yield _check(request)


def _decoder(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Has bytes that are no message (invalid UTF-8 among them) refused by `_check`; gRPC would answer UNKNOWN."""

    def decoded(data: bytes) -> Any:
        assert decode is not None
        try:
            return decode(data)
        except DecodeError:
            return None

    return None if decode is None else decoded


def _check(request: Message | None) -> Message:
    if request is None:
        raise InvalidArgumentError("the request's bytes are no message of its type")
    validate(request)
    return request


def _is_iterated_over() -> bool:
    """Whether OpenTelemetry instruments gRPC servers: its interceptor iterates over what a streaming method returns.

    Else a streaming method writes its responses by itself, see `_write_all`.
    """
    module = sys.modules.get("opentelemetry.instrumentation.grpc")
    return module is not None and bool(module.GrpcAioInstrumentorServer().is_instrumented_by_opentelemetry)


async def _each(responses: Any) -> AsyncGenerator[Any]:
    """Iterates over what a streaming method returns; one that writes by itself has nothing more to yield."""
    if inspect.isawaitable(responses):
        await responses
        return
    async with contextlib.aclosing(responses):
        async for response in responses:
            yield response


async def _write_all(responses: Any, context: _Context) -> None:
    """Sends what a streaming method yields (or lets it write by itself, when it is a coroutine).

    Writing here, rather than handing the generator to gRPC, ends the generator within this task when the caller goes away: gRPC
    would leave it to the garbage collector, and its `finally` blocks with it.
    """
    if inspect.isawaitable(responses):
        await responses
        return
    async with contextlib.aclosing(responses):
        async for response in responses:
            await context.write(response)


async def _until_a_reset_shows() -> None:
    """Lets the event loop turn as often as gRPC needs to cancel this task, if its caller has reset the call.

    To answer a call that is reset costs several times as much.
    """
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _no_credential() -> UnauthenticatedError:
    """One answer for missing, malformed, unknown, expired and revoked."""
    return UnauthenticatedError("no valid credential: send 'authorization: Bearer <key>'")


async def _abort(context: _Context, error: VeneerError) -> None:
    await _until_a_reset_shows()
    await context.abort(code_of(error), message_of(error), trailers_of(error))


def _code_name(code: Any) -> str:
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((status.name for status in grpc.StatusCode if status.value[0] == code), "OK")


def _trace(error: BaseException) -> list[str]:
    """Where an error came from: frames and types without messages, since a message may quote a prompt or a credential."""
    lines: list[str] = []
    link: BaseException | None = error
    while link is not None:
        lines.append(type(link).__name__)
        lines += [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(link.__traceback__)]
        link = link.__cause__ or link.__context__
    return lines
