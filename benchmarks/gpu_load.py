"""The part `load` of `benchmarks.gpu_check`: loads as the engine makes them, alone and beside steps."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu_check import Figure
from benchmarks.gpu_engine import HEAD_DIM, fields_of, random_image
from benchmarks.gpu_timing import captured, median_ms
from benchmarks.gpu_world import BaseModel, build_adapters
from benchmarks.roofline import LLAMA_7B, Shapes
from dataplane.engine.runner import model_features
from dataplane.lora.arena import Arena
from dataplane.lora.units import Extent
from dataplane.model.config import parse_config

_UNIT_BYTES = 2 << 20


def load() -> Iterator[Figure]:
    """An adapter's bytes from pinned memory, in one piece and by units, and what they do to the steps beside them."""
    size = 16 * LLAMA_7B.rank_row_bytes
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    plain = median_ms(lambda: target.copy_(host, non_blocking=True))
    pieces = list(zip(host.split(_UNIT_BYTES), target.split(_UNIT_BYTES), strict=True))
    by_units = median_ms(lambda: [to.copy_(of, non_blocking=True) for of, to in pieces])
    yield Figure("pinned_copy_bandwidth", size / plain / 1e6, "GB/s")
    yield Figure("by_units_of_pinned_copy", plain / by_units, "ratio")
    adapters = build_adapters(LLAMA_7B, count=22, rank=16, device="cuda")
    low_rank = adapters.low_rank(max_rows=64)
    low_rank.begin_step(adapters.rows(64))
    replay = captured(BaseModel(LLAMA_7B, device="cuda").step("adapters", low_rank, num_rows=64)).replay

    def step() -> None:
        replay()
        torch.cuda.synchronize()

    yield from arena_copies(plain_s=plain / 1e3, step=step)


def arena_copies(
    *,
    shapes: Shapes = LLAMA_7B,
    rank: int = 16,
    device: str = "cuda",
    dtype: str = "bfloat16",
    plain_s: float,
    step: Callable[[], object],
    num_steps: int = 200,
) -> Iterator[Figure]:
    """Loads as the engine makes them, from pageable memory through pinned blocks: alone, and beside steps.

    Args:
        shapes: Of the model.
        rank: Of the adapter.
        device: Where the arena lies.
        dtype: Of the model.
        plain_s: Seconds of a plain copy of as many pinned bytes.
        step: Runs one step and waits for it.
        num_steps: Steps that are timed.
    """
    form = parse_config(fields_of(shapes, head_dim=min(HEAD_DIM, shapes.kv)))
    image = random_image(form, rank=rank, dtype=dtype)
    num_units = -(-image.num_bytes // _UNIT_BYTES)
    arena = Arena(
        num_units * _UNIT_BYTES, unit_bytes=_UNIT_BYTES, max_slots=1, num_layers=form.num_layers,
        features=model_features(form), dtype=dtype, device=device,
    )  # fmt: skip
    whole = [Extent(0, num_units, 0, len(image.blocks))]

    def seconds(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    yield Figure("arena_copy_of_pinned_copy", plain_s / min(seconds(lambda: arena.copy(image, whole)) for _ in range(5)), "ratio")
    alone = [seconds(step) for _ in range(num_steps)]
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            arena.copy(image, whole)

    thread = threading.Thread(target=load, name="loads")
    thread.start()
    try:
        beside = [seconds(step) for _ in range(num_steps)]
    finally:
        stop.set()
        thread.join()
    for name, taken in (("alone", alone), ("beside_loads", beside)):
        yield Figure(f"step_p99_{name}_ms", statistics.quantiles(taken, n=100)[98] * 1e3, "ms")
