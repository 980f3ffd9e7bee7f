"""What `batch_invariant` costs: `python -m benchmarks.invariant [--json PATH]`.

Two engines of equal settings, one with it and one without, in processes of their own, take turns; each row is the quotient of
their speeds. The one that does not run sleeps: an idle engine waits on a queue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks import report
from benchmarks.report import Row
from benchmarks.workload import Workload, write_adapters
from dataplane.engine.client import EngineClient
from demo.prepare import prepare
from veneer.artifact import describe_base


async def measure_invariance(*, rounds: int, streams: int = 64, prompt_tokens: int = 32, output_tokens: int = 32) -> list[Row]:
    """Returns tokens per second with the setting on, over those with it off, for the base and for a mixed batch."""
    from benchmarks.engine import ADAPTERS, InProcess, engine_config

    model = prepare()
    base = describe_base(model)
    workloads = {
        name: Workload(streams, prompt_tokens, output_tokens, base.vocab_size, adapters=adapters)
        for name, adapters in (("base", 0), ("mixed", ADAPTERS))
    }
    config = engine_config(model, streams=streams, context=prompt_tokens + output_tokens)
    speeds: dict[tuple[str, bool], list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        images = write_adapters(folder, base, count=ADAPTERS, rank=workloads["mixed"].rank, dtype=config.dtype)
        engines = {}
        for invariant in (False, True):
            client = await EngineClient.start(dataclasses.replace(config, batch_invariant=invariant))
            stack.push_async_callback(client.stop)
            for version, path in images.items():
                client.stage(version, path)
            engines[invariant] = InProcess(client)
            for workload in workloads.values():
                await engines[invariant].run(workload)
        for _ in range(rounds):
            for name, workload in workloads.items():
                for invariant, engine in engines.items():
                    speeds[name, invariant].append((await engine.run(workload)).tokens_per_s)
    return [
        Row(f"batch_invariant_cost_{name}", statistics.median(speeds[name, True]) / statistics.median(speeds[name, False]))
        for name in workloads
    ]


def main() -> None:
    """Entry point."""
    parser = report.parser("Measures what batch_invariant costs on SmolLM2-135M in bfloat16.")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of which the median counts")
    arguments = parser.parse_args()
    rows = asyncio.run(measure_invariance(rounds=arguments.rounds))
    raise SystemExit(0 if report.publish(rows, path=arguments.json, title="batch_invariant: tokens/s on / off") else 1)


if __name__ == "__main__":
    main()
