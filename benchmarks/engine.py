"""The engine beside a bare loop, transformers, and itself behind gRPC: `python -m benchmarks.engine [--json PATH]`.

Every figure is a quotient of two speeds of one run. Contenders take turns, the order is repeated, and the median counts; each
is a process with huge pages, and sleeps while another runs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks import report
from benchmarks.bare import Timing
from benchmarks.contenders import Process
from benchmarks.grpc_streams import GrpcStreams
from benchmarks.report import Row
from benchmarks.workload import Workload, adapter_name, write_adapters
from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Sampling, Submit
from demo.prepare import prepare
from veneer.artifact import describe_base

ADAPTERS = 22


def engine_config(model: Path, *, streams: int, context: int) -> EngineConfig:
    """Settings under which nothing but compute limits the engine."""
    return EngineConfig(
        model_dir=str(model),
        max_sequences=streams,
        max_step_tokens=2048,
        max_context=context,
        kv_bytes=1 << 30,
        arena_bytes=512 << 20,
        max_step_rank_rows=1024,
    )


class InProcess:
    """The engine through its own client, in this process: no network, no text."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._runs = 0

    async def run(self, workload: Workload) -> Timing:
        """Generates all tokens once, greedily."""
        self._runs += 1
        start = time.perf_counter()
        firsts = await asyncio.gather(*(self._stream(workload, index, ids) for index, ids in enumerate(workload.prompts())))
        total = time.perf_counter() - start
        prefill = max(firsts) - start
        steps = max(1, workload.output_tokens - 1)
        return Timing(workload.streams * workload.output_tokens / total, prefill, (total - prefill) / steps)

    async def _stream(self, workload: Workload, index: int, ids: list[int]) -> float:
        submit = Submit(
            request_id=f"{self._runs}-{index}",
            tenant="bench",
            prompt=tuple(ids),
            sampling=Sampling(max_tokens=workload.output_tokens, temperature=0.0),
            version=adapter_name(index % workload.adapters) if workload.adapters else None,
            cache_salt=f"{self._runs:x}",  # every run computes its prompts anew
        )
        count, first = 0, 0.0
        async for delta in self._client.submit(submit):
            first = first or time.perf_counter()
            count += len(delta.ids)
        assert count == workload.output_tokens, f"{count} tokens of {workload.output_tokens}"
        return first


async def measure(*, rounds: int, streams: int, prompt_tokens: int, output_tokens: int) -> list[Row]:
    """Runs everything and returns the rows."""
    model = prepare()
    base = describe_base(model)
    workload = Workload(streams, prompt_tokens, output_tokens, base.vocab_size)
    mixed = Workload(streams, prompt_tokens, output_tokens, base.vocab_size, adapters=ADAPTERS)
    timings: dict[str, list[Timing]] = defaultdict(list)
    config = engine_config(model, streams=streams, context=prompt_tokens + output_tokens)
    with (
        tempfile.TemporaryDirectory() as folder,
        Process("bare", model) as bare,
        Process("transformers", model) as transformers,
    ):
        client = await EngineClient.start(config)
        try:
            engine = InProcess(client)
            for version, path in write_adapters(Path(folder), base, count=ADAPTERS, rank=mixed.rank, dtype=config.dtype).items():
                client.stage(version, path)
            for warm in (workload, mixed):
                await engine.run(warm)
            for _ in range(rounds):
                timings["transformers base"].append(await asyncio.to_thread(transformers.run, workload))
                timings["engine base"].append(await engine.run(workload))
                timings["bare base"].append(await asyncio.to_thread(bare.run, workload))
                timings["engine mixed"].append(await engine.run(mixed))
                timings["bare mixed"].append(await asyncio.to_thread(bare.run, mixed))
        finally:
            await client.stop()
    streamed = await measure_grpc(model, workload, rounds=rounds, timings=timings)
    _print_timings(timings)
    speed = {name: statistics.median(timing.tokens_per_s for timing in runs) for name, runs in timings.items()}
    return [
        Row("base_vs_transformers", speed["engine base"] / speed["transformers base"], target=">= 2"),
        Row("base_vs_bare", speed["engine base"] / speed["bare base"], target=">= 0.6"),
        Row("mixed_vs_bare", speed["engine mixed"] / speed["bare mixed"], target=">= 0.6"),
        Row("mixed_vs_base", speed["engine mixed"] / speed["engine base"], target=">= 0.4"),
        Row("grpc_vs_inprocess", speed["grpc base"] / speed["inprocess base"], target=">= 0.85"),
        Row("tokens_per_message", streamed, unit="tokens", target="<= 1.5"),
    ]


async def measure_grpc(model: Path, workload: Workload, *, rounds: int, timings: dict[str, list[Timing]]) -> float:
    """Streams the base over gRPC from a data plane, in turns with an engine of the same settings; returns tokens per message."""
    async with AsyncExitStack() as stack:
        config = engine_config(model, streams=workload.streams, context=workload.prompt_tokens + workload.output_tokens)
        client = await EngineClient.start(config)
        stack.push_async_callback(client.stop)
        engine, grpc = InProcess(client), await stack.enter_async_context(GrpcStreams(model, config))
        await engine.run(workload)
        await grpc.run(workload)
        messages = []
        for _ in range(rounds):
            timings["inprocess base"].append(await engine.run(workload))
            timing, per_message = await grpc.run(workload)
            timings["grpc base"].append(timing)
            messages.append(per_message)
    return statistics.median(messages)


def _print_timings(timings: dict[str, list[Timing]]) -> None:
    for name, runs in timings.items():
        middle = sorted(runs, key=lambda timing: timing.tokens_per_s)[len(runs) // 2]
        print(
            f"{name:18} {middle.tokens_per_s:8.1f} tokens/s   prefill {middle.prefill_s * 1e3:7.0f} ms   "
            f"decode step {middle.decode_step_s * 1e3:6.1f} ms   (median of {len(runs)})"
        )


def main() -> None:
    """Entry point."""
    parser: argparse.ArgumentParser = report.parser("Measures the engine on SmolLM2-135M in bfloat16.")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of which the median counts")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    arguments = parser.parse_args()
    rows = asyncio.run(
        measure(
            rounds=arguments.rounds,
            streams=arguments.streams,
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
        )
    )
    title = f"{arguments.streams} streams, prompts of {arguments.prompt_tokens}, {arguments.output_tokens} tokens each, bfloat16"
    raise SystemExit(0 if report.publish(rows, path=arguments.json, title=title) else 1)


if __name__ == "__main__":
    main()
