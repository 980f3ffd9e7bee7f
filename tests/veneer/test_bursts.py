"""Many calls at once, and connections that reset theirs: calls of others are answered, and none ends CANCELLED."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest

from tests.veneer.raw_client import RST_STREAM, RawClient
from tests.veneer.test_server import OPERATOR, RESIDENCY, addresses, health, own_connection, plane
from veneer.dataplane.v1 import admin_pb2, admin_pb2_grpc
from veneer.server import MAX_STREAMS_PER_CONNECTION, PlaneServer

REFUSALS = {0x7, 0xB}  # REFUSED_STREAM, ENHANCE_YOUR_CALM


@pytest.fixture
async def server() -> AsyncIterator[PlaneServer]:
    server = plane()
    await server.start()
    yield server
    await server.stop(grace_s=0)


async def call(channel: grpc.aio.Channel, codes: Counter[str]) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    try:
        await stub.GetResidency(admin_pb2.GetResidencyRequest(), metadata=(("authorization", f"Bearer {OPERATOR}"),), timeout=120)
        codes["OK"] += 1
    except grpc.aio.AioRpcError as error:
        codes[error.code().name] += 1


async def test_thousands_of_calls_at_once_are_all_answered(server: PlaneServer) -> None:
    codes = Counter[str]()
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(own_connection(addresses(server).operators)) for _ in range(4)]
        burst = asyncio.gather(*(call(channels[number % 4], codes) for number in range(4000)))
        async with own_connection(addresses(server).callers) as other:
            assert await health(other) == "SERVING", "the other listener answers meanwhile"
        await burst
    assert codes == {"OK": 4000}


async def test_a_connection_that_resets_its_streams_ends_no_call_of_others(server: PlaneServer) -> None:
    codes = Counter[str]()
    attack = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.abuse.resetting", addresses(server).operators, RESIDENCY,
        "--per-s", "20000", "--seconds", "60", "--max-streams", "40000", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    attacking = asyncio.create_task(attack.communicate())
    async with own_connection(addresses(server).operators) as channel:
        while not attacking.done():
            await asyncio.gather(*(call(channel, codes) for _ in range(8)))
    opened, _ = await attacking
    assert int(opened) == 40_000
    assert set(codes) == {"OK"}


async def test_streams_beyond_the_bound_of_a_connection_are_refused_before_they_take_a_place(server: PlaneServer) -> None:
    async with RawClient(addresses(server).operators) as client:
        for number in range(MAX_STREAMS_PER_CONNECTION + 500):
            client.open(2 * number + 1, RESIDENCY, key=OPERATOR)
        refused = set[int]()
        while len(refused) < 400:  # gRPC counts streams a moment late
            kind, stream, payload = await client.read()
            if kind == RST_STREAM:
                assert int.from_bytes(payload) in REFUSALS
                refused.add(stream)
        assert len(server._running) <= MAX_STREAMS_PER_CONNECTION + 100
