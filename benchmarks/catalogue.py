"""A catalogue of thousands of adapters behind both planes, kept between runs: requests that find theirs in the store alone."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.beside import beside
from benchmarks.fleet import PROMPT_TOKENS
from benchmarks.random_adapters import block_bytes, kind_of, write_adapter
from benchmarks.report import Row
from benchmarks.workload import SEED, AdapterKey
from controlplane.blobs import Blobs
from controlplane.catalog import Catalog
from controlplane.db import Database
from controlplane.publish import Publisher, PublishMetrics
from controlplane.publish_order import PublishOrder
from controlplane.settings import Settings
from controlplane.spool import CONFIG, WEIGHTS, Part
from veneer.artifact import BaseDescription, Limits, Report, check, describe_base
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2
from veneer.local.stack import LocalStack

_TENANT = "bench"
_PART_BYTES = 1 << 20
_RESIDENT = 8
_MARGIN = 1.3
"""Room in host memory over the bytes that fit."""


async def _checked(config_path: Path, weights_path: Path, base: BaseDescription, limits: Limits, *, timeout_s: float) -> Report:
    """Checks files of ours without a jail."""
    del timeout_s
    config = await asyncio.to_thread(config_path.read_bytes)
    return (await asyncio.to_thread(check, config, weights_path, base, limits)).report


class Stack:
    """Both planes over a folder of their own, and a tenant with a catalogue. No version is in host memory at the start.

    Args:
        folder: State of the planes; what was published stays there.
        model: Hugging Face folder of the base.
        catalogue: Adapters.
        room: Adapters on the device; ten times as many have room in host memory.
    """

    def __init__(self, folder: Path, model: Path, *, catalogue: int, room: int) -> None:
        self.base = describe_base(model)
        self._catalogue = catalogue
        sizes = [sum(block_bytes(self.base, kind_of(number))) for number in range(catalogue)]
        mean = sum(sizes) // catalogue
        print(f"{catalogue} adapters, {sum(sizes) / 1e9:.2f} GB, in {folder}", flush=True)
        settings: dict[str, str | None] = {
            "max_sequences": "64",
            "kv_bytes": str(1 << 30),
            "arena_bytes": str(room * (max(sizes) + (64 << 10))),
            "max_slots": str(room),
            "host_cache_bytes": str(int(_MARGIN * 10 * room * mean)),
            "redis_url": None,  # no hint and no plan brings what a visitor should find in the store alone
        }
        shutil.rmtree(folder / "cache", ignore_errors=True)
        self.local = LocalStack(folder, model, data_settings=settings)

    @contextlib.contextmanager
    def running(self) -> Iterator[Stack]:
        """Starts both planes and publishes what the catalogue lacks; stops them at the end."""
        with self.local as local:
            local.add_tenant(_TENANT)
            asyncio.run(self._seed())
            yield self

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client with the tenant's key."""
        state = self.local.state
        client = Client(control=state.control, data=state.data, key=state.tenant_key or "", timeout_s=60.0)
        try:
            yield client
        finally:
            await client.close()

    def processes(self) -> dict[str, psutil.Process]:
        """Returns the processes of the planes, by name."""
        control, data = (psutil.Process(plane.process.pid) for plane in (self.local.control_plane, self.local.data_plane))
        return {"controlplane": control, "dataplane": data, "engine": data.children()[0]}

    async def _seed(self) -> None:
        store = (self.local.folder / "store").as_uri()
        settings = Settings(database_url=self.local.postgres.url(user="veneer_app", scheme="postgresql"), store_url=store)
        database = Database(settings)
        publisher = Publisher(database, Blobs(store), settings, check=_checked, metrics=PublishMetrics(CollectorRegistry()))
        try:
            known = await self._published(Catalog(database))
            missing = [key for key in map(kind_of, range(self._catalogue)) if key.name not in known]
            start = time.monotonic()
            line = iter(missing)

            async def work() -> None:
                for key in line:
                    await self._publish(publisher, key)

            await asyncio.gather(work(), work())
            if missing:
                print(f"published {len(missing)} adapters in {time.monotonic() - start:.0f} s", flush=True)
        finally:
            await database.close()

    async def _publish(self, publisher: Publisher, key: AdapterKey) -> None:
        with tempfile.TemporaryDirectory(prefix="veneer-bench-") as folder:
            files = await asyncio.to_thread(write_adapter, Path(folder), self.base, key)
            order = PublishOrder(adapter=key.name, base=self.base.digest, request_id=key.name)
            await publisher.publish(_TENANT, order, parts=_parts(files))

    async def _published(self, catalog: Catalog) -> set[str]:
        known: set[str] = set()
        token = ""
        while True:
            page, token = await catalog.adapters(_TENANT, page_size=0, token=token)
            known |= {adapter.name for adapter in page}
            if not token:
                return known


async def _parts(folder: Path) -> AsyncIterator[Part]:
    for name in (CONFIG, WEIGHTS):
        with (folder / name).open("rb") as file:
            while data := file.read(_PART_BYTES):
                yield Part(name, data)


async def _waits(client: Client, prompt: list[int], *, adapter: str, output_tokens: int) -> AsyncIterator[float]:
    """Runs one request; yields the seconds to its first token, then those between its chunks of tokens."""
    sampling = generation_pb2.SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    last = time.perf_counter()
    async for event in client.generate(prompt, adapter=adapter, sampling=sampling):
        if isinstance(event, generation_pb2.Chunk) and event.ids:
            now = time.perf_counter()
            yield now - last
            last = now


async def _ttft(client: Client, prompt: list[int], *, adapter: str, output_tokens: int = 2) -> float:
    """Runs one request to its end; returns the seconds to its first token."""
    first, *_ = [wait async for wait in _waits(client, prompt, adapter=adapter, output_tokens=output_tokens)]
    return first


