"""What happens around every call of a plane: identity, validation, errors, the log line, metrics.

One interceptor does it all, because each layer around a stream costs time per message, and because the order matters: nothing of
a request is looked at before its caller is known, and every outcome, refusals included, is counted and logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError, Message
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from veneer.access import Authenticator, Identity, ListenerName, Rule, Rules, current_identity, key_digest_of, set_identity
from veneer.errors import InternalError, InvalidArgumentError, PermissionDeniedError, UnauthenticatedError, VeneerError
from veneer.statuses import code_of, message_of, trailers_of
from veneer.validation import validate

_LOG = logging.getLogger(__name__)
_ALARMING = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE"})  # codes that an operator should look at
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

_Context = grpc.aio.ServicerContext[Any, Any]


class CallMetrics:
    """Counts calls by method and code. Only methods that are served get a label, so that callers cannot make new ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("listener", "method")
        self._ended = Counter("veneer_grpc_calls", "Calls that ended.", (*labels, "code"), registry=registry)
        self._seconds = Histogram("veneer_grpc_call_seconds", "Time of calls.", labels, registry=registry, buckets=_SECONDS)
        self._running = Gauge("veneer_grpc_calls_running", "Calls that run.", labels, registry=registry)

    def started(self, listener: str, method: str) -> None:
        """A call begins."""
        self._running.labels(listener, method).inc()

    def ended(self, listener: str, method: str, code: str, *, seconds: float) -> None:
        """A call that had begun is over."""
        self._running.labels(listener, method).dec()
        self._ended.labels(listener, method, code).inc()
        self._seconds.labels(listener, method).observe(seconds)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Guards all calls of one listener. Stateless between calls; used by the event loop's thread only.

    A streaming method reads its requests from the iterator that it is given, never by `context.read()`: only the iterator
    validates.
    """

    def __init__(self, *, listener: ListenerName, rules: Rules, authenticator: Authenticator, metrics: CallMetrics) -> None:
        self._listener: ListenerName = listener
        self._rules = rules
        self._authenticator = authenticator
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the method's handler; see the module."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # no such method: UNIMPLEMENTED
        return self._wrap(handler, handler_call_details.method)

    def _wrap(self, handler: grpc.RpcMethodHandler[Any, Any], method: str) -> grpc.RpcMethodHandler[Any, Any]:
        codec = {
            "request_deserializer": _decoder(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        rule = self._rules.get(method)

        if not handler.request_streaming and not handler.response_streaming:
            unary_unary: Any = handler.unary_unary

            async def call_unary_unary(request: Message, context: _Context) -> Any:
                async with self._call(method, rule, context):
                    _check(request)
                    return await unary_unary(request, context)

            return grpc.unary_unary_rpc_method_handler(call_unary_unary, **codec)

        if not handler.response_streaming:
            stream_unary: Any = handler.stream_unary

            async def call_stream_unary(requests: AsyncIterator[Message], context: _Context) -> Any:
                async with self._call(method, rule, context):
                    return await stream_unary(_validated(requests), context)

            return grpc.stream_unary_rpc_method_handler(call_stream_unary, **codec)

        if not handler.request_streaming:
            unary_stream: Any = handler.unary_stream

            async def call_unary_stream(request: Message, context: _Context) -> None:
                async with self._call(method, rule, context):
                    _check(request)
                    await _write_all(unary_stream(request, context), context)

            return grpc.unary_stream_rpc_method_handler(call_unary_stream, **codec)

        stream_stream: Any = handler.stream_stream

        async def call_stream_stream(requests: AsyncIterator[Message], context: _Context) -> None:
            async with self._call(method, rule, context):
                await _write_all(stream_stream(_validated(requests), context), context)

        return grpc.stream_stream_rpc_method_handler(call_stream_stream, **codec)

    @contextlib.asynccontextmanager
    async def _call(self, method: str, rule: Rule | None, context: _Context) -> AsyncIterator[None]:
        """One call from its first look at the credential to its log line."""
        start = time.monotonic()
        self._metrics.started(self._listener, method)
        identity: Identity | None = None
        code = "UNKNOWN"
        try:
            identity = await self._admit(rule, context)
            yield
            code = _code_name(context.code())
        except grpc.aio.AbortError:
            code = _code_name(context.code())
            raise
        except asyncio.CancelledError:
            remaining = cast("float | None", context.time_remaining())  # None without a deadline, whatever its stub says
            code = "CANCELLED" if remaining is None or remaining > 0 else "DEADLINE_EXCEEDED"
            raise
        except VeneerError as error:
            code = error.status
            await _abort(context, error)
        except Exception as error:  # noqa: BLE001  a fault of one call must not show its text to the caller nor end the server
            code = "INTERNAL"
            _LOG.error("call failed unexpectedly", extra={"method": method, "trace": _trace(error)})
            await _abort(context, InternalError("internal error"))
        finally:
            seconds = time.monotonic() - start
            self._metrics.ended(self._listener, method, code, seconds=seconds)
            if identity is not None:
                identity = current_identity()  # a method that was open to any bearer may have found out whose key it is
            self._log(method, rule, identity, code=code, seconds=seconds)

    async def _admit(self, rule: Rule | None, context: _Context) -> Identity | None:
        if rule is None:
            raise PermissionDeniedError("this method is not for anyone")
        if rule.open:
            return None
        metadata: dict[str, str | bytes] = dict(tuple(context.invocation_metadata() or ()))
        key_digest = key_digest_of(metadata.get("authorization"))
        identity: Identity | None = None
        if key_digest is not None:
            if rule.kinds == {"bearer"}:
                identity = Identity(kind="bearer", key_digest=key_digest)
            else:
                identity = await self._authenticator.authenticate(key_digest)
        if identity is None:  # one answer for missing, malformed, unknown, expired and revoked
            raise UnauthenticatedError("no valid credential: send 'authorization: Bearer <key>'")
        rule.admit(identity, self._listener)
        set_identity(identity)
        return identity

    def _log(self, method: str, rule: Rule | None, identity: Identity | None, *, code: str, seconds: float) -> None:
        facts: dict[str, object] = {"method": method, "listener": self._listener, "code": code, "seconds": round(seconds, 6)}
        if identity is not None:
            facts |= {"kind": identity.kind, "key_id": identity.key_id, "tenant": identity.tenant}
        level = logging.WARNING if code in _ALARMING else logging.DEBUG if rule is not None and rule.open else logging.INFO
        _LOG.log(level, "call ended", extra=facts)


async def _validated(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
    async for request in requests:
        _check(request)
        yield request


def _decoder(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Has bytes that are no message (invalid UTF-8 among them) refused by `_check`; gRPC would answer UNKNOWN."""

    def decoded(data: bytes) -> Any:
        assert decode is not None
        try:
            return decode(data)
        except DecodeError:
            return None

    return None if decode is None else decoded


def _check(request: Message | None) -> None:
    if request is None:
        raise InvalidArgumentError("the request's bytes are no message of its type")
    validate(request)


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


async def _abort(context: _Context, error: VeneerError) -> None:
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
