"""The metrics page shows the names that routers read, with bounded labels."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dataplane.engine.messages import Holding, State
from dataplane.metrics import Metrics
from dataplane.token_stream import End, Piece

STATE = State(
    token=0,
    running=3,
    waiting=2,
    kv_pages_used=25,
    kv_pages_total=100,
    arena_bytes_used=4096,
    arena_bytes_total=8192,
    leases=2,
    steps=9,
    max_adapters_in_step=2,
    max_rows_in_step=7,
    mixed_steps=1,
    generated_tokens=50,
    device_hits=5,
    host_hits=4,
    store_loads=3,
    evictions=1,
    holdings=(
        Holding("a" * 64, "device", 8, 2048, 1, 1, loss=0.04, loss_at="layers.0.mlp.down_proj"),
        Holding("c" * 64, "loading", 4, 100, 0, 2),
    ),
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry, base_name="tiny", max_tenants=2)


def test_the_engines_figures_have_the_names_that_routers_read(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.show_engine(STATE, page_size=16, max_slots=40)
    page = generate_latest(registry).decode()
    for line in (
        'vllm:num_requests_running{model_name="tiny"} 3.0',
        'vllm:num_requests_waiting{model_name="tiny"} 2.0',
        'vllm:kv_cache_usage_perc{model_name="tiny"} 0.25',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0',
        'veneer_adapter_hits_total{level="store"} 3.0',
        "veneer_adapter_resident_rank_rows 8.0",
        "veneer_adapter_loss_max 0.04",
    ):
        assert line in page
    info = f'vllm:lora_requests_info{{max_lora="40",running_lora_adapters="{"a" * 64}",waiting_lora_adapters="{"c" * 64}"}}'
    assert info in page


def test_the_engines_time_goes_on_after_its_restart(metrics: Metrics, registry: CollectorRegistry) -> None:
    for seconds in (2.0, 3.5, 0.25):
        metrics.show_engine(replace(STATE, seconds=(("run", seconds),)), page_size=16, max_slots=40)
    assert registry.get_sample_value("veneer_engine_seconds_total", {"part": "run"}) == 3.75


def test_the_list_of_resident_adapters_is_one_series_however_often_it_changes(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    metrics.show_engine(STATE, page_size=16, max_slots=40)
    metrics.show_engine(STATE, page_size=16, max_slots=41)
    assert generate_latest(registry).decode().count("\nvllm:lora_requests_info{") == 1


def test_a_request_is_timed_from_its_start_to_its_last_token(metrics: Metrics, registry: CollectorRegistry) -> None:
    timer = metrics.timer("acme", time.monotonic() - 0.3, prompt_tokens=10)
    metrics.saw(timer, Piece(0, (1,), "a", None))
    metrics.saw(timer, Piece(1, (2, 3), "b", End("stop", 10, 3)))
    labels = {"model_name": "tiny"}
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_count", labels) == 1
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_sum", labels) == pytest.approx(0.3, abs=0.2)
    assert registry.get_sample_value("vllm:inter_token_latency_seconds_count", labels) == 2
    assert registry.get_sample_value("vllm:e2e_request_latency_seconds_count", labels) == 1
    assert registry.get_sample_value("vllm:prompt_tokens_total", labels) == 10
    assert registry.get_sample_value("vllm:generation_tokens_total", labels) == 3
    assert registry.get_sample_value("veneer_tenant_tokens_total", {"tenant": "acme", "kind": "completion"}) == 3


def test_a_prompt_is_counted_with_its_first_tokens_whether_or_not_the_stream_ends_well(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    timer = metrics.timer("acme", 0, prompt_tokens=10)
    for index in range(3):
        metrics.saw(timer, Piece(index, (1,), "a", None))
    assert registry.get_sample_value("vllm:prompt_tokens_total", {"model_name": "tiny"}) == 10
    assert registry.get_sample_value("veneer_tenant_tokens_total", {"tenant": "acme", "kind": "prompt"}) == 10


def test_waiting_requests_are_shown_by_what_they_wait_for_and_how_long_they_did(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    counts = (3, 2, *[0] * 18, 1)
    state = replace(STATE, waiting_by_reason={"image": 2, "turn": 0}, queue_counts=counts, queue_seconds=200.5)
    metrics.show_engine(state, page_size=16, max_slots=40)
    labels = {"model_name": "tiny"}
    assert registry.get_sample_value("vllm:num_requests_waiting_by_reason", labels | {"reason": "image"}) == 2
    assert registry.get_sample_value("vllm:num_requests_waiting_by_reason", labels | {"reason": "turn"}) == 0
    for bound, count in (("0.001", 3), ("0.005", 5), ("160.0", 5), ("+Inf", 6)):
        assert registry.get_sample_value("vllm:request_queue_time_seconds_bucket", labels | {"le": bound}) == count
    assert registry.get_sample_value("vllm:request_queue_time_seconds_count", labels) == 6
    assert registry.get_sample_value("vllm:request_queue_time_seconds_sum", labels) == 200.5


def test_tenants_beyond_the_cap_share_a_label(metrics: Metrics, registry: CollectorRegistry) -> None:
    for tenant in ("a", "b", "c", "d", "a"):
        metrics.saw(metrics.timer(tenant, 0), Piece(0, (1,), "", None))
    tenants = {
        sample.labels["tenant"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "veneer_tenant_tokens_total" and sample.labels["kind"] == "completion"
    }
    assert tenants == {"a": 2, "b": 1, "other": 2}


def test_mean_load_times_are_kept_by_hop(metrics: Metrics) -> None:
    assert metrics.mean_load_s("store", "host") == 0
    metrics.loaded("store", "host", 1)
    metrics.loaded("store", "host", 3)
    assert (metrics.mean_load_s("store", "host"), metrics.mean_load_s("host", "device")) == (2, 0)


def test_prefix_counters_grow_over_a_restart_of_the_engine() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, base_name="smol")
    for queries, hits in ((100, 40), (150, 60), (10, 5)):
        metrics.show_engine(replace(STATE, prefix_queries=queries, prefix_hits=hits), page_size=16, max_slots=40)
    value = registry.get_sample_value
    assert value("vllm:prefix_cache_queries_total", {"model_name": "smol"}) == 160
    assert value("vllm:prefix_cache_hits_total", {"model_name": "smol"}) == 65


def test_a_request_that_finds_its_version_in_one_place_missed_it_in_all_before() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, base_name="smol")
    for device, host, disk, store in ((7, 3, 4, 2), (8, 3, 5, 2), (1, 0, 0, 1)):  # the last by an engine that was started anew
        state = replace(STATE, device_hits=device, host_hits=host, disk_hits=disk, store_loads=store)
        metrics.show_engine(state, page_size=16, max_slots=40)
    for name, level, count in (
        ("hits", "device", 9), ("hits", "host", 3), ("hits", "disk", 5), ("hits", "store", 3),
        ("misses", "device", 11), ("misses", "host", 8), ("misses", "disk", 3), ("misses", "store", None),
    ):  # fmt: skip
        assert registry.get_sample_value(f"veneer_adapter_{name}_total", {"level": level}) == count


def test_circuits_are_counted_by_state_and_go_back_to_none(metrics: Metrics, registry: CollectorRegistry) -> None:
    for counts in ({"open": 2, "failing": 1}, {}):
        metrics.show_circuits(Counter(counts))
        for state in ("failing", "open", "half_open"):
            assert registry.get_sample_value("veneer_adapter_circuits", {"state": state}) == counts.get(state, 0)
