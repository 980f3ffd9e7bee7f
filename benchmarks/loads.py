"""What one load costs: the request that waits for it, and those that run beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import threading
import time
from pathlib import Path

import torch

from benchmarks.fleet import UNIT_BYTES, Fleet, ImageFolder
from benchmarks.report import Row
from benchmarks.workload import percentile
from dataplane.engine.adapters import DeviceAdapters
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Moved
from dataplane.lora.arena import Arena
from dataplane.lora.image import open_image
from dataplane.model.config import read_config

RESIDENT = 16
"""Streams that run beside."""
LOADS_PER_S = 5
OUTPUT = 200


async def _resident(fleet: Fleet, gaps: list[float]) -> None:
    """Keeps streams on a few adapters running, until it is cancelled, and notes the times between their tokens."""

    async def run(number: int) -> None:
        while True:
            await fleet.stream(number, output_tokens=OUTPUT, gaps_s=gaps)

    async with asyncio.TaskGroup() as group:
        for stream in range(RESIDENT):
            group.create_task(run(stream % 4))


async def measure_load(images: ImageFolder, *, room: int, seconds: float, rounds: int) -> list[Row]:
    """Runs resident streams beside requests that come at a rate: all on one warm adapter, or each on one that must be loaded."""
    async with Fleet.started(images, room=room, streams=2 * RESIDENT, output_tokens=OUTPUT, max_sequences=64) as fleet:
        fresh = iter(range(10, 10**6))
        for number in (*range(4), 4):
            fleet.stage([number])
            await fleet.stream(number, output_tokens=2)
        tails: dict[str, list[float]] = {"warm": [], "cold": []}
        ttfts: dict[str, list[tuple[float, int]]] = {"warm": [], "cold": []}
        per_100 = 0.0
        for kind in ("warm", "cold") * (1 + rounds):
            count = int(LOADS_PER_S * seconds)
            numbers = [next(fresh) if kind == "cold" else 4 for _ in range(count)]
            fleet.stage(numbers)
            for number in numbers:
                _forget(images.path(number))
            await fleet.state()
            gaps: list[float] = []
            resident = asyncio.create_task(_resident(fleet, gaps))
            steps_before, loads_before = (await fleet.state()).steps, len(fleet.loads)
            visitors = []
            for number in numbers:
                visitors.append(asyncio.create_task(fleet.stream(number, output_tokens=4)))
                await asyncio.sleep(1 / LOADS_PER_S)
            streams = await asyncio.gather(*visitors)
            steps = (await fleet.state()).steps - steps_before
            if kind == "cold":
                per_100 = 100 * (len(fleet.loads) - loads_before) / steps
            resident.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await resident
            tails[kind].append(percentile(gaps, 99))
            ttfts[kind] += [(stream.ttft_s, stream.ttft_steps) for stream in streams]
    ratios = [cold / warm for warm, cold in list(zip(tails["warm"], tails["cold"], strict=True))[1:]]  # after warming up
    for kind, tail in tails.items():
        print(
            f"{kind}: between tokens of {RESIDENT} streams p99 {statistics.median(tail) * 1e3:.1f} ms, to the first token "
            f"of a visitor p50 {statistics.median(s for s, _ in ttfts[kind]) * 1e3:.1f} ms",
            flush=True,
        )
    seconds_more = statistics.median(s for s, _ in ttfts["cold"]) - statistics.median(s for s, _ in ttfts["warm"])
    steps_more = statistics.fmean(n for _, n in ttfts["cold"]) - statistics.fmean(n for _, n in ttfts["warm"])
    return [
        Row("itl_under_load", statistics.median(ratios), target="<= 1.2"),
        Row("loads_per_100_steps", per_100, unit="loads"),
        Row("cold_ttft_host", steps_more, unit="steps", target="<= 1.5"),
        Row("cold_ttft_host_ms", seconds_more * 1e3, unit="ms"),
    ]


def measure_copy(images: ImageFolder, *, count: int) -> list[Row]:
    """Brings adapters from host memory to an arena, in turns with one plain copy of as many bytes into another one.

    A load is what the copying thread does and what the step loop does then; waking up is neither's.
    """
    numbers = [number for number in range(4 * count) if number % 10 < 3][:count]
    model = read_config(images.model)
    features = tuple((part.in_features, part.out_features) for part in model.projections)

    def arena() -> Arena:
        return Arena(
            64 << 20,
            unit_bytes=UNIT_BYTES,
            max_slots=8,
            num_layers=model.num_layers,
            features=features,
            dtype="bfloat16",
        )

    wake = threading.Event()
    config = EngineConfig(model_dir=str(images.model), arena_unit_bytes=UNIT_BYTES, max_slots=8)
    adapters, other = DeviceAdapters(config, arena(), wake=wake), arena().tensor.view(torch.uint8).numpy()
    loads: list[float] = []
    copies: list[float] = []
    size = 0
    try:
        for number in numbers * 4:
            version, path = images.version(number), images.path(number)
            if not adapters.was_staged(version):
                adapters.stage(version, str(path))
            payload = open_image(path).payload
            size = payload.size
            loads.append(_load(adapters, version, wake))
            start = time.perf_counter()
            other[:size] = payload
            copies.append(time.perf_counter() - start)
    finally:
        adapters.stop()
    first = len(numbers)  # touches pages for the first time
    load_s, copy_s = statistics.median(loads[first:]), statistics.median(copies[first:])
    print(f"load {load_s * 1e3:.2f} ms, copy {copy_s * 1e3:.2f} ms, of {size / 1e6:.1f} MB", flush=True)
    return [Row("load_vs_copy", load_s / copy_s, target="<= 1.25"), Row("load_ms", load_s * 1e3, unit="ms")]


def _load(adapters: DeviceAdapters, version: str, wake: threading.Event) -> float:
    """Has a version loaded, and takes it off again; returns the seconds that both threads worked on the load."""
    assert adapters.acquire(version) is None, "it is not there yet"
    while True:
        wake.clear()
        start = time.perf_counter()
        notes = adapters.settle()
        settled = time.perf_counter() - start
        for note in notes:
            if isinstance(note, Moved) and note.place == "device":
                lease = adapters.acquire(version)
                assert lease is not None, "it was loaded"
                adapters.withdraw(version)
                adapters.evict(version)
                adapters.release(lease)
                return note.seconds + settled
        wake.wait(10.0)


def _forget(path: Path) -> None:
    """Lets the next read of a file come from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
