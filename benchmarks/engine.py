"""The engine in figures: `python -m benchmarks.engine [--json PATH] [--only SECTION …] [--sweep]`.

Every bounded figure is a quotient of two measurements of one run, so that it says the same on any machine of a kind. Contenders
are processes of their own with huge pages; they take turns, and are stopped while another runs. docs/benchmarks.md has more.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import report
from benchmarks.breakdown import measure_breakdown
from benchmarks.invariant import measure_invariance
from benchmarks.models import prepare_7b_shapes
from benchmarks.report import Row
from benchmarks.scheduling import measure_engine, measure_schedule
from benchmarks.speed import measure_large, measure_small
from benchmarks.streaming import measure_streaming
from benchmarks.sweep import LONG, SHORT, measure_sweep
from demo.prepare import prepare


def sections(folder: Path, *, rounds: int, long: bool) -> dict[str, Callable[[], list[Row]]]:
    """Returns what there is to measure, by name; adapters go into the folder."""
    model = prepare()
    return {
        "speed": lambda: measure_small(model, folder / "small", rounds=rounds),
        "speed-7b": lambda: measure_large(prepare_7b_shapes(), folder / "large", rounds=rounds),
        "streaming": lambda: measure_streaming(model, rounds=rounds),
        "invariance": lambda: measure_invariance(model, folder / "small", rounds=1),
        "schedule": measure_schedule,
        "tenants": lambda: asyncio.run(measure_engine(count=15)),
        "breakdown": lambda: measure_breakdown(model, folder / "small"),
        "sweep": lambda: measure_sweep(model, folder / "small", LONG if long else SHORT),
    }


def main() -> None:
    """Entry point."""
    parser = report.parser("Measures the engine, in bfloat16.")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of which the median counts")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="sections to measure (default: all)")
    parser.add_argument("--sweep", action="store_true", help="the long form of the sweep")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="veneer-bench-") as folder:
        known = sections(Path(folder), rounds=arguments.rounds, long=arguments.sweep)
        if unknown := set(arguments.only or ()) - set(known):
            parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        for name in arguments.only or known:
            start = time.monotonic()
            rows += known[name]()
            print(f"── {name}: {time.monotonic() - start:.0f} s ──", flush=True)
    raise SystemExit(0 if report.publish(rows, path=arguments.json, title="the engine, bfloat16") else 1)


if __name__ == "__main__":
    main()
