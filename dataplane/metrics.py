"""Prometheus metrics: the names that routers of the vLLM ecosystem read, and our own beside them."""

from __future__ import annotations

import itertools
import time
from collections import Counter as Counting
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from dataplane.circuits import CircuitState
from dataplane.engine.messages import State
from dataplane.engine.queue_times import BOUNDS_S
from dataplane.engine.step_rows import RANK_ROW_BOUNDS
from dataplane.token_stream import Piece

_OTHER = "other"


@dataclass(slots=True)
class RequestTimer:
    """When one request began and when its last piece went out, in monotonic seconds. Owned by that request.

    Attributes:
        tenant: Label of its tenant.
        started_s: When it began.
        prompt_tokens: Tokens of its prompt, counted with its first piece.
        last_s: When its last piece went out.
    """

    tenant: str
    started_s: float
    prompt_tokens: int = 0
    last_s: float | None = None


class _Histogram(Collector):
    """A histogram that the engine keeps itself."""

    def __init__(self, name: str, text: str, *, bounds: Iterable[float], labels: dict[str, str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._names = (*map(str, map(float, bounds)), "+Inf")
        self._seen: tuple[tuple[int, ...], float] = ((), 0.0)

    def show(self, counts: tuple[int, ...], total: float) -> None:
        """Shows the counts of its buckets, and the sum of what was counted."""
        self._seen = counts, total

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Returns it; called by the thread that renders the page."""
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        counts, total = self._seen
        if counts:
            buckets = list(zip(self._names, itertools.accumulate(counts), strict=True))
            family.add_metric(tuple(self._labels.values()), buckets, total)
        return (family,)


class _Totals:
    """Feeds counters from an engine's own counts, which begin at 0 with every engine; a counter never goes back."""

    def __init__(self) -> None:
        self._seen: dict[Counter, int] = {}

    def show(self, counter: Counter, count: int) -> None:
        seen = self._seen.get(counter, 0)
        counter.inc(count - seen if count >= seen else count)
        self._seen[counter] = count


class Metrics:
    """All metrics of the data plane. Owned by the event loop; the page is rendered on another thread.

    Args:
        registry: Where they are registered.
        base_name: Name of the base, the label `model_name`.
        max_tenants: Tenants with a label of their own; the others share `other`.
        max_versions: Versions listed in `vllm:lora_requests_info` at most.
    """

    def __init__(self, registry: CollectorRegistry, *, base_name: str, max_tenants: int = 1000, max_versions: int = 1000) -> None:
        self._max_tenants = max_tenants
        self._max_versions = max_versions
        self._tenants: set[str] = set()
        self._loads: dict[tuple[str, str], tuple[int, float]] = {}
        labels = ("model_name",)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry).labels(base_name)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, labels, buckets=BOUNDS_S, registry=registry).labels(base_name)

        def counter(name: str, text: str, labels: Iterable[str]) -> Counter:
            return Counter(name, text, tuple(labels), registry=registry)

        self._running = gauge("vllm:num_requests_running", "Requests that run.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests that wait.")
        self._reasons = Gauge(
            "vllm:num_requests_waiting_by_reason", "Requests that wait, by what for.", ("model_name", "reason"), registry=registry
        )
        self._queue_times = _Histogram(
            "vllm:request_queue_time_seconds",
            "From the engine's queue to the first step, since the engine's start.",
            bounds=BOUNDS_S,
            labels={"model_name": base_name},
        )
        registry.register(self._queue_times)
        self._step_rows = _Histogram(
            "veneer_step_rank_rows",
            "Rank rows that a step walks, since the engine's start.",
            bounds=RANK_ROW_BOUNDS,
            labels={},
        )
        registry.register(self._step_rows)
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Used part of the KV pages; 1 is all.")
        self._cache_config = Gauge("vllm:cache_config_info", "Always 1.", ("block_size", "num_gpu_blocks"), registry=registry)
        self._prefix = {
            "queries": counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", labels),
            "hits": counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", labels),
        }
        self._totals = _Totals()
        self._base_name = base_name
        self._lora_info = Gauge(
            "vllm:lora_requests_info",
            "Time of the last look, in seconds since 1970; adapters on the device and adapters that requests wait for.",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            registry=registry,
        )
        self._first_token = histogram("vllm:time_to_first_token_seconds", "From the request to its first token.")
        self._inter_token = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From the request to its last token.")
        self._prompt_tokens = Counter("vllm:prompt_tokens", "Tokens of prompts.", labels, registry=registry).labels(base_name)
        self._generation_tokens = Counter("vllm:generation_tokens", "Tokens generated.", labels, registry=registry).labels(
            base_name
        )

        self._usage_lost = Counter("veneer_usage_lost", "Requests whose use the disk did not take.", registry=registry)
        self._usage_held = gauge("veneer_usage_journals_held", "Journals of usage that are not taken or cannot be read.")
        self._quota_refusals = counter("veneer_quota_refusals", "Requests refused for a tenant's quota.", ("quota",))
        self._load_seconds = Histogram(
            "veneer_adapter_load_seconds", "Time of loads by hop.", ("origin", "target"), buckets=BOUNDS_S, registry=registry
        )
        self._fetch_seconds = Histogram(
            "veneer_adapter_fetch_seconds",
            "Time of the parts of a load from the store: leave to read, bytes, image.",
            ("part",),
            buckets=BOUNDS_S,
            registry=registry,
        )
        self._load_failures = counter("veneer_adapter_load_failures", "Loads that failed for good.", ["status"])
        self._load_cancellations = counter("veneer_adapter_load_cancellations", "Loads that nobody waited for any more.", [])
        self._circuits = Gauge(
            "veneer_adapter_circuits", "Versions whose last load failed, by state.", ("state",), registry=registry
        )
        self._cold_first_token = Histogram(
            "veneer_adapter_first_token_seconds",
            "From the request to its first token, by where its version was.",
            ("level",),
            buckets=BOUNDS_S,
            registry=registry,
        )
        self._evictions = counter("veneer_adapter_evictions", "Copies of adapters that went, by why.", ["level", "reason"])
        self._unloads = counter("veneer_adapter_unloads", "Versions that were let go whole.", [])
        self._unloaded_bytes = counter("veneer_adapter_unloaded_bytes", "Bytes that came free with them.", ["level"])
        self._unloading = Gauge("veneer_adapter_unloading", "Versions to be let go that requests still use.", registry=registry)
        self._reports = counter("veneer_residency_reports", "Reports of what the node holds, to Redis.", ["outcome"])
        self._watchers = Gauge("veneer_residency_watchers", "Readers of what the node holds.", registry=registry)
        self._corruptions = counter("veneer_adapter_corruptions", "Bytes found corrupt.", ["level"])
        self._prefetches = counter(
            "veneer_adapter_prefetch", "Loads ahead of requests, by what came of them.", ["source", "outcome"]
        )
        self._prefetched_bytes = counter("veneer_adapter_prefetch_bytes", "Bytes that came ahead of requests.", [])
        self._hits = counter("veneer_adapter_hits", "Requests by where they found their version.", ["level"])
        self._misses = counter("veneer_adapter_misses", "Requests by where they looked for their version in vain.", ["level"])
        self._resident = Gauge("veneer_adapter_resident", "Adapters by their highest level.", ("level",), registry=registry)
        self._resident_bytes = Gauge(
            "veneer_adapter_resident_bytes", "Bytes of adapters, and of KV pages kept for reuse.", ("level",), registry=registry
        )
        self._rank_rows = Gauge("veneer_adapter_resident_rank_rows", "Sum of the ranks on the device.", registry=registry)
        self._loss = Gauge(
            "veneer_adapter_loss_max", "Most that a projection of an adapter on the device loses in fp8.", registry=registry
        )
        self._leases = Gauge("veneer_adapter_leases", "Leases held by running requests.", registry=registry)
        self._fallbacks = counter(
            "veneer_fallbacks", "Requests that something else answered, by why and by what.", ["reason", "by"]
        )
        self._tenant_tokens = counter("veneer_tenant_tokens", "Tokens by tenant.", ["tenant", "kind"])
        self._not_finite = counter("veneer_not_finite", "Requests that ended since their logits were not finite.", [])
        self._catalog_age = Gauge("veneer_catalog_age_seconds", "Time since all committed changes were known.", registry=registry)
        self._resolve = Gauge(
            "veneer_resolve_answers", "Answers of the resolve cache, since start.", ("kind",), registry=registry
        )
        self._hints_connected = Gauge("veneer_hints_connected", "1 while hints are subscribed to.", registry=registry)
        self._engine_starts = counter("veneer_engine_starts", "Starts of the engine.", [])
        self._engine_seconds = counter("veneer_engine_seconds", "Time of the step loop by part.", ["part"])
        self._engine_seconds_seen: dict[str, float] = {}

    def timer(self, tenant: str, started_s: float, *, prompt_tokens: int = 0) -> RequestTimer:
        """Returns what times one choice of a request; `prompt_tokens` are counted with its first piece."""
        return RequestTimer(self._tenant(tenant), started_s, prompt_tokens)

    def saw(self, timer: RequestTimer, piece: Piece) -> None:
        """Counts a piece that goes out now."""
        now_s = time.monotonic()
        num_tokens = len(piece.ids)
        if timer.last_s is None:
            self._first_token.observe(now_s - timer.started_s)
            self._prompt_tokens.inc(timer.prompt_tokens)
            self._tenant_tokens.labels(timer.tenant, "prompt").inc(timer.prompt_tokens)
        else:
            for _ in range(num_tokens):
                self._inter_token.observe((now_s - timer.last_s) / num_tokens)
        timer.last_s = now_s
        self._generation_tokens.inc(num_tokens)
        self._tenant_tokens.labels(timer.tenant, "completion").inc(num_tokens)
        if piece.end is not None:
            self._whole.observe(now_s - timer.started_s)

    def mean_load_s(self, origin: str, target: str) -> float:
        """Returns the mean time of a hop in seconds; 0 when there was none."""
        count, total = self._loads.get((origin, target), (0, 0.0))
        return total / count if count else 0.0

    def loaded(self, origin: str, target: str, seconds: float) -> None:
        """A version moved one hop up."""
        count, total = self._loads.get((origin, target), (0, 0.0))
        self._loads[origin, target] = (count + 1, total + seconds)
        self._load_seconds.labels(origin, target).observe(seconds)

    def fetched(self, part: str, seconds: float) -> None:
        """A part of a load from the store was done."""
        self._fetch_seconds.labels(part).observe(seconds)

    def load_failed(self, status: str) -> None:
        """A version cannot be had."""
        self._load_failures.labels(status).inc()

    def load_cancelled(self) -> None:
        """Nobody waited for a load any more."""
        self._load_cancellations.inc()

    def first_token(self, level: str, seconds: float) -> None:
        """The first token of a request came, whose version was on the `device`, in `host` memory, on `disk` or in the `store`."""
        self._cold_first_token.labels(level).observe(seconds)

    def evicted(self, level: str, reason: str) -> None:
        """A version lost its copy."""
        self._evictions.labels(level, reason).inc()

    def unloaded(self, freed: Mapping[str, int]) -> None:
        """A version was let go; bytes that came free by level."""
        self._unloads.inc()
        for level, num_bytes in freed.items():
            self._unloaded_bytes.labels(level).inc(num_bytes)
            if num_bytes and level in ("device", "disk"):
                self._evictions.labels(level, "unload").inc()

    def reported(self, outcome: str) -> None:
        """A report to Redis came to an end."""
        self._reports.labels(outcome).inc()

    def watched(self, num_readers: int) -> None:
        """Readers of what the node holds came or went."""
        self._watchers.set(num_readers)

    def corrupt(self, level: str) -> None:
        """Bytes were found corrupt."""
        self._corruptions.labels(level).inc()

    def prefetched(self, source: str, outcome: str) -> None:
        """Something came of a load ahead.

        Args:
            source: `hinted` or `expected`.
            outcome: `started`; or none was needed or wanted: `held`, `broken`, `no_room`, `dropped`. What started ends `used`,
                `wasted` (it made room before it was used), `late` (a request came meanwhile) or `failed`.
        """
        self._prefetches.labels(source, outcome).inc()

    def prefetched_bytes(self, num_bytes: int) -> None:
        """Bytes came that no request waits for."""
        self._prefetched_bytes.inc(num_bytes)

    def fell_back(self, reason: str, *, by: str) -> None:
        """The `base`, or the `previous` version, answered in place of what was asked for."""
        self._fallbacks.labels(reason, by).inc()

    def quota_refused(self, quota: str) -> None:
        """A request was refused for a tenant's quota."""
        self._quota_refusals.labels(quota).inc()

    def usage_lost(self) -> None:
        """What a request used could not be noted."""
        self._usage_lost.inc()

    def usage_held(self, num_journals: int) -> None:
        """So many journals of usage are held after a look."""
        self._usage_held.set(num_journals)

    def not_finite(self) -> None:
        """A request's logits were not finite."""
        self._not_finite.inc()

    def engine_started(self) -> None:
        """An engine was started."""
        self._engine_starts.inc()

    def show_engine(self, state: State, *, page_size: int, max_slots: int) -> None:
        """Shows the engine's counters."""
        self._running.set(state.running)
        self._waiting.set(state.waiting)
        for reason, count in state.waiting_by_reason.items():
            self._reasons.labels(self._base_name, reason).set(count)
        self._queue_times.show(state.queue_counts, state.queue_seconds)
        self._step_rows.show(state.rank_row_counts, state.rank_rows)
        self._kv_usage.set(state.kv_pages_used / max(state.kv_pages_total, 1))
        self._cache_config.labels(page_size, state.kv_pages_total).set(1)
        for kind, count in (("queries", state.prefix_queries), ("hits", state.prefix_hits)):
            self._totals.show(self._prefix[kind].labels(self._base_name), count)
        on_device = [holding for holding in state.holdings if holding.place == "device"]
        waiting = [holding.version for holding in state.holdings if holding.place == "loading"]
        self._lora_info.clear()
        names = ",".join(holding.version for holding in on_device[: self._max_versions])
        self._lora_info.labels(max_slots, names, ",".join(waiting[: self._max_versions])).set(time.time())
        self._show_tiers(state)
        self._resident_bytes.labels("device").set(state.arena_bytes_used)
        self._resident_bytes.labels("host").set(state.host_bytes)
        self._resident_bytes.labels("kv").set(state.kv_pages_kept * state.kv_page_bytes)
        self._rank_rows.set(sum(holding.rank for holding in on_device))
        self._loss.set(max((holding.loss for holding in on_device), default=0.0))
        self._leases.set(state.leases)
        for part, seconds in state.seconds:
            known = self._engine_seconds_seen.get(part, 0.0)
            self._engine_seconds.labels(part).inc(seconds - known if seconds >= known else seconds)
            self._engine_seconds_seen[part] = seconds

    def _show_tiers(self, state: State) -> None:
        """A request that found its version in one tier looked in vain in all above it."""
        hits = {"device": state.device_hits, "host": state.host_hits, "disk": state.disk_hits, "store": state.store_loads}
        missed = sum(hits.values())
        for level, count in hits.items():
            self._totals.show(self._hits.labels(level), count)
            missed -= count
            if level != "store":
                self._totals.show(self._misses.labels(level), missed)

    def show_held(self, tiers: Mapping[str, int], *, disk_bytes: int, unloading: int) -> None:
        """Shows how many versions each tier holds, the bytes of image files, and how many versions are being let go."""
        for tier, count in tiers.items():
            self._resident.labels(tier).set(count)
        self._resident_bytes.labels("disk").set(disk_bytes)
        self._unloading.set(unloading)

    def show_circuits(self, states: Counting[str]) -> None:
        """Shows how many circuits are in which state."""
        for state in CircuitState:
            self._circuits.labels(state.value).set(states[state.value])

    def show_catalog(self, *, age_s: float, answers: dict[str, int], hints_connected: bool) -> None:
        """Shows how fresh the node's knowledge is."""
        self._catalog_age.set(age_s)
        for kind, count in answers.items():
            self._resolve.labels(kind).set(count)
        self._hints_connected.set(hints_connected)

    def _tenant(self, tenant: str) -> str:
        if tenant not in self._tenants and len(self._tenants) >= self._max_tenants:
            return _OTHER
        self._tenants.add(tenant)
        return tenant
