"""What stands in for a captured graph where there is no device: launches that ran, to run again with the same arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kernels.gpu.launches
from kernels.gpu.low_rank import Variant
from kernels.reference import add_low_rank

KERNELS = ("shrink", "expand", "extension", "epilogue")


@dataclass(frozen=True)
class Launch:
    """One launch and what it was given."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Tape:
    """Keeps every launch of the kernels from now on; without `runs` that is all that becomes of them."""

    def __init__(self, monkeypatch, *, runs: bool = True) -> None:
        self.launches: list[Launch] = []
        for name in KERNELS:
            recorded = _Recorded(name, getattr(kernels.gpu.launches, name), self.launches, runs)
            monkeypatch.setattr(kernels.gpu.launches, name, recorded)

    def replay(self) -> None:
        """Runs every launch again."""
        for launch in self.launches:
            launch.kernel[launch.grid](*launch.arguments, **launch.options)


@dataclass(frozen=True)
class _Recorded:
    name: str
    kernel: Any
    launches: list[Launch]
    runs: bool

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches.append(Launch(self.name, self.kernel, grid, arguments, options))
            if self.runs:
                self.kernel[grid](*arguments, **options)

        return launch


def replays_follow_the_metadata(judge, gpu_world, rank_rows, gpu_sites, tape):
    """Launches of one step run again for others: other adapters and rows, an empty list, and a reloaded slot."""
    world = gpu_world(12, torch.float32)
    adapters = world.adapters([5, 40, 3], whole=True, epilogue=True)
    low_rank = judge.build(adapters, max_split=4)
    site, layer = gpu_sites[0], 1
    x, y = torch.empty(20, site.in_features), torch.empty(20, site.columns[-1][1])
    steps = ([0, 1, -1, 2] * 5, [2, -1, 1, 1] * 5, [-1] * 20, [1] * 20, [0] * 3 + [-1] * 17)
    for i, row_slot in enumerate(steps):
        if i == len(steps) - 1:
            world.load(adapters, 0, 20, at=adapters.spare, whole=True)
        rows = rank_rows(adapters, np.array(row_slot, dtype=np.int32))
        x.copy_(world.tensor(*x.shape))
        y.copy_(start := world.tensor(*y.shape))
        low_rank.begin_step(rows, variant=Variant.EPILOGUE)
        if i == 0:
            low_rank.add_(y, x, layer=layer, site=site.name)
        else:
            tape.replay()
        at = {"layer": layer, "site": site, "rows": rows}
        expected = add_low_rank(start, x, arena=adapters.arena, descriptors=adapters.descriptors, **at)
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
