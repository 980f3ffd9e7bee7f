"""A bare decode loop over the engine's own kernels: what is left when nothing schedules, admits, samples or streams.

It is the yardstick for the engine's own overhead. All sequences have one length and pages in order, so that a step is the forward
pass and the likeliest token, and nothing else.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders.process import Setup
from benchmarks.contenders.veneer import Images, engine_config
from benchmarks.workload import AdapterKey, Run, Workload
from dataplane.engine.memory import plan_memory
from dataplane.engine.runner import Runner
from dataplane.lora.units import Units
from dataplane.model.batch import Batch, Chunk
from dataplane.model.config import read_config
from kernels.rows import build_rank_rows


class BareLoop:
    """Model, kernels, KV tensor and arena as the engine makes them, and a loop."""

    def __init__(self, setup: Setup) -> None:
        config = engine_config(setup)
        model = read_config(Path(config.model_dir))
        runner = Runner(config, model, plan_memory(config, model))
        self._model, self._attention, self._low_rank = runner._model, runner._attention, runner._low_rank
        self._kv, self._arena = runner.kv, runner.arena
        self._images = Images(setup, dtype=config.dtype)
        self._units = Units(runner.arena.num_units, unit_bytes=config.arena_unit_bytes)
        self._slots: dict[AdapterKey | None, int] = {None: -1}
        self.settings: dict[str, Any] = {"form": runner.form, "threads": torch.get_num_threads(), "torch": torch.__version__}

    def run(self, workload: Workload) -> Run:
        """See `Contender`."""
        slots = [self._slot(key) for key in workload.adapter_keys()]
        with torch.inference_mode():
            start = time.perf_counter()
            tokens, times = [], []
            for step in self._steps(torch.tensor(workload.prompts()), slots, workload.output_tokens):
                tokens.append(step)
                times.append(time.perf_counter())
            ids = torch.stack(tokens, 1).tolist()
            seconds = time.perf_counter() - start
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return Run(seconds, ids, [times[0] - start], gaps)

    def _slot(self, key: AdapterKey | None) -> int:
        if key is not None and key not in self._slots:
            image = self._images.image(key)
            extents = self._units.take(image.block_bytes)
            assert extents is not None, "the arena holds them all"
            self._slots[key] = len(self._slots) - 1
            self._arena.write(self._slots[key], image, extents)
        return self._slots[key]

    def _steps(self, prompts: Tensor, slots: list[int], count: int) -> Iterator[Tensor]:
        """Yields the tokens of each step, int64 [rows]."""
        rows, length = prompts.shape
        size = self._kv.page_size
        pages = 1 + torch.arange(rows * -(-(length + count) // size)).view(rows, -1)
        self._kv.clear(pages.ravel())
        at = pages.repeat_interleave(size, 1) * self._kv.rows_per_page + torch.arange(size).repeat(pages.shape[1])
        chunks = tuple(Chunk(row * length, length, 0, pages[row, : -(-length // size)]) for row in range(rows))
        positions = torch.arange(length).repeat(rows)
        last = torch.arange(1, rows + 1) * length - 1
        whole = Batch(prompts.ravel(), positions, at[:, :length].ravel(), 0, last[:0], pages[:0], chunks, last)
        yield (tokens := self._forward(whole, [slot for slot in slots for _ in range(length)]))
        for position in range(length, length + count - 1):
            lengths, used = torch.full((rows,), position + 1), pages[:, : position // size + 1].contiguous()
            batch = Batch(tokens, lengths - 1, at[:, position].contiguous(), rows, lengths, used, (), None)
            yield (tokens := self._forward(batch, slots))

    def _forward(self, batch: Batch, slots: list[int]) -> Tensor:
        self._low_rank.begin_step(build_rank_rows(slots, self._arena.descriptors.largest_rank))
        logits = self._model.forward(batch, self._attention, self._low_rank)
        return self._model.pieces.likeliest(logits)[0]
