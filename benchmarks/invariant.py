"""What `batch_invariant` costs: `python -m benchmarks.invariant [--json PATH]`.

Two engines of equal settings, one with it and one without, take turns; each row is the quotient of their speeds.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from benchmarks import report
from benchmarks.contenders.process import Process, Setup
from benchmarks.report import Row
from benchmarks.rounds import Turn, ratio, take_turns, tokens_per_s
from benchmarks.speed import ADAPTERS, write_adapters
from benchmarks.workload import Workload
from demo.prepare import prepare
from veneer.artifact import describe_base


def measure_invariance(model: Path, folder: Path, *, rounds: int, streams: int = 64, output_tokens: int = 32) -> list[Row]:
    """Returns tokens per second with the setting on, over those with it off, for the base and for a mixed batch."""
    base = describe_base(model)
    write_adapters(folder, base, count=ADAPTERS)
    off = Setup(str(model), str(folder), streams=streams, context=32 + output_tokens, max_adapters=ADAPTERS)
    on = dataclasses.replace(off, options={"batch_invariant": True})
    workloads = {
        name: Workload(streams, 32, output_tokens, base.vocab_size, adapters=adapters)
        for name, adapters in (("base", 0), ("mixed", ADAPTERS))
    }
    with Process("veneer", off) as without, Process("veneer", on) as with_:
        turns = {
            f"{name}, {state}": Turn(engine, workload)
            for name, workload in workloads.items()
            for state, engine in (("off", without), ("on", with_))
        }
        taken = take_turns(turns, rounds=rounds)
    return [Row(f"batch_invariant_cost_{name}", ratio(taken, f"{name}, on", f"{name}, off", tokens_per_s)) for name in workloads]


def main() -> None:
    """Entry point."""
    parser = report.parser("Measures what batch_invariant costs on SmolLM2-135M in bfloat16.")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of which the median counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="veneer-bench-") as folder:
        rows = measure_invariance(prepare(), Path(folder), rounds=arguments.rounds)
    raise SystemExit(0 if report.publish(rows, path=arguments.json, title="batch_invariant: tokens/s on / off") else 1)


if __name__ == "__main__":
    main()
