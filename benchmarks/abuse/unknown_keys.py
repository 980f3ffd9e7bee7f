"""Unknown keys: an honest caller's latency beside 200 callers that show a new key with every call.

The attack (`python -m benchmarks.abuse.unknown_keys ADDRESS`) is a process of its own at the lowest priority, so that what it
computes itself takes little of the machine from the planes. Each of its callers shows its next key when the last one was
answered, and so presses as hard as it is let.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from benchmarks.control_stack import control_stack
from benchmarks.report import Row
from veneer.channel import bearer
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2, generation_pb2_grpc

_CALLERS = 200
_WARM_UP = 20


def measure_unknown_keys(folder: Path, *, calls: int) -> list[Row]:
    """Returns `unknown_keys_p99`: p99 of answers of one token to a known key, beside the attack, as a multiple of the p99 alone.

    Args:
        folder: Both planes go there.
        calls: Answers alone, and as many beside the attack, one after the other.
    """
    with control_stack(folder) as stack:
        state = stack.state
        alone_s = asyncio.run(_p99_s(state.data, state.tenant_key, calls))
        attack = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.abuse.unknown_keys", state.data],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert attack.stdout is not None
        attack.stdout.readline()  # all callers have had an answer
        beside_s = asyncio.run(_p99_s(state.data, state.tenant_key, calls))
        codes, _ = attack.communicate("")
    print(
        f"p99 alone {alone_s * 1000:.1f} ms, beside the attack {beside_s * 1000:.1f} ms; the attack got {codes.strip()}",
        flush=True,
    )
    return [Row("unknown_keys_p99", beside_s / alone_s, target="<= 1.5")]


async def _p99_s(address: str, key: str, calls: int) -> float:
    times: list[float] = []
    async with Client(data=address, key=key) as client:
        for _ in range(_WARM_UP + calls):
            start_s = time.perf_counter()
            await client.complete("hello", sampling=generation_pb2.SamplingParams(max_tokens=1))
            times.append(time.perf_counter() - start_s)
    return sorted(times[_WARM_UP:])[int(calls * 0.99)]


async def _attack(address: str) -> None:
    codes, answered = Counter[str](), set[int]()
    all_answered, end = asyncio.Event(), asyncio.Event()
    request = generation_pb2.GenerateRequest(text="hello", sampling=generation_pb2.SamplingParams(max_tokens=1))

    async def caller(number: int, stub: Any) -> None:
        while not end.is_set():
            call = stub.Generate(request, metadata=bearer(f"vnr_{secrets.token_urlsafe(32)}"), timeout=60)
            codes[(await call.code()).name] += 1
            answered.add(number)
            if len(answered) == _CALLERS:
                all_answered.set()

    async with grpc.aio.insecure_channel(address, options=(("grpc.enable_retries", 0),)) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        callers = [asyncio.create_task(caller(number, stub)) for number in range(_CALLERS)]
        await all_answered.wait()
        print("all answered", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        end.set()
        await asyncio.gather(*callers)
    print(dict(codes), flush=True)


if __name__ == "__main__":
    if not sys.argv[1].startswith("127.0.0.1:"):
        raise SystemExit("only addresses of the loopback interface")
    os.nice(19)
    asyncio.run(_attack(sys.argv[1]))
