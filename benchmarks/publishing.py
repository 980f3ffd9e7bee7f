"""Publishing as tenants see it: versions a second from several clients, and the time from an upload to its first token."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from pathlib import Path

from benchmarks.control_stack import base_of, control_stack, say_calibration, two_mb_adapter
from benchmarks.report import Row
from veneer.artifact import BaseDescription
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2
from veneer.local.stack import LocalStack

_CLIENTS = 8
_ADAPTERS = 4
_REPEAT_EVERY = 8
"""Every so manieth publish is sent twice at the same time under one request_id, as a client does that lost its answer."""


def measure_publishing(folder: Path, *, uploads: int, rounds: int) -> list[Row]:
    """Publishes from eight clients at once, then from one client that asks each version for a token."""
    with control_stack(folder) as stack:
        base = base_of(folder)
        files = [two_mb_adapter(folder / "adapters", base, number) for number in range(uploads + rounds + 1)]
        say_calibration()
        rows = asyncio.run(_publish_from_all(stack, base, files[:uploads]))
        rows += asyncio.run(_ask_each(stack, base, files[uploads:]))
        say_calibration()
    return rows


async def _publish_from_all(stack: LocalStack, base: BaseDescription, files: list[Path]) -> list[Row]:
    """Returns publishes a second.

    Raises:
        RuntimeError: A version is missing, is there twice, or has another number than its publisher was told.
    """
    told: dict[str, tuple[str, int]] = {}
    line = iter(enumerate(files))
    clients = [_client(stack) for _ in range(_CLIENTS)]

    async def publish(client: Client, number: int, path: Path) -> tuple[str, tuple[str, int]]:
        adapter = f"rate-{number % _ADAPTERS}"
        published = await client.publish(path, adapter=adapter, base=base.digest, request_id=f"rate-{number}")
        return published.version.digest, (adapter, published.version.number)

    async def work(client: Client) -> None:
        for number, path in line:
            times = 2 if number % _REPEAT_EVERY == 0 else 1
            answers = await asyncio.gather(*(publish(client, number, path) for _ in range(times)))
            if len(set(answers)) != 1:
                raise RuntimeError(f"one publish was answered in two ways: {answers}")
            told.update(answers)

    start = time.perf_counter()
    await asyncio.gather(*map(work, clients))
    seconds = time.perf_counter() - start
    found = [
        (version.digest, (f"rate-{adapter}", version.number))
        for adapter in range(_ADAPTERS)
        for version in await clients[0].versions(f"rate-{adapter}")
    ]
    for client in clients:
        await client.close()
    if len(found) != len(files) or dict(found) != told:
        raise RuntimeError(f"{len(files)} versions were published, {len(found)} are listed, {len(told)} were told")
    per_adapter = [sorted(number for _, (name, number) in found if name == f"rate-{one}") for one in range(_ADAPTERS)]
    if any(numbers != list(range(1, len(numbers) + 1)) for numbers in per_adapter):
        raise RuntimeError("the numbers of the versions have a gap or one twice")
    print(f"{len(files)} publishes from {_CLIENTS} clients in {seconds:.1f} s; each is listed once", flush=True)
    return [Row("publish_rate", len(files) / seconds, "publishes/s", ">= 5")]


async def _ask_each(stack: LocalStack, base: BaseDescription, files: list[Path]) -> list[Row]:
    """Returns the median of the seconds from the start of a publish to the first token; the first one warms up."""
    sampling = generation_pb2.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    waits = []
    async with _client(stack) as client:
        for number, path in zip(itertools.count(), files, strict=False):
            start = time.perf_counter()
            adapter = f"first-{number}"
            published = await client.publish(path, adapter=adapter, base=base.digest)
            uploaded = time.perf_counter()
            async for event in client.generate([5, 6, 7], adapter=adapter, sampling=sampling):
                if isinstance(event, generation_pb2.Served) and event.version != published.version.digest:
                    raise RuntimeError("another version answered")
                if isinstance(event, generation_pb2.Chunk) and event.ids:
                    waits.append((time.perf_counter() - start, uploaded - start))
    whole = [whole for whole, _ in waits[1:]]
    upload = statistics.median(upload for _, upload in waits[1:])
    median = statistics.median(whole)
    print(f"publish to first token: median {median:.3f}, longest {max(whole):.3f} s, of it publish {upload:.3f} s", flush=True)
    return [Row("publish_to_first_token_s", median, "s", "<= 2"), Row("publish_to_first_token_s/max", max(whole), "s")]


def _client(stack: LocalStack) -> Client:
    state = stack.state
    return Client(control=state.control, data=state.data, key=state.tenant_key or "", timeout_s=120.0)
