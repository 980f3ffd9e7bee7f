"""What work costs on this machine, as the settings that name it: `python -m benchmarks.prices [--json PATH]`.

The engine runs 64 streams of SmolLM2-135M; each figure is the time that its steps took more for more of one kind of work,
over the time that a prompt token takes. Fair shares are as right as these prices: a machine or a model that differs much
wants its own.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks import report
from benchmarks.contenders.process import Setup
from benchmarks.contenders.veneer import Veneer
from benchmarks.report import Row
from benchmarks.rounds import Turn, middle, take_turns
from benchmarks.speed import ADAPTERS, write_adapters
from benchmarks.workload import Workload
from demo.prepare import prepare
from veneer.artifact import describe_base

STREAMS, RANK, SHORT, LONG, OUTPUT = 64, 16, 32, 160, 48


def measure_prices(model: Path, folder: Path, *, rounds: int) -> list[Row]:
    """Times batches that differ in one kind of work and returns the prices."""
    base = describe_base(model)
    write_adapters(folder, base, count=ADAPTERS, rank=RANK)
    setup = Setup(str(model), str(folder), streams=STREAMS, context=LONG + OUTPUT, max_adapters=ADAPTERS, max_rank=RANK)
    with Veneer(setup) as engine:
        turns = {
            f"{prompt} and {output} tokens, {adapters} adapters": Turn(
                engine, Workload(STREAMS, prompt, output, base.vocab_size, adapters=adapters, rank=RANK)
            )
            for prompt, output, adapters in (
                (SHORT, 1, 0),
                (LONG, 1, 0),
                (SHORT, OUTPUT, 0),
                (SHORT, 1, ADAPTERS),
                (SHORT, OUTPUT, ADAPTERS),
            )
        }
        taken = take_turns(turns, rounds=rounds)
        loads_s = engine.loads_s
    names = ("prompt", "long prompt", "decode", "mixed prompt", "mixed decode")
    seconds = {name: middle(taken, label, lambda run: run.extra["run"]) for name, label in zip(names, turns, strict=True)}
    return prices_of(seconds, load_s=statistics.median(loads_s))


def prices_of(seconds: Mapping[str, float], *, load_s: float) -> list[Row]:
    """Turns the steps' times of whole batches, and the time that a MiB takes to load, into prices in prompt tokens."""
    prompt_s = (seconds["long prompt"] - seconds["prompt"]) / (STREAMS * (LONG - SHORT))
    decode_s = (seconds["decode"] - seconds["prompt"]) / (OUTPUT - 1)
    mixed_s = (seconds["mixed decode"] - seconds["mixed prompt"]) / (OUTPUT - 1)
    return [
        Row("prompt_token_us", prompt_s * 1e6, unit="µs"),
        Row("decode_price", decode_s / STREAMS / prompt_s, unit="prompt tokens"),
        Row("rank_row_price", (mixed_s - decode_s) / (ADAPTERS * RANK) / prompt_s, unit="prompt tokens"),
        Row("load_mib_price", load_s / prompt_s, unit="prompt tokens"),
    ]


def main() -> None:
    """Entry point."""
    parser = report.parser("Measures what work costs, in prompt tokens.")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of which the median counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="veneer-bench-") as folder:
        rows = measure_prices(prepare(), Path(folder), rounds=arguments.rounds)
    report.publish(rows, path=arguments.json, title=f"prices, SmolLM2-135M, bfloat16, {STREAMS} streams")
    print("\n".join(f"VENEER_DATAPLANE_{row.id.upper()}={row.value:.2g}" for row in rows[1:]))


if __name__ == "__main__":
    main()
