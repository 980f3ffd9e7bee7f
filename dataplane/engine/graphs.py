"""Decode steps as captured graphs: one for each bucket of rows and each variant of the adapters' part."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dataplane.engine.plan import Plan
from dataplane.model.stack import LowRank
from kernels.rows import RankRows

_MOST_ROWS = 512
"""Rows of the largest graph; what is longer gains nothing from one."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function, keeps what it queued on the device, and returns what queues just that again.

The function's Python runs no more after that: a replay sees other numbers only in tensors that were written in place. This is all
that the engine knows of graphs, so that a recorder can stand in for them where there is no device.
"""


class CudaCapture:
    """CUDA graphs that share their memory: no two of them run at the same time, and nothing is left in it between two replays."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`. The first run, in the open, compiles kernels and makes the library's workspaces."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


Variant = TypeVar("Variant", bound=str)


class CapturedLowRank(LowRank, Protocol[Variant]):
    """A low-rank product whose launches can be captured."""

    def variant(self, rows: RankRows) -> Variant:
        """Returns the least variant that a step needs."""

    def begin_step(self, rows: RankRows, *, variant: Variant | None = None) -> None:
        """Prepares the step's rows for a replay of the variant, or for its capture; None runs what the step needs."""


@dataclass(frozen=True, slots=True)
class Captures(Generic[Variant]):
    """What a form needs in order to be captured.

    Attributes:
        capture: How.
        low_rank: The form's low-rank product.
        variants: Of it, the one that launches least first.
    """

    capture: Capture
    low_rank: CapturedLowRank[Variant]
    variants: tuple[Variant, ...]


def row_buckets(most: int) -> tuple[int, ...]:
    """Returns the numbers of rows for which a graph is captured; a step pads to the next one."""
    most = min(most, _MOST_ROWS)
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, _MOST_ROWS, 32))
    return (*(size for size in sizes if size < most), most)


class DecodeGraphs(Generic[Variant]):
    """Captured steps whose rows all decode. Owned by the runner.

    Args:
        captures: How to capture.
        buckets: Numbers of rows, ascending.
        logits: [largest bucket, vocab], where every graph leaves its logits.
    """

    def __init__(self, captures: Captures[Variant], *, buckets: tuple[int, ...], logits: Tensor) -> None:
        self._captures = captures
        self.buckets = buckets
        self._logits = logits
        self._replays: dict[tuple[int, Variant], Callable[[], None]] = {}

    def bucket(self, plan: Plan) -> int | None:
        """Returns the rows that the plan's graph has; None if it has none."""
        if plan.rows or len(plan.decodes) > self.buckets[-1]:
            return None
        return self.buckets[bisect_left(self.buckets, len(plan.decodes))]

    def begin_step(self, rows: RankRows) -> Variant:
        """Prepares the low-rank product for a replay and returns the variant to replay."""
        variant = self._captures.low_rank.variant(rows)
        self._captures.low_rank.begin_step(rows, variant=variant)
        return variant

    def add(self, num_rows: int, variant: Variant, compute: Callable[[], Tensor]) -> None:
        """Captures a step.

        Args:
            num_rows: Its bucket.
            variant: What it launches for adapters.
            compute: Computes logits, [num_rows, vocab], of what lies in the step's buffers.
        """
        logits = self._logits[:num_rows]
        self._replays[num_rows, variant] = self._captures.capture(lambda: _write(logits, compute))

    def replay(self, num_rows: int, variant: Variant) -> Tensor:
        """Queues a step and returns its logits, [num_rows, vocab], which the next replay overwrites."""
        self._replays[num_rows, variant]()
        return self._logits[:num_rows]


def _write(logits: Tensor, compute: Callable[[], Tensor]) -> None:
    logits.copy_(compute())
