"""What one load costs: the request that waits for it, and those that run beside it."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.beside import beside
from benchmarks.fleet import Fleet, ImageFolder, Stream
from benchmarks.report import Row
from benchmarks.workload import SEED, percentile
from dataplane.engine.adapters import DeviceAdapters
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Moved
from dataplane.lora.arena import Arena
from dataplane.lora.image_file import open_image
from dataplane.model.config import read_config

RESIDENT = 16
"""Streams that run beside."""
VISITORS_PER_S = 5
PAIRS_PER_S = 4
"""Pairs of visitors that are sent for each second that visitors come at a rate."""
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
    """Runs resident streams beside visitors that come at a rate, and beside some that come in pairs."""
    fresh = iter(range(10, 10**6))
    async with Fleet.started(images, room=room, streams=64, output_tokens=OUTPUT) as fleet:
        for number in range(WARM + 1):
            fleet.stage([number])
            await fleet.stream(number, output_tokens=2)
        rows = await _measure_gaps(fleet, images, fresh, count=int(VISITORS_PER_S * seconds), rounds=rounds)
        return rows + await _measure_pairs(fleet, images, fresh, count=int(PAIRS_PER_S * seconds) * rounds)


async def _measure_gaps(fleet: Fleet, images: ImageFolder, fresh: Iterator[int], *, count: int, rounds: int) -> list[Row]:
    """Compares times between tokens while visitors are all on one warm adapter, and each on one that is read from the disk."""
    tails: dict[str, list[float]] = {"warm": [], "disk": []}
    loads, steps = 0, 0
    for turn, kind in itertools.product(range(1 + rounds), tails):
        numbers = [WARM if kind == "warm" else next(fresh) for _ in range(count)]
        paths = [images.path(number) for number in numbers]
        if kind == "disk":
            await asyncio.to_thread(_forget, paths)
        steps_before, loads_before = (await fleet.state()).steps, len(fleet.loads)
        gaps: list[float] = []
        visitors = []
        async with beside([_resident(fleet, gaps)]):
            for number in numbers:
                if kind == "disk":
                    fleet.stage([number])
                visitors.append(asyncio.create_task(fleet.stream(number, output_tokens=4)))
                await asyncio.sleep(1 / VISITORS_PER_S)
            await asyncio.gather(*visitors)
        if not turn:  # for warming up
            continue
        tails[kind].append(percentile(gaps, 99))
        middle = percentile(gaps, 50)
        print(
            f"{kind}: between tokens of {RESIDENT} streams p50 {middle * 1e3:.1f}, p99 {tails[kind][-1] * 1e3:.1f} ms", flush=True
        )
        if kind == "disk":
            loads += len(fleet.loads) - loads_before
            steps += (await fleet.state()).steps - steps_before
    ratios = [disk / warm for warm, disk in zip(tails["warm"], tails["disk"], strict=True)]
    return [
        Row("itl_under_load", statistics.median(ratios), target="<= 1.2"),
        Row("loads_per_100_steps", 100 * loads / steps, unit="loads"),
    ]


async def _measure_pairs(fleet: Fleet, images: ImageFolder, fresh: Iterator[int], *, count: int) -> list[Row]:
    """Sends visitors one after the other beside the resident streams, in turns on a warm adapter and on one in host memory.

    Each comes at a moment of its own within a step.
    """
    cold = [next(fresh) for _ in range(count)]
    for number in cold:
        images.path(number)
    fleet.stage(cold)
    await fleet.opened()
    random = np.random.default_rng(SEED)
    gaps: list[float] = []
    pairs: list[tuple[Stream, Stream]] = []
    async with beside([_resident(fleet, gaps)]):
        await asyncio.sleep(1.0)
        for number in cold:
            pair = []
            for visited in (WARM, number):
                await asyncio.sleep(random.uniform(0.0, 0.1))
                pair.append(await fleet.stream(visited, output_tokens=4))
            pairs.append((pair[0], pair[1]))
    warm_s, cold_s = (statistics.median(pair[place].ttft_s for pair in pairs) for place in (0, 1))
    step_s = statistics.median(gaps)
    print(
        f"{count} pairs, to the first token p50: from host memory {cold_s * 1e3:.1f}, warm {warm_s * 1e3:.1f} ms; "
        f"a step takes {step_s * 1e3:.1f} ms",
        flush=True,
    )
    return [
        Row("cold_ttft_host", (cold_s - warm_s) / step_s, unit="steps", target="<= 1.5"),
        Row("cold_ttft_host_ms", (cold_s - warm_s) * 1e3, unit="ms"),
        Row("cold_ttft_host_counted", statistics.median(two.ttft_steps - one.ttft_steps for one, two in pairs), unit="steps"),
    ]


def measure_copy(images: ImageFolder, *, count: int, turns: int) -> list[Row]:
    """Brings adapters from host memory to an arena, in turns with one plain copy of as many bytes into another one.

    A load is what the copying thread does and what the step loop does then; waking up is neither's. Both sides read mapped files
    and write memory whose pages were touched before, and what each reads was read last by the other, so many images ago that the
    processor's caches have forgotten it. What other processes take of the processor is left out: of each image either side's
    quickest counts.
    """
    numbers = [number for number in range(4 * count) if number % 10 < 3][:count]
    config, model = EngineConfig(model_dir=str(images.model), max_slots=8), read_config(images.model)
    features = tuple((part.in_features, part.out_features) for part in model.projections)

    def arena() -> Arena:
        made = Arena(
            64 << 20,
            unit_bytes=config.arena_unit_bytes,
            max_slots=8,
            num_layers=model.num_layers,
            features=features,
            dtype="bfloat16",
        )
        made.tensor.fill_(1)
        return made

    wake = threading.Event()
    adapters, other = DeviceAdapters(config, arena(), wake=wake), arena().tensor.view(torch.uint8).numpy()
    took: dict[str, dict[int, float]] = {"load": {}, "copy": {}}
    payloads = {number: open_image(images.path(number)).payload for number in numbers}
    try:
        for number in numbers:
            adapters.stage(images.version(number), str(images.path(number)))
        for turn, (place, number) in itertools.product(range(1 + turns), enumerate(numbers)):
            copied = numbers[(place + count // 2) % count]
            for side in sorted(took, reverse=bool((turn + place) % 2)):
                if side == "load":
                    at, seconds = number, _load(adapters, images.version(number), wake)
                else:
                    at, seconds = copied, _copy(other, payloads[copied])
                if turn:  # the first touches pages of the files
                    took[side][at] = min(seconds, took[side].get(at, seconds))
    finally:
        adapters.stop()
    load_s, copy_s = (statistics.median(times.values()) for times in took.values())
    size = payloads[numbers[0]].size
    print(f"load {load_s * 1e3:.2f} ms, copy {copy_s * 1e3:.2f} ms, of {size / 1e6:.1f} MB", flush=True)
    ratio = statistics.median(took["load"][number] / took["copy"][number] for number in numbers)
    return [Row("load_vs_copy", ratio, target="<= 1.25"), Row("load_ms", load_s * 1e3, unit="ms")]


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
