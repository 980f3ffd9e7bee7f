"""Many adapters and little room, in figures: `python -m benchmarks.adapters [--short] [--json PATH] [--only SECTION …]`.

Adapters have the shapes of SmolLM2-135M; what was made once is kept in ~/.cache/veneer/bench-adapters. Bounded figures are
quotients of two measurements of one run. docs/benchmarks.md has more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from benchmarks import report
from benchmarks.budgets import measure_budget
from benchmarks.catalogue import Stack, measure_cycles, measure_store
from benchmarks.fleet import ImageFolder
from benchmarks.loads import measure_copy, measure_load
from benchmarks.random_adapters import block_bytes, kind_of
from benchmarks.replay import measure_replay, measure_waste
from benchmarks.report import Row
from benchmarks.thrash import Scale, measure_ttft, measure_uniform, measure_zipf
from dataplane.engine.config import EngineConfig
from demo.prepare import default_folder, prepare
from veneer.artifact import describe_base

FULL = Scale(catalogue=3000, room=40, streams=64, waiting=128, requests=400, uniform=(40, 100, 300, 1000, 3000), rounds=2)
SHORT = Scale(catalogue=300, room=10, streams=16, waiting=32, requests=100, uniform=(10, 25, 50, 100, 300), rounds=1)


def sections(scale: Scale) -> dict[str, Callable[[], list[Row]]]:
    """Returns what there is to measure, by name."""
    folder, model = default_folder().with_name("bench-adapters"), prepare()
    images, base = ImageFolder(folder, model), describe_base(model)
    cycles = (200, 1200) if scale is FULL else (20, 60)
    count, seconds = (20_000, 10.0) if scale is FULL else (4000, 4.0)
    return {
        "hits": lambda: measure_replay(catalogue=scale.catalogue, room=scale.room, count=count),
        "waste": lambda: measure_waste(
            base,
            catalogue=scale.catalogue,
            room=scale.room,
            count=count,
            unit_bytes=EngineConfig(model_dir="").arena_unit_bytes,
        ),
        "copy": lambda: measure_copy(ImageFolder(folder, model, rank=16), count=12, turns=30),
        "load": lambda: asyncio.run(measure_load(images, room=scale.room, seconds=seconds, rounds=scale.rounds)),
        "store": lambda: _on_stack(folder, scale, lambda stack: measure_store(stack, count=100 if scale is FULL else 20)),
        "cycles": lambda: _on_stack(folder, scale, lambda stack: measure_cycles(stack, first=cycles[0], last=cycles[1])),
        "zipf": lambda: asyncio.run(measure_zipf(images, scale)),
        "uniform": lambda: asyncio.run(measure_uniform(images, scale)),
        "budget": lambda: asyncio.run(measure_budget(images, seconds=20.0 if scale is FULL else 8.0)),
        "ttft": lambda: asyncio.run(measure_ttft(images, scale)),
    }


def _on_stack(folder: Path, scale: Scale, measure: Callable[[Stack], Coroutine[None, None, list[Row]]]) -> list[Row]:
    stack = Stack(folder.with_name(f"bench-catalogue-{scale.catalogue}"), prepare(), catalogue=scale.catalogue, room=scale.room)
    with stack.running():
        return asyncio.run(measure(stack))


def main() -> None:
    """Entry point."""
    parser = report.parser("Measures the tiers of adapters, in bfloat16.")
    parser.add_argument("--short", action="store_true", help="300 adapters and room for 10")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="sections to measure (default: all)")
    arguments = parser.parse_args()
    scale = SHORT if arguments.short else FULL
    known = sections(scale)
    if unknown := set(arguments.only or ()) - set(known):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    rows: list[Row] = []
    base = describe_base(prepare())
    size_bytes = sum(sum(block_bytes(base, kind_of(number))) for number in range(scale.catalogue))
    print(f"a catalogue of {scale.catalogue} adapters of all sizes: {size_bytes / 1e9:.2f} GB of images; room for {scale.room}")
    for name in arguments.only or known:
        start = time.monotonic()
        rows += known[name]()
        print(f"── {name}: {time.monotonic() - start:.0f} s ──", flush=True)
    raise SystemExit(0 if report.publish(rows, path=arguments.json, title="adapters, bfloat16") else 1)


if __name__ == "__main__":
    main()
