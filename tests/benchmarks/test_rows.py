"""Rows computed from given timings."""

from __future__ import annotations

import math

import pytest

from benchmarks.breakdown import decode_parts, with_speeds
from benchmarks.peers import Match, compare, matches
from benchmarks.report import Row, judge
from benchmarks.rounds import prefill_s
from benchmarks.speed import large_rows, small_rows
from benchmarks.streaming import streaming_rows
from benchmarks.workload import Run, Workload
from tests.fixtures.adapters import describe_llama


def made(seconds: float = 1.0, *, step_s: float = 0.1, first_s: float = 0.5, token: int = 7, **extra: float) -> list[Run]:
    """One round of eight tokens."""
    return [Run(seconds, [[token] * 8], [first_s], [step_s] * 7, extra)]


def values(rows: list[Row]) -> dict[str, float]:
    return {row.id: row.value for row in rows}


SMALL = {
    "engine base": made(1.0, step_s=0.050),
    "bare base": made(0.9),
    "engine 22 adapters": made(1.25, step_s=0.060),
    "bare 22 adapters": made(1.0),
    "engine 64 adapters": made(2.0),
    "engine 8 adapters": made(1.5, step_s=0.100),
    "engine 8 adapters, 65 rows": made(1.5, step_s=0.102),
}


def test_the_engine_is_divided_by_the_bare_loop_and_by_itself() -> None:
    found = values(small_rows(SMALL, bandwidth=50e9, read=250e6))
    assert found["base_vs_bare"] == pytest.approx(0.9)
    assert found["mixed_vs_bare"] == pytest.approx(0.8)
    assert found["mixed_vs_base"] == pytest.approx(0.8)
    assert found["lora_bytes"] == pytest.approx(2.0)  # 10 ms more, where reading the adapters takes 5
    assert found["distinct64_vs_8"] == pytest.approx(0.75)
    assert found["same_adapter_marginal"] == pytest.approx(1.02)
    assert found["bare_same_tokens"] == 1.0


def test_the_mixed_figure_does_not_count_while_the_engine_is_slower_than_a_loop() -> None:
    rows = small_rows(SMALL, bandwidth=50e9, read=250e6)
    verdicts = {row.id: holds for row, holds in zip(rows, judge(rows), strict=True)}
    assert verdicts["mixed_vs_bare"] is False
    assert verdicts["mixed_vs_base"] is False
    assert verdicts["base_vs_bare"] is True


def test_large_shapes_compare_decode_steps() -> None:
    steps = {"0": 0.09, "22": 0.1, "64": 0.12, "8": 0.09}
    found = values(large_rows({label: made(step_s=step) for label, step in steps.items()}))
    assert found == {"mixed_vs_base_7b": pytest.approx(0.9), "distinct64_vs_8_7b": pytest.approx(0.75)}


def test_streams_are_divided_by_the_engines_own_client() -> None:
    taken = {
        "in process": made(0.9, step_s=0.05, first_s=1.0),
        "gRPC": made(1.0, step_s=0.06, first_s=1.1, tokens_per_message=1.25, streaming_cpu_ms=0.2, engine_cpu_ms=2.0),
    }
    found = values(streaming_rows(taken))
    assert found["grpc_vs_inprocess"] == pytest.approx(0.9)
    assert found["grpc_ttft"] == pytest.approx(1.1)
    assert found["grpc_itl_p99"] == pytest.approx(1.2)
    assert found["tokens_per_message"] == 1.25
    assert found["grpc_cpu_ms_per_token"] == 0.2


class Profiled:
    """Takes 2 s for products at the prefill and 0.5 s more for every further token."""

    def run(self, workload: Workload) -> Run:
        products = 2.0 + 0.5 * (workload.output_tokens - 1)
        extra = {"products": products, "run": products + 0.25 * workload.output_tokens}
        return Run(1.0, [[0] * workload.output_tokens], extra=extra)


def test_a_decode_step_is_what_more_tokens_take() -> None:
    parts = decode_parts(Profiled(), Workload(1, 4, 28, 100))
    assert parts["products"] == pytest.approx(500.0)
    assert parts["rest"] == pytest.approx(250.0)
    assert parts["all"] == pytest.approx(750.0)


def test_a_breakdown_says_how_fast_the_products_compute_and_read() -> None:
    base = describe_llama(num_layers=2, hidden=16, heads=4, kv_heads=2, inner=24)
    elements = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24)
    parts = with_speeds({"products": 0.5}, base, rows=3)
    assert parts["products compute"] == pytest.approx(2 * elements * 3 / 0.5e-3 / 1e9)
    assert parts["products read"] == pytest.approx(2 * elements / 0.5e-3 / 1e9)


PEER = Match("mixed_vs_vllm", "vllm", Workload(64, 32, 8, 100, adapters=22), ">= 7")
OURS, THEIRS = "veneer 64 x 32, 22 adapters", "vllm 64 x 32, 22 adapters"


def test_a_speed_is_ours_over_theirs() -> None:
    found = values(compare(PEER, {OURS: made(1.0), THEIRS: made(8.0)}))
    assert found == {"mixed_vs_vllm": 8.0, "mixed_vs_vllm_same_tokens": 1.0}


def test_a_time_is_theirs_over_ours() -> None:
    match = Match("mixed_prefill_vs_vllm", "vllm", PEER.workload, ">= 15", prefill_s)
    assert values(compare(match, {OURS: made(first_s=0.5), THEIRS: made(first_s=8.0)}))[match.id] == 16.0


def test_a_contender_with_other_tokens_is_not_compared() -> None:
    rows = compare(PEER, {OURS: made(1.0), THEIRS: made(8.0, token=3)})
    assert math.isnan(rows[0].value)
    assert rows[0].meets is False


def test_every_row_of_a_peer_has_a_bound_and_an_id_of_its_own() -> None:
    ids = [match.id for match in matches(100)]
    assert len(set(ids)) == len(ids)
    assert {match.peer for match in matches(100)} == {"vllm", "transformers", "peft"}
