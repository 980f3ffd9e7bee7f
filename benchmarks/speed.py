"""The engine beside a bare loop of PyTorch calls, and beside itself with more adapters: rows of `benchmarks.engine`."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from pathlib import Path

from benchmarks.bandwidth import Memory
from benchmarks.contenders.process import Process, Setup
from benchmarks.models import adapter_bytes
from benchmarks.random_adapters import write_adapter
from benchmarks.report import Row
from benchmarks.rounds import Taken, Turn, middle, ratio, step_s, take_turns, tokens_per_s
from benchmarks.workload import AdapterKey, Workload, agreement
from veneer.artifact import BaseDescription, describe_base

ADAPTERS = 22
MANY = 64
"""Streams, and distinct adapters at most."""


def write_adapters(folder: Path, base: BaseDescription, *, count: int, rank: int = 16, modules: str = "all") -> None:
    """Writes the first adapters of a shape into a folder, those that lie there already not again."""
    for index in range(count):
        write_adapter(folder, base, AdapterKey(index, rank, modules))


def measure_small(model: Path, folder: Path, *, rounds: int, output_tokens: int = 64) -> list[Row]:
    """Measures SmolLM2-135M; adapters go into the folder."""
    base = describe_base(model)
    write_adapters(folder, base, count=MANY)
    setup = Setup(str(model), str(folder), streams=MANY + 1, context=32 + output_tokens, max_adapters=MANY)

    def workload(adapters: int, streams: int = MANY) -> Workload:
        return Workload(streams, 32, output_tokens, base.vocab_size, adapters=adapters)

    with ExitStack() as stack:
        engine = stack.enter_context(Process("veneer", setup))
        bare = stack.enter_context(Process("bare", setup))
        taken = take_turns(
            {
                "engine base": Turn(engine, workload(0)),
                "bare base": Turn(bare, workload(0)),
                "engine 22 adapters": Turn(engine, workload(ADAPTERS)),
                "bare 22 adapters": Turn(bare, workload(ADAPTERS)),
                "engine 64 adapters": Turn(engine, workload(MANY)),
                "engine 8 adapters": Turn(engine, workload(8)),
                "engine 8 adapters, 65 rows": Turn(engine, workload(8, MANY + 1)),
            },
            rounds=rounds,
        )
    return small_rows(taken, bandwidth=Memory().bytes_per_s(), read=ADAPTERS * adapter_bytes(base, rank=16))


def small_rows(taken: Taken, *, bandwidth: float, read: float) -> list[Row]:
    """Returns the rows.

    Args:
        taken: The runs.
        bandwidth: Bytes of memory read in a second.
        read: Bytes of the adapters of a mixed step.
    """
    with_, without = taken["engine 22 adapters"], taken["engine base"]
    added = statistics.median(more.step_s - less.step_s for more, less in zip(with_, without, strict=True))
    print(
        f"memory is read at {bandwidth / 1e9:.1f} GB/s; 22 adapters are {read / 1e6:.0f} MB and add {added * 1e3:.1f} ms a step"
    )
    return [
        Row("base_vs_bare", ratio(taken, "engine base", "bare base", tokens_per_s), target=">= 0.85"),
        Row("mixed_vs_bare", ratio(taken, "engine 22 adapters", "bare 22 adapters", tokens_per_s), target=">= 0.85"),
        Row(
            "mixed_vs_base",
            ratio(taken, "engine 22 adapters", "engine base", tokens_per_s),
            target=">= 0.60",
            needs=("base_vs_bare", "mixed_vs_bare"),
        ),
        Row("lora_bytes", added * bandwidth / read, target="<= 2.2"),
        Row("distinct64_vs_8", ratio(taken, "engine 64 adapters", "engine 8 adapters", tokens_per_s), target=">= 0.50"),
        Row("same_adapter_marginal", ratio(taken, "engine 8 adapters, 65 rows", "engine 8 adapters", step_s), target="<= 1.03"),
        Row("bare_same_tokens", _same(taken, "22 adapters"), unit="share", target=">= 0.9"),
        Row("read_bandwidth", bandwidth / 1e9, unit="GB/s"),
        Row("base_step", middle(taken, "engine base", step_s) * 1e3, unit="ms"),
        Row("mixed_step", middle(taken, "engine 22 adapters", step_s) * 1e3, unit="ms"),
    ]


def _same(taken: Taken, label: str) -> float:
    """Returns the share of equal tokens of engine and bare loop: a loop that computes something else is no yardstick."""
    return min(agreement(one, other) for one, other in zip(taken[f"engine {label}"], taken[f"bare {label}"], strict=True))


def measure_large(model: Path, folder: Path, *, rounds: int, output_tokens: int = 16) -> list[Row]:
    """Measures two layers of 7B shapes; adapters go into the folder."""
    base = describe_base(model)
    write_adapters(folder, base, count=MANY)

    def workload(adapters: int) -> Workload:
        return Workload(MANY, 8, output_tokens, base.vocab_size, adapters=adapters)

    setup = Setup(str(model), str(folder), streams=MANY, context=8 + output_tokens, max_adapters=MANY)
    with Process("veneer", setup) as engine:
        taken = take_turns(
            {f"7B shapes, {count} adapters": Turn(engine, workload(count)) for count in (0, ADAPTERS, MANY, 8)},
            rounds=rounds,
        )
    return large_rows(taken)


def large_rows(taken: Taken) -> list[Row]:
    """Returns the rows of runs with no, 22, 64 and 8 adapters, in this order; decode steps alone count."""
    base, mixed, many, few = taken
    return [
        Row("mixed_vs_base_7b", ratio(taken, base, mixed, step_s), target=">= 0.85"),
        Row("distinct64_vs_8_7b", ratio(taken, few, many, step_s), target=">= 0.75"),
    ]
