"""Speed and latencies over streams, adapters, ranks, modules, popularity, and lengths of prompts and outputs; no bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contenders.process import Process, Setup
from benchmarks.report import Row
from benchmarks.rounds import Turn, take_turns
from benchmarks.speed import write_adapters
from benchmarks.workload import Run, Workload, percentile
from veneer.artifact import describe_base

Axes = Mapping[str, Sequence[Any]]
"""Values of each field of `Workload`, the others at their middle."""

MIDDLE = Workload(64, 32, 32, 0, adapters=22)
SHORT: Axes = {"streams": (8, 64), "adapters": (0, 64)}
LONG: Axes = {
    "streams": (1, 8, 32, 64),
    "adapters": (0, 1, 8, 64),
    "rank": (8, 64),
    "modules": ("qv", "attention"),
    "popularity": ("zipf",),
    "prompt_tokens": (8, 284, 1000),
    "output_tokens": (128,),
}
FIGURES = {"tokens_per_s": "tokens/s", "ttft_p50": "ms", "ttft_p99": "ms", "itl_p50": "ms", "itl_p99": "ms"}


def measure_sweep(model: Path, folder: Path, axes: Axes) -> list[Row]:
    """Runs SmolLM2-135M at every point of the axes; prints a table and returns its cells."""
    base = describe_base(model)
    middle = dataclasses.replace(MIDDLE, vocab_size=base.vocab_size)
    points = [
        (f"{axis}={value}", dataclasses.replace(middle, **{axis: value})) for axis, values in axes.items() for value in values
    ]
    for _, point in points:
        write_adapters(folder, base, count=point.adapters, rank=point.rank, modules=point.modules)
    setup = Setup(
        str(model),
        str(folder),
        streams=max(point.streams for _, point in points),
        context=max(point.prompt_tokens + point.output_tokens for _, point in points),
        max_adapters=max(point.adapters for _, point in points),
        max_rank=max(point.rank for _, point in points),
        options={"kv_bytes": 2 << 30},
    )
    with Process("veneer", setup) as engine:
        cells = {name: figures(take_turns({name: Turn(engine, point)}, rounds=1)[name][0]) for name, point in points}
    _show(cells)
    return [
        Row(f"sweep/{name}/{figure}", value, unit=FIGURES[figure]) for name, row in cells.items() for figure, value in row.items()
    ]


def figures(run: Run) -> dict[str, float]:
    """Returns the figures of one run: tokens a second, and milliseconds to the first token and between tokens."""
    times = {"ttft": run.firsts_s, "itl": run.gaps_s}
    latencies = {f"{name}_p{p}": 1e3 * percentile(values, p) for name, values in times.items() for p in (50, 99)}
    return {"tokens_per_s": run.tokens_per_s, **latencies}


def _show(cells: Mapping[str, Mapping[str, float]]) -> None:
    table = Table(title="64 streams, 22 adapters of rank 16 on all modules dealt out evenly, prompts of 32, 32 tokens each; but:")
    for column in ("", *(f"{name}, {unit}" for name, unit in FIGURES.items())):
        table.add_column(column, justify="right" if column else "left")
    for name, row in cells.items():
        table.add_row(name, *(f"{row[figure]:.1f}" for figure in FIGURES))
    Console(width=130).print(table)
