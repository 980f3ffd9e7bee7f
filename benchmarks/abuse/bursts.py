"""Bursts of honest calls, and connections that reset their streams: how many calls end CANCELLED, at the worse of both planes."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from benchmarks.control_stack import control_stack
from benchmarks.report import Row
from veneer.channel import bearer
from veneer.controlplane.v1 import tenants_pb2, tenants_pb2_grpc
from veneer.dataplane.v1 import generation_pb2, generation_pb2_grpc

_CONNECTIONS = 4
_DEADLINE_S = 240.0
_AT_ONCE = 8
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
_METHODS = {
    "control": "/veneer.controlplane.v1.TenantService/ListKeys",
    "data": "/veneer.dataplane.v1.GenerationService/Generate",
}

_Call = Callable[[grpc.aio.Channel], Awaitable[str]]


def measure_bursts(folder: Path, *, calls: int, seconds: float) -> list[Row]:
    """Returns `burst_cancelled` and `reset_cancelled`. No call is repeated by gRPC.

    Args:
        folder: Both planes go there.
        calls: Calls at once, over four connections, of each plane in turn.
        seconds: How long a connection without a key opens and resets 4,000 streams a second, beside eight calls at a time.
    """
    burst, reset = Counter[str](), Counter[str]()
    with control_stack(folder) as stack:
        state = stack.state
        asked = {"control": (state.control, _list_keys(state.tenant_key)), "data": (state.data, _generate(state.tenant_key))}
        for plane, (address, call) in asked.items():
            codes = asyncio.run(_at_once(address, call, calls))
            print(f"{plane}: {calls} calls at once: {dict(codes)}", flush=True)
            burst[plane] = codes["CANCELLED"]
            codes, opened = asyncio.run(_beside_resets(address, _METHODS[plane], call, seconds))
            print(f"{plane}: beside {opened} streams that were reset: {dict(codes)}", flush=True)
            reset[plane] = codes["CANCELLED"]
    return [
        Row("burst_cancelled", max(burst.values()), "calls", "<= 0"),
        Row("reset_cancelled", max(reset.values()), "calls", "<= 0"),
    ]


def _list_keys(key: str) -> _Call:
    async def call(channel: grpc.aio.Channel) -> str:
        stub: Any = tenants_pb2_grpc.TenantServiceStub(channel)
        return await _code(stub.ListKeys(tenants_pb2.ListKeysRequest(), metadata=bearer(key), timeout=_DEADLINE_S))

    return call


def _generate(key: str) -> _Call:
    request = generation_pb2.GenerateRequest(text="hi", sampling=generation_pb2.SamplingParams(max_tokens=1))

    async def call(channel: grpc.aio.Channel) -> str:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        stream = stub.Generate(request, metadata=bearer(key), timeout=_DEADLINE_S)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in stream:
                pass
        return await _code(stream)

    return call


async def _code(call: Any) -> str:
    return str((await call.code()).name)


async def _at_once(address: str, call: _Call, calls: int) -> Counter[str]:
    async with contextlib.AsyncExitStack() as stack:
        opened = [grpc.aio.insecure_channel(address, options=_OPTIONS) for _ in range(_CONNECTIONS)]
        channels = [await stack.enter_async_context(channel) for channel in opened]
        return Counter(await asyncio.gather(*(call(channels[number % _CONNECTIONS]) for number in range(calls))))


async def _beside_resets(address: str, method: str, call: _Call, seconds: float) -> tuple[Counter[str], int]:
    attack = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.abuse.resetting", address, method, "--seconds", str(seconds), stdout=subprocess.PIPE
    )
    attacking = asyncio.create_task(attack.communicate())
    codes = Counter[str]()
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        while not attacking.done():
            codes.update(await asyncio.gather(*(call(channel) for _ in range(_AT_ONCE))))
    opened, _ = await attacking
    return codes, int(opened)
