"""What dripping uploads of two tenants do to a third one's publishes."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from benchmarks.control_stack import base_of, control_stack, say_calibration, two_mb_adapter
from benchmarks.report import Row
from veneer.artifact import BaseDescription
from veneer.client import Client
from veneer.controlplane.v1 import catalog_pb2, catalog_pb2_grpc

_ATTACKERS = ("drip-one", "drip-two")
_UPLOADS_EACH = 6
_DRIP_S = 2.0
_AGAIN_S = 0.2
_ALL_BEGUN_S = 3.0
"""Time for all dripping uploads to begin, and for those that have no place to wait for one."""


def measure_uploads(folder: Path, *, rounds: int) -> list[Row]:
    """Publishes alone, then beside twelve uploads of two tenants that send a byte every two seconds, and begin again when ended.

    Args:
        folder: Models and state go there.
        rounds: Publishes of the third tenant in each of three turns: alone, beside the uploads, alone.
    """
    with control_stack(folder) as stack:
        keys = [stack.add_tenant(name).tenant_key or "" for name in _ATTACKERS]
        victim = stack.add_tenant("third").tenant_key or ""
        base = base_of(folder)
        files = iter([two_mb_adapter(folder / "adapters", base, number) for number in range(3 * rounds + 1)])
        say_calibration()
        rows = asyncio.run(_measure(stack.state.control, keys, victim, base, files, rounds=rounds))
        say_calibration()
    return rows


async def _measure(
    control: str, keys: list[str], victim: str, base: BaseDescription, folders: Iterator[Path], *, rounds: int
) -> list[Row]:
    async with Client(control=control, key=victim, timeout_s=120.0) as client:

        async def publish() -> float:
            start = time.perf_counter()
            await client.publish(next(folders), adapter="third", base=base.digest)
            return time.perf_counter() - start

        await publish()  # warms up
        before = [await publish() for _ in range(rounds)]
        async with _dripping(control, keys, base) as ends:
            await asyncio.sleep(_ALL_BEGUN_S)
            beside = [await publish() for _ in range(rounds)]
        after = [await publish() for _ in range(rounds)]
    alone_s, beside_s = statistics.median(before + after), statistics.median(beside)
    print(f"a publish takes {alone_s:.3f} s alone, {beside_s:.3f} s (longest {max(beside):.3f} s) beside the uploads", flush=True)
    print(f"dripping uploads ended: {dict(ends)}", flush=True)
    return [
        Row("publish_slowdown", beside_s / alone_s, "ratio", "<= 2"),
        Row("publish_slowdown/alone_s", alone_s, "s"),
        Row("publish_slowdown/beside_s", beside_s, "s"),
        Row("publish_slowdown/longest_s", max(beside), "s"),
    ]


@asynccontextmanager
async def _dripping(control: str, keys: list[str], base: BaseDescription) -> AsyncIterator[Counter[str]]:
    """Keeps the uploads going; yields how they ended, by status."""
    ends: Counter[str] = Counter()
    numbers = itertools.count()

    async def parts(number: int) -> AsyncIterator[catalog_pb2.PublishRequest]:
        header = catalog_pb2.PublishHeader(adapter="slow", base=base.digest, request_id=f"drip-{number}")
        yield catalog_pb2.PublishRequest(header=header)
        while True:
            yield catalog_pb2.PublishRequest(part=catalog_pb2.PublishPart(file=catalog_pb2.ADAPTER_FILE_CONFIG, data=b" "))
            await asyncio.sleep(_DRIP_S)

    async def drip(channel: grpc.aio.Channel, key: str) -> None:
        stub: catalog_pb2_grpc.CatalogServiceAsyncStub = catalog_pb2_grpc.CatalogServiceStub(channel)
        while True:
            try:
                await stub.Publish(parts(next(numbers)), metadata=(("authorization", f"Bearer {key}"),), timeout=600)
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1
            await asyncio.sleep(_AGAIN_S)

    async with grpc.aio.insecure_channel(control) as channel:
        tasks = [asyncio.create_task(drip(channel, key)) for key in keys for _ in range(_UPLOADS_EACH)]
        try:
            yield ends
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
