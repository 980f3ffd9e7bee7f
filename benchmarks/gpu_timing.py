"""Times on the device's clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

COPY_BYTES = 4 << 30
"""What is read or copied for a bandwidth: more than any cache holds."""


def times_ms(run: Callable[[], object], *, repeats: int = 30, warm: int = 3) -> list[float]:
    """Returns the milliseconds of each of many runs, on the device's clock."""
    for _ in range(warm):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def median_ms(run: Callable[[], object], *, repeats: int = 30) -> float:
    """Returns the median milliseconds of a run."""
    return statistics.median(times_ms(run, repeats=repeats))


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Returns a graph of one run, after runs in the open that compile and allocate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def read_bandwidth() -> float:
    """Returns bytes per second of a sum over more than the caches hold."""
    values = torch.zeros(COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    return COPY_BYTES / median_ms(values.sum) * 1e3
