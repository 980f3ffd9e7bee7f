"""Where the time of a step goes: the profile behind the figures of `benchmarks.engine`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.contenders.process import Process, Setup
from benchmarks.report import Row
from benchmarks.rounds import Runs
from benchmarks.speed import ADAPTERS, write_adapters
from benchmarks.workload import Workload
from veneer.artifact import BaseDescription, describe_base

FORWARD = ("products", "head", "attention", "adapters", "norms, rotation, activation")
LOOP = ("fill", "sample", "schedule", "commit", "receive", "emit")
SPEEDS = {"products compute": "GFLOP/s", "products read": "GB/s"}
CASES = (("64 rows", 64, 0), ("64 rows, 22 adapters", 64, ADAPTERS), ("8 rows", 8, 0), ("1 row", 1, 0))
_FEW, _MANY = 4, 28


def measure_breakdown(model: Path, folder: Path) -> list[Row]:
    """Profiles decode steps and prefills of SmolLM2-135M; prints a table and returns its cells."""
    base = describe_base(model)
    write_adapters(folder, base, count=ADAPTERS)
    columns: dict[str, Mapping[str, float]] = {}
    with Process("profile", Setup(str(model), str(folder), streams=64, context=96, max_adapters=ADAPTERS)) as engine:
        for name, streams, adapters in CASES:
            workload = Workload(streams, 32, _MANY, base.vocab_size, adapters=adapters)
            columns[name] = with_speeds(decode_parts(engine, workload), base, rows=streams)
            if streams == 64:
                parts = prefill_parts(engine, workload)
                columns[f"prefill of 2,048{name[7:]}"] = with_speeds(parts, base, rows=streams * workload.prompt_tokens)
    _show(columns)
    return [
        Row(f"breakdown/{name}/{part}", value, unit=SPEEDS.get(part, "ms"))
        for name, parts in columns.items()
        for part, value in parts.items()
    ]


def decode_parts(engine: Runs, workload: Workload) -> dict[str, float]:
    """Returns milliseconds of one decode step by part: what more tokens take, over their number."""
    few, many = (_seconds(engine, workload, tokens) for tokens in (_FEW, _MANY))
    return _parts({part: (many[part] - few.get(part, 0.0)) / (_MANY - _FEW) for part in many})


def prefill_parts(engine: Runs, workload: Workload) -> dict[str, float]:
    """Returns milliseconds of the prefill by part."""
    return _parts(_seconds(engine, workload, 1))


def with_speeds(parts: Mapping[str, float], base: BaseDescription, *, rows: int) -> dict[str, float]:
    """Adds how fast the products of the layers compute, and read their weights of two bytes: what a missed figure is bound by."""
    elements = base.num_layers * sum(module.in_features * module.out_features for module in base.modules)
    speeds = (2 * elements * rows / 1e6, 2 * elements / 1e6)
    return {**parts, **{name: speed / parts["products"] for name, speed in zip(SPEEDS, speeds, strict=True)}}


def _seconds(engine: Runs, workload: Workload, tokens: int) -> Mapping[str, float]:
    runs = [engine.run(dataclasses.replace(workload, output_tokens=tokens)) for _ in range(2)]
    return min(runs, key=lambda run: run.seconds).extra


def _parts(seconds: Mapping[str, float]) -> dict[str, float]:
    """Orders the parts; `rest` is what of the forward pass and of the step no stopwatch saw."""
    named = {part: seconds.get(part, 0.0) for part in (*FORWARD, *LOOP)}
    named["rest"] = max(0.0, seconds.get("run", 0.0) - sum(named[part] for part in (*FORWARD, "fill", "sample")))
    named["all"] = sum(named.values())
    return {part: 1e3 * value for part, value in named.items()}


def _show(columns: Mapping[str, Mapping[str, float]]) -> None:
    table = Table(title="milliseconds by part: a decode step, a prefill")
    table.add_column("part")
    for name in columns:
        table.add_column(name, justify="right")
    for part in next(iter(columns.values())):
        table.add_row(
            f"{part}, {SPEEDS[part]}" if part in SPEEDS else part, *(f"{parts[part]:.2f}" for parts in columns.values())
        )
    Console(width=130).print(table)
