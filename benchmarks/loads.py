"""What one load costs: the request that waits for it, and those that run beside it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.fleet import Fleet, ImageFolder, Stream
from benchmarks.report import Row
from benchmarks.workload import percentile
from dataplane.engine.adapters import DeviceAdapters
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Moved
from dataplane.lora.arena import Arena
from dataplane.lora.image_file import open_image
from dataplane.model.config import read_config

RESIDENT = 16
"""Streams that run beside."""
VISITORS_PER_S = 5
WARM = 4
"""Adapters of the resident streams."""
OUTPUT = 200


async def _resident(fleet: Fleet, gaps: list[float]) -> None:
    """Keeps streams on a few adapters running, until it is cancelled, and notes the times between their tokens."""

    async def run(number: int) -> None:
        while True:
            await fleet.stream(number, output_tokens=OUTPUT, gaps_s=gaps)

    async with asyncio.TaskGroup() as group:
        for stream in range(RESIDENT):
            group.create_task(run(stream % WARM))


async def measure_load(images: ImageFolder, *, room: int, seconds: float, rounds: int) -> list[Row]:
    """Runs resident streams beside visitors that come at a rate: all on one warm adapter, or each on one of its own.

    Those lie in host memory, checked, or on the disk, to be read and checked first.
    """
    gaps: dict[str, list[list[float]]] = {"warm": [], "host": [], "disk": []}
    visits: dict[str, list[Stream]] = {"warm": [], "host": [], "disk": []}
    loads, steps = 0, 0
    fresh = iter(range(10, 10**6))
    count = int(VISITORS_PER_S * seconds)
    async with Fleet.started(images, room=room, streams=64, output_tokens=OUTPUT) as fleet:
        for number in range(WARM + 1):
            fleet.stage([number])
            await fleet.stream(number, output_tokens=2)
        for turn, kind in itertools.product(range(1 + rounds), gaps):
            numbers = [WARM if kind == "warm" else next(fresh) for _ in range(count)]
            paths = [images.path(number) for number in numbers]
            if kind == "host":
                fleet.stage(numbers)
            elif kind == "disk":
                await asyncio.to_thread(_forget, paths)
            steps_before, loads_before = (await fleet.state()).steps, len(fleet.loads)
            seen: list[float] = []
            resident = asyncio.create_task(_resident(fleet, seen))
            visitors = []
            for number in numbers:
                if kind == "disk":
                    fleet.stage([number])
                visitors.append(asyncio.create_task(fleet.stream(number, output_tokens=4)))
                await asyncio.sleep(1 / VISITORS_PER_S)
            streams = await asyncio.gather(*visitors)
            resident.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await resident
            if turn:  # the first is for warming up
                gaps[kind].append(seen)
                visits[kind] += streams
            if turn and kind == "disk":
                loads += len(fleet.loads) - loads_before
                steps += (await fleet.state()).steps - steps_before
    tails = {kind: [percentile(seen, 99) for seen in rounds_of] for kind, rounds_of in gaps.items()}
    ttft_s = {kind: statistics.median(stream.ttft_s for stream in streams) for kind, streams in visits.items()}
    ttft_steps = {kind: statistics.fmean(stream.ttft_steps for stream in streams) for kind, streams in visits.items()}
    middles = {kind: percentile([gap for seen in rounds_of for gap in seen], 50) for kind, rounds_of in gaps.items()}
    for kind, tail in tails.items():
        print(
            f"{kind}: between tokens of {RESIDENT} streams p50 {middles[kind] * 1e3:.1f}, p99 "
            f"{statistics.median(tail) * 1e3:.1f} ms; to a visitor's first token p50 {ttft_s[kind] * 1e3:.1f} ms, mean "
            f"{ttft_steps[kind]:.2f} steps",
            flush=True,
        )
    ratios = [disk / warm for warm, disk in zip(tails["warm"], tails["disk"], strict=True)]
    return [
        Row("itl_under_load", statistics.median(ratios), target="<= 1.2"),
        Row("loads_per_100_steps", 100 * loads / steps, unit="loads"),
        Row("cold_ttft_host", ttft_steps["host"] - ttft_steps["warm"], unit="steps", target="<= 1.5"),
        Row("cold_ttft_host_ms", (ttft_s["host"] - ttft_s["warm"]) * 1e3, unit="ms"),
    ]


def measure_copy(images: ImageFolder, *, count: int) -> list[Row]:
    """Brings adapters from host memory to an arena, in turns with one plain copy of as many bytes into another one.

    A load is what the copying thread does and what the step loop does then; waking up is neither's.
    """
    numbers = [number for number in range(4 * count) if number % 10 < 3][:count]
    config, model = EngineConfig(model_dir=str(images.model), max_slots=8), read_config(images.model)
    features = tuple((part.in_features, part.out_features) for part in model.projections)

    def arena() -> Arena:
        return Arena(
            64 << 20,
            unit_bytes=config.arena_unit_bytes,
            max_slots=8,
            num_layers=model.num_layers,
            features=features,
            dtype="bfloat16",
        )

    wake = threading.Event()
    adapters, other = DeviceAdapters(config, arena(), wake=wake), arena().tensor.view(torch.uint8).numpy()
    loads: list[float] = []
    copies: list[float] = []
    size = 0
    try:
        for turn, (place, number) in itertools.product(range(4), enumerate(numbers)):
            version, path = images.version(number), images.path(number)
            if adapters.place_of(version) == "store":
                adapters.stage(version, str(path))
            payload = open_image(path).payload
            size = payload.size
            copies_first = (turn + place) % 2  # who goes second finds the bytes in the processor's caches
            if copies_first:
                copies.append(_copy(other, payload))
            loads.append(_load(adapters, version, wake))
            if not copies_first:
                copies.append(_copy(other, payload))
    finally:
        adapters.stop()
    first = len(numbers)  # touches pages for the first time
    load_s, copy_s = statistics.median(loads[first:]), statistics.median(copies[first:])
    print(f"load {load_s * 1e3:.2f} ms, copy {copy_s * 1e3:.2f} ms, of {size / 1e6:.1f} MB", flush=True)
    return [Row("load_vs_copy", load_s / copy_s, target="<= 1.25"), Row("load_ms", load_s * 1e3, unit="ms")]


def _copy(target: npt.NDArray[np.uint8], payload: npt.NDArray[np.uint8]) -> float:
    """Returns the seconds of a plain copy."""
    start = time.perf_counter()
    target[: payload.size] = payload
    return time.perf_counter() - start


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


def _forget(paths: Iterable[Path]) -> None:
    """Lets the next read of each file come from the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
