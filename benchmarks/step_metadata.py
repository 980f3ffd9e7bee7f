"""Host time of a step's metadata for the GPU: the list, its items, and the buffer that is copied."""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import torch

from benchmarks.report import Row, parser, publish
from kernels.gpu.items import build_items
from kernels.gpu.metadata import StepMetadata
from kernels.rows import build_rank_rows

_REPEATS = 1000
_TILE_ROWS = 64


def measure(*, num_rows: int, num_adapters: int, rank: int = 16) -> float:
    """Returns the median microseconds of one step's metadata; rows have their adapters at random, one in twenty has none."""
    rng = np.random.default_rng(0)
    ranks = np.full(num_adapters, rank, dtype=np.int32)
    row_slot = rng.integers(num_adapters, size=num_rows).astype(np.int32)
    row_slot[rng.random(num_rows) < 0.05] = -1
    metadata = StepMetadata(max_rows=2048, max_items=2048, max_tiles=32, device=torch.device("cpu"))
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        rows = build_rank_rows(row_slot, ranks)
        metadata.fill(row_slot, build_items(rows, tile_rows=_TILE_ROWS))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def main() -> int:
    """Entry point."""
    arguments = parser("Measures the host time of a step's metadata for the GPU.").parse_args()
    rows = [
        Row(
            f"step_metadata_us_{num_rows}_rows_{num_adapters}_adapters",
            measure(num_rows=num_rows, num_adapters=num_adapters),
            "us",
            "<= 100" if num_rows <= 256 else "",
        )
        for num_rows, num_adapters in ((64, 22), (256, 22), (256, 64), (2048, 64))
    ]
    return int(not publish(rows, path=arguments.json, title="step metadata"))


if __name__ == "__main__":
    sys.exit(main())
