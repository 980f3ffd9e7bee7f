"""What Resolve costs beside a call that does nothing, on the same server: asked before, and never asked before."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from benchmarks.control_stack import control_stack
from benchmarks.orphans import BASE
from benchmarks.report import Row
from benchmarks.scale import load, secret_of
from controlplane.vault import Vault, secret_digest
from veneer.controlplane.v1 import nodes_pb2
from veneer.local.stack import LocalStack

_RESOLVE = "/veneer.controlplane.v1.NodeService/Resolve"
_EMPTY = "/grpc.health.v1.Health/Check"
_IN_FLIGHT = 64
_AT_LEAST = 2000
"""Calls a round of what takes no time."""


def measure_resolving(folder: Path, *, callers: int, rounds: int) -> list[Row]:
    """Asks for callers that nobody asked for yet, round by round, and then for those of one round again and again.

    Args:
        folder: State goes there.
        callers: Keys a round, each of another tenant with an adapter of its own.
        rounds: Alternations of Resolve and the empty call of which the median counts.
    """
    with control_stack(folder) as stack:
        vault = Vault((stack.folder / "pepper").read_bytes().strip())
        num_callers = callers * (rounds + 1)  # the first round opens connections
        load(stack.postgres.url(scheme="postgresql"), vault, versions=10 * num_callers, callers=num_callers)
        warm, cold = asyncio.run(_compare(stack, callers=callers, rounds=rounds))
    return [Row("resolve_warm", warm, target=">= 0.7"), Row("resolve_cold", cold, target=">= 0.15")]


async def _compare(stack: LocalStack, *, callers: int, rounds: int) -> tuple[float, float]:
    """Returns calls/s of Resolve over those of the empty call, asked before and not.

    Raises:
        RuntimeError: An answer is none.
    """
    secret = json.loads((stack.folder / "node.key").read_text())["secret"]
    metadata = (("authorization", f"Bearer {secret}"),)
    empty = [health_pb2.HealthCheckRequest().SerializeToString()] * max(callers, _AT_LEAST)
    ratios: dict[str, list[float]] = {"cold": [], "warm": []}
    async with grpc.aio.insecure_channel(stack.state.control) as channel:
        resolve: Any = channel.unary_unary(_RESOLVE)
        check: Any = channel.unary_unary(_EMPTY)
        for number in range(-1, 2 * rounds):
            kind = "cold" if number < rounds else "warm"
            first = callers * (1 + min(number, rounds - 1)) + 1
            requests = [_request(one) for one in range(first, first + callers)]
            if kind == "warm":
                requests *= math.ceil(_AT_LEAST / callers)
            rates = await _rate(resolve, requests, metadata), await _rate(check, empty, ())
            if number < 0:
                answer = await resolve(requests[0], metadata=metadata)
                if len(nodes_pb2.ResolveResponse.FromString(answer).resolution.arms) != 1:
                    raise RuntimeError("Resolve finds nothing")
                continue
            print(f"{kind}: Resolve {rates[0]:.0f}, empty call {rates[1]:.0f} a second", flush=True)
            ratios[kind].append(rates[0] / rates[1])
    return statistics.median(ratios["warm"]), statistics.median(ratios["cold"])


def _request(number: int) -> bytes:
    return nodes_pb2.ResolveRequest(
        key_digest=secret_digest(secret_of(number)),
        target=nodes_pb2.AdapterTarget(adapter="a"),
        base_digest=BASE.digest,
    ).SerializeToString()


async def _rate(call: Any, requests: Sequence[bytes], metadata: tuple[tuple[str, str], ...]) -> float:
    """Sends each request once, so many at a time; returns how many were answered a second."""
    line = iter(requests)

    async def work() -> None:
        for request in line:
            await call(request, metadata=metadata, timeout=60.0)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(_IN_FLIGHT)))
    return len(requests) / (time.perf_counter() - start)
