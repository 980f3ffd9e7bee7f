"""What gRPC adds: streams of a data plane beside the engine's own client, rows of `benchmarks.engine`."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.contenders.process import Process, Setup
from benchmarks.report import Row
from benchmarks.rounds import Taken, Turn, middle, ratio, take_turns, tokens_per_s
from benchmarks.workload import Run, Workload, percentile
from veneer.artifact import describe_base


def measure_streaming(model: Path, *, rounds: int, streams: int = 64, output_tokens: int = 64) -> list[Row]:
    """Streams the base, in turns with an engine of the same settings."""
    setup = Setup(str(model), streams=streams, context=32 + output_tokens)
    workload = Workload(streams, 32, output_tokens, describe_base(model).vocab_size)
    with Process("veneer", setup) as engine, Process("streams", setup) as grpc:
        taken = take_turns({"in process": Turn(engine, workload), "gRPC": Turn(grpc, workload)}, rounds=rounds)
    return streaming_rows(taken)


def streaming_rows(taken: Taken) -> list[Row]:
    """Returns the rows."""
    return [
        Row("grpc_vs_inprocess", ratio(taken, "gRPC", "in process", tokens_per_s), target=">= 0.85"),
        Row("tokens_per_message", _extra(taken["gRPC"], "tokens_per_message"), unit="tokens", target="<= 1.5"),
        Row("grpc_ttft", ratio(taken, "gRPC", "in process", _ttft_s), target="<= 1.2"),
        Row("grpc_itl_p99", ratio(taken, "gRPC", "in process", _itl_p99_s), target="<= 1.3"),
        Row("grpc_cpu_ms_per_token", _extra(taken["gRPC"], "streaming_cpu_ms"), unit="ms"),
        Row("grpc_engine_cpu_ms_per_token", _extra(taken["gRPC"], "engine_cpu_ms"), unit="ms"),
        Row("grpc_ttft_p99", middle(taken, "gRPC", lambda run: percentile(run.firsts_s, 99)) * 1e3, unit="ms"),
    ]


def _extra(runs: list[Run], name: str) -> float:
    return statistics.median(run.extra[name] for run in runs)


def _ttft_s(run: Run) -> float:
    return percentile(run.firsts_s, 50)


def _itl_p99_s(run: Run) -> float:
    return percentile(run.gaps_s, 99)