async def _hops(address: str) -> dict[str, tuple[float, float]]:
    """Reads from the data plane's page how often a hop of a load was made, and the seconds of all."""
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode())
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        if family.name in ("veneer_adapter_fetch_seconds", "veneer_adapter_load_seconds"):
            for sample in family.samples:
                if sample.name.endswith(("_count", "_sum")):
                    hop = sample.labels.get("part") or f"{sample.labels['origin']} to {sample.labels['target']}"
                    found.setdefault(hop, {})[sample.name.rpartition("_")[2]] = sample.value
    return {hop: (values["count"], values["sum"]) for hop, values in found.items()}


async def measure_store(stack: Stack, *, count: int) -> list[Row]:
    """Sends visitors beside resident streams, in turns on a warm adapter and on one that only the store has."""
    random = np.random.default_rng(SEED)

    def prompt() -> list[int]:
        ids: list[int] = random.integers(10, stack.base.vocab_size, PROMPT_TOKENS).tolist()
        return ids

    line = [kind_of(int(number)) for number in random.permutation(np.arange(_RESIDENT, stack._catalogue))]
    by_kind = {kind: iter([key for key in line if key.modules == kind]) for kind in ("all", "qv")}
    fresh = [next(by_kind["all" if turn % 10 in (1, 4, 8) else "qv"]) for turn in range(count)]  # as many as in the catalogue
    resident = [kind_of(number).name for number in range(_RESIDENT)]
    gaps: list[float] = []
    waits: dict[str, list[float]] = {"warm": [], "cold": []}
    async with stack.client() as client:

        async def run(adapter: str) -> None:
            while True:
                waits = _waits(client, prompt(), adapter=adapter, output_tokens=400)
                await anext(waits)
                async for wait in waits:
                    gaps.append(wait)  # noqa: PERF401 - what came before a cancellation counts

        for adapter in resident:
            await _ttft(client, prompt(), adapter=adapter)
        hops_before = await _hops(stack.local.state.data_metrics)
        async with beside(map(run, resident)):
            await asyncio.sleep(1.0)
            for turn in range(count):
                for kind, adapter in (("warm", resident[turn % _RESIDENT]), ("cold", fresh[turn].name)):
                    await asyncio.sleep(random.uniform(0.0, 0.1))  # each comes at a moment of its own within a step
                    waits[kind].append(await _ttft(client, prompt(), adapter=adapter))
        hops_after = await _hops(stack.local.state.data_metrics)
    cold_s, warm_s = statistics.median(waits["cold"]), statistics.median(waits["warm"])
    step_s = statistics.median(gaps)
    print(
        f"to the first token: cold {cold_s * 1e3:.1f}, warm {warm_s * 1e3:.1f} ms; a step takes {step_s * 1e3:.1f} ms", flush=True
    )
    by_size = {kind: [wait for wait, key in zip(waits["cold"], fresh, strict=True) if key.modules == kind] for kind in by_kind}
    cold = ", ".join(f"on {kind} {statistics.median(seen) * 1e3:.1f} ms" for kind, seen in by_size.items() if seen)
    print(f"cold by modules: {cold}", flush=True)
    means, num_loads = {}, {}
    for hop, (loads, total) in hops_after.items():
        loads_before, total_before = hops_before.get(hop, (0.0, 0.0))
        num_loads[hop] = loads - loads_before
        means[hop] = (total - total_before) / max(1, num_loads[hop])
    print("mean times of hops: " + ", ".join(f"{hop} {seconds * 1e3:.1f} ms" for hop, seconds in means.items()), flush=True)
    return [
        Row("cold_ttft_store", (cold_s - warm_s) / step_s, unit="steps", target="<= 5"),
        Row("cold_ttft_store_ms", (cold_s - warm_s) * 1e3, unit="ms"),
        Row("cold_ttft_store_loads", num_loads.get("store to host", 0.0), unit="loads"),
    ]


async def _settled(stack: Stack, *, readings: int = 70) -> dict[str, int]:
    """Returns the least of some readings of what each process holds: what one takes for a moment is not held.

    They go on for longer than the planes take from one trim of their heaps to the next.
    """
    least: dict[str, int] = {}
    for _ in range(readings):
        await asyncio.sleep(0.5)
        for name, process in stack.processes().items():
            held = process.memory_info().rss
            least[name] = min(held, least.get(name, held))
    return least


async def measure_cycles(stack: Stack, *, first: int, last: int) -> list[Row]:
    """Publishes versions, has each serve a request, and retires the one before; compares what the processes hold."""
    held: dict[int, dict[str, int]] = {}
    adapter, before = f"cycles-{time.time_ns()}", ""
    async with stack.client() as client:
        for cycle in range(1, last + 1):
            key = AdapterKey(time.time_ns(), 4, "qv")
            with tempfile.TemporaryDirectory(prefix="veneer-bench-") as folder:
                files = write_adapter(Path(folder), stack.base, key)
                published = await client.publish(files, adapter=adapter, base=stack.base.digest, alias="stable")
            version = published.version.digest
            await _ttft(client, [1, 2, 3], adapter=adapter, output_tokens=1)
            if before:
                await client.retire(adapter, before)
            before = version
            if cycle in (first, last):
                held[cycle] = await _settled(stack)
                print(f"after {cycle} cycles: " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in held[cycle].items()))
    ratios = {name: held[last][name] / held[first][name] for name in held[last]}
    return [
        Row("rss_cycles", max(ratios.values()), target="<= 1.01"),
        *(Row(f"rss_cycles/{name}", ratio) for name, ratio in ratios.items()),
    ]
