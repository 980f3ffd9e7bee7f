"""A server with one method of each kind, whose bodies the test brings."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from veneer.access import OPEN_RULES, Identity, Rule
from veneer.call_records import CallMetrics
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import VeneerError
from veneer.interceptors import CallInterceptor, Shortcut
from veneer.statuses import error_of

SECRET = "vnr_" + "a" * 43

REVOKED = "vnr_" + "r" * 43

OPERATOR = "vnr_" + "o" * 43

KINDS = ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream")

GOOD = pb.GenerateRequest(text="hello")

BAD = pb.GenerateRequest(sampling=pb.SamplingParams(max_tokens=0, stop=["ok", "x" * 200]))

CANARY = "canary-prompt"

Body = Callable[[grpc.aio.ServicerContext[Any, Any]], AsyncGenerator[pb.GenerateResponse]]


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class Keys:
    """Knows one tenant key and one operator key."""

    asked = 0

    async def authenticate(self, key_digest: bytes) -> Identity | None:
        self.asked += 1
        known = {
            digest(SECRET): Identity(
                kind="tenant", key_digest=key_digest, key_id="k1", tenant="acme", roles=frozenset({"caller"})
            ),
            digest(OPERATOR): Identity(kind="operator", key_digest=key_digest, key_id="o1"),
        }
        return known.get(key_digest)


@dataclass(frozen=True)
class Raw:
    """Bytes in place of a message."""

    data: bytes

    def SerializeToString(self) -> bytes:
        return self.data


async def one_response(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[pb.GenerateResponse]:
    yield pb.GenerateResponse(finish=pb.Finish(completion_tokens=1))


@dataclass
class Plane:
    """A server with one method of each kind whose body the test sets."""

    channel: grpc.aio.Channel
    registry: CollectorRegistry
    keys: Keys
    body: Body = one_response
    seen: list[pb.GenerateRequest] = field(default_factory=list)
    num_started: Counter[str] = field(default_factory=Counter)

    async def call(
        self, kind: str, *requests: pb.GenerateRequest, secret: str | None = SECRET, deadline_s: float = 20
    ) -> list[Any]:
        metadata = () if secret is None else (("authorization", f"Bearer {secret}"),)
        call = self.start(kind, *requests, metadata=metadata, deadline_s=deadline_s)
        return [response async for response in call] if kind.endswith("Stream") else [await call]

    def start(self, kind: str, *requests: pb.GenerateRequest, metadata: Any, deadline_s: float = 20) -> Any:
        name = {"UnaryUnary": "unary_unary", "UnaryStream": "unary_stream", "StreamUnary": "stream_unary"}.get(
            kind, "stream_stream"
        )
        method = getattr(self.channel, name)(
            f"/test.Four/{kind}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=pb.GenerateResponse.FromString,
        )
        self.num_started[kind] += 1
        argument = iter(requests) if kind.startswith("Stream") else requests[0]
        return method(argument, metadata=metadata, timeout=deadline_s)

    def count(self, kind: str, code: str) -> float:
        labels = {"listener": "callers", "method": f"/test.Four/{kind}", "code": code}
        return self.registry.get_sample_value("veneer_grpc_calls_total", labels) or 0.0

    def running(self) -> float:
        return sum(
            sample.value
            for metric in self.registry.collect()
            if metric.name == "veneer_grpc_calls_running"
            for sample in metric.samples
        )

    async def unary_unary(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        self.seen.append(request)
        return [response async for response in self.body(context)][-1]

    async def unary_stream(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.seen.append(request)
        async with aclosing(self.body(context)) as responses:
            async for response in responses:
                yield response

    async def stream_unary(self, requests: AsyncIterator[pb.GenerateRequest], context: Any) -> pb.GenerateResponse:
        async for request in requests:
            self.seen.append(request)
        return [response async for response in self.body(context)][-1]

    async def stream_stream(
        self, requests: AsyncIterator[pb.GenerateRequest], context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        async for request in requests:
            self.seen.append(request)
        async with aclosing(self.body(context)) as responses:
            async for response in responses:
                yield response

    def handlers(self) -> dict[str, Any]:
        codec = {
            "request_deserializer": pb.GenerateRequest.FromString,
            "response_serializer": pb.GenerateResponse.SerializeToString,
        }
        return {
            "UnaryUnary": grpc.unary_unary_rpc_method_handler(self.unary_unary, **codec),
            "UnaryStream": grpc.unary_stream_rpc_method_handler(self.unary_stream, **codec),
            "StreamUnary": grpc.stream_unary_rpc_method_handler(self.stream_unary, **codec),
            "StreamStream": grpc.stream_stream_rpc_method_handler(self.stream_stream, **codec),
            "Forgotten": grpc.unary_unary_rpc_method_handler(self.unary_unary, **codec),
        }


@asynccontextmanager
async def serving(rule: Rule, shortcuts: Mapping[str, Shortcut] | None = None) -> AsyncIterator[Plane]:
    registry, keys = CollectorRegistry(), Keys()
    rules = {**{f"/test.Four/{kind}": rule for kind in KINDS}, **OPEN_RULES}
    interceptor = CallInterceptor(
        listener="callers", rules=rules, authenticator=keys, metrics=CallMetrics(registry), shortcuts=shortcuts
    )
    server = grpc.aio.server(interceptors=[interceptor])
    port = server.add_insecure_port("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        plane = Plane(channel, registry, keys)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Four", plane.handlers()),))
        await server.start()
        yield plane
        await server.stop(0)
    interceptor.flush()


async def refusal(plane: Plane, kind: str, *requests: pb.GenerateRequest, **options: Any) -> VeneerError:
    """The error of a call that must fail; made again when grpc.aio puts an error of its own in the place of an early answer."""
    while True:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await plane.call(kind, *requests, **options)
        if caught.value.details() != "Internal error from Core":
            return error_of(caught.value)


async def result_of(call: Any) -> Any:
    return await call


async def counted(plane: Plane, kind: str, code: str) -> None:
    """Waits until every call is counted, under this code: the caller may see its end before the server has counted it."""
    await asyncio.wait_for(until(lambda: plane.count(kind, code) == plane.num_started[kind] > 0), 60)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  the condition is a counter of the code under test
        await asyncio.sleep(0)
