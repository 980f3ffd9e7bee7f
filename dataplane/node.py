"""One data plane, put together from its settings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from dataplane.access import NodeAuthenticator
from dataplane.admin import AdminServicer
from dataplane.catalog_client import ALIAS_MOVED, PROBE_ASKED, TRUST_CHANGED, CatalogClient, Change, open_channel
from dataplane.change_feed import ChangeFeed
from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import State
from dataplane.enrollment import Enrollment
from dataplane.frontend.prompts import ChatOptions, Prompts
from dataplane.generation import Generator, StreamLimits
from dataplane.hints import Allowance, Hint, HintSubscriber, TenantAllowance
from dataplane.loads import LoadLimits
from dataplane.lora.eviction import Recency
from dataplane.lora.host_cache import HostCache
from dataplane.metering import Metering
from dataplane.metrics import Metrics
from dataplane.options import control_plane_ca, engine_config, tenant_limits
from dataplane.outcomes import OutcomeReporter, Outcomes
from dataplane.pins import PinLimits, Pins
from dataplane.prefetcher import Prefetcher
from dataplane.prober import Prober
from dataplane.quotas import Quotas
from dataplane.residency_feed import ResidencyFeed
from dataplane.residency_reports import ResidencyReporter
from dataplane.resolve_cache import ResolveCache, Subject
from dataplane.server import make_server
from dataplane.servicer import GenerationServicer
from dataplane.settings import Settings
from dataplane.staging import StagingReader
from dataplane.store import AdapterStore, StoreLimits
from dataplane.supervision import EngineSupervisor
from dataplane.trust import TrustedSource
from dataplane.unloads import Unloads
from dataplane.usage_reports import UsageReporter
from veneer.artifact import BaseDescription, BaseWeights, Limits, describe_base
from veneer.background import end_tasks
from veneer.controlplane.v1 import reports_pb2
from veneer.errors import UnavailableError, VeneerError
from veneer.server import Addresses, PlaneServer

_log = logging.getLogger(__name__)
_METRICS_S = 1.0
_HEALTH_S = 0.1


class Node:
    """A data plane. Owned by the event loop that starts it.

    Args:
        settings: Settings of the process.
        in_process: Runs the engine in a thread of this process (tests).
    """

    def __init__(self, settings: Settings, *, in_process: bool = False) -> None:
        self._settings = settings
        self._in_process = in_process
        self._tasks: list[asyncio.Task[None]] = []
        self._channel: grpc.aio.Channel | None = None
        self._reporter: ResidencyReporter | None = None
        self._registry = CollectorRegistry()
        self.server: PlaneServer

    async def start(self) -> Addresses:
        """Brings everything up and listens.

        Raises:
            VeneerError: Something that is needed is wrong or away; the message says what.
        """
        settings = self._settings
        base = await asyncio.to_thread(describe_base, settings.model_dir, edges=False)
        config = engine_config(settings, base)
        self.base_digest = base.digest
        self.metrics = Metrics(self._registry, base_name=base.name)
        self._channel = open_channel(settings.control_plane, ca_pem=control_plane_ca(settings))
        self.client = CatalogClient(self._channel, base_digest=base.digest)
        token = None if settings.enrollment_token is None else settings.enrollment_token.get_secret_value()
        self._enrollment = Enrollment(
            self.client, key_file=settings.node_key_file, token=token, rotate_s=settings.node_key_rotate_s
        )
        await self._enrollment.enroll()
        self.supervisor = EngineSupervisor(
            partial(EngineClient.start, config, in_process=self._in_process),
            metrics=self.metrics,
            report_not_finite=self.client.report_not_finite,
        )
        self._state: State | None = None
        self._build_loading(base, config)
        ready = await self.supervisor.start()
        for line in ready.plan:
            _log.info("memory plan", extra={"line": line})
        self._id = await self._enrollment.ask(self.client.identify)
        contents = await self._enrollment.ask(self.client.chat_contents)
        self._build_serving(base, max_context=ready.max_context, vocab_size=ready.vocab_size, content_tokens=contents == "tokens")
        await self.prompts.start()
        self._run_tasks()
        return await self.server.start()

    async def run(self) -> None:
        """Serves until a signal comes, then drains and stops; see `PlaneServer.run`."""
        await self.server.run(on_drain=self._refuse)

    async def stop(self) -> None:
        """Ends everything. Idempotent, and allowed after a start that failed."""
        if hasattr(self, "server"):
            await self.server.stop()
        await end_tasks(self._tasks)
        self._tasks.clear()
        if hasattr(self, "outcomes"):
            with contextlib.suppress(VeneerError):
                await self.outcomes.flush()
        if self._reporter is not None:
            await self._reporter.close()
        if hasattr(self, "usage"):
            await self.usage.close()
        if hasattr(self, "pins"):
            self.pins.close()
        if hasattr(self, "prefetcher"):
            await self.prefetcher.close()
        if hasattr(self, "store"):
            self.store.close()
        if hasattr(self, "supervisor"):
            await self.supervisor.stop()
        if hasattr(self, "prompts"):
            self.prompts.close()
        if self._channel is not None:
            await self._channel.close()

    def _build_loading(self, base: BaseDescription, config: EngineConfig) -> None:
        settings = self._settings
        idle_s = min(10.0, settings.load_timeout_s)
        settings.cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.cache = HostCache(
            settings.cache_folder / "images",
            dtype=config.arena_dtype,
            max_bytes=settings.host_cache_budget,
            policy=Recency() if settings.eviction == "lru" else None,
        )
        self.trusted = TrustedSource(self.client)
        self.store = AdapterStore(
            self.trusted,
            cache=self.cache,
            on_evicted=lambda versions: self.prefetcher.evicted(versions),  # noqa: PLW0108  it is made later
            base=base,
            base_weights=BaseWeights(settings.model_dir),
            folder=settings.cache_folder / "work",
            dtype=config.arena_dtype,
            max_loss=settings.max_adapter_loss,
            artifact_limits=Limits(max_rank=settings.max_rank),
            limits=StoreLimits(
                max_fetches=8 * settings.max_fetches,  # the prefetcher says which, and how many
                window_bytes=settings.load_memory_bytes,
                idle_s=idle_s,
                patience_s=settings.load_timeout_s,
            ),
            observe=self.metrics.fetched,
        )
        self.residency = ResidencyFeed(self.cache)
        self.unloads = Unloads(self.metrics)
        self.prefetcher = Prefetcher(
            store=self.store,
            cache=self.cache,
            engine=self.supervisor,
            may_serve=self.trusted.grant_blobs,
            metrics=self.metrics,
            unloads=self.unloads,
            limits=LoadLimits(
                max_fetches=settings.max_fetches,
                load_timeout_s=settings.load_timeout_s,
                prefetch_bytes_per_s=settings.prefetch_bytes_per_s,
                max_failures=settings.max_load_failures,
                hang_s=1.5 * idle_s,
                memory_bytes=settings.load_memory_bytes,
                disk_bytes=settings.load_disk_bytes,
                restage_bytes=config.arena_bytes,
            ),
        )
        self.supervisor.attach(self.prefetcher, self.residency)

    def _build_serving(self, base: BaseDescription, *, max_context: int, vocab_size: int, content_tokens: bool) -> None:
        settings = self._settings
        self.resolver = ResolveCache(
            self.client.resolve,
            soft_age_s=settings.resolve_age_s,
            hard_age_s=settings.t_stale_s,
            max_entries=settings.resolve_entries,
        )
        self.client.on_refused = self.resolver.forget
        self.prompts = Prompts(
            settings.model_dir,
            max_context=max_context,
            vocab_size=vocab_size,
            chat=ChatOptions(
                num_processes=settings.render_processes, max_cpu_s=settings.max_render_s, content_tokens=content_tokens
            ),
        )
        self.quotas = Quotas(self.client.lease_quotas, hard_age_s=settings.t_stale_s, on_refused=self.metrics.quota_refused)
        outcomes = Outcomes()
        self.outcomes = OutcomeReporter(outcomes, self.client.reports.outcomes)
        report, lost, held = self.client.reports.usage, self.metrics.usage_lost, self.metrics.usage_held
        self.usage = UsageReporter(settings.usage_journals, report, on_lost=lost, on_held=held)
        limits = tenant_limits(settings)
        self.generator = Generator(
            outcomes=outcomes,
            resolver=self.resolver,
            prompts=self.prompts,
            loader=self.prefetcher,
            engine=self.supervisor,
            metrics=self.metrics,
            base_digest=base.digest,
            metering=Metering(self.quotas, self.usage.entry),
            limits=StreamLimits(
                max_streams=settings.max_streams,
                max_streams_per_tenant=settings.max_streams_per_tenant,
                max_buffer_bytes=settings.stream_buffer_bytes,
                slow_reader_s=settings.slow_reader_s,
                fallback_after_s=settings.fallback_after_s,
            ),
            tenant_limits=limits,
        )
        self.prober = Prober(
            self.client.reports,
            engine=self.supervisor,
            loader=self.prefetcher,
            store=self.store,
            prompts=self.prompts,
            dtype=self.store.dtype,
            place=self.generator.place,
            limits=limits,
        )
        self.pins = Pins(
            self.supervisor,
            loader=self.prefetcher,
            source=self.trusted,
            cache=self.cache,
            limits=PinLimits(
                max_bytes=settings.pin_budget,
                max_bytes_per_tenant=settings.pin_budget_per_tenant,
                max_pins=settings.max_slots // 2,
                load_timeout_s=settings.load_timeout_s,
            ),
        )
        self.supervisor.on_dropped = self.pins.unpin
        admin = AdminServicer(
            engine=self.supervisor,
            feed=self.residency,
            unloader=self.prefetcher,
            unloads=self.unloads,
            cache=self.cache,
            generator=self.generator,
            metrics=self.metrics,
            pins=self.pins,
            names=self.client.names,
            base_digest=base.digest,
            stop_serving=lambda: self.server.set_serving(False),
        )
        self.server = make_server(
            settings,
            generation=GenerationServicer(self.generator),
            admin=admin,
            authenticator=NodeAuthenticator(self.client),
            registry=self._registry,
        )

    def _run_tasks(self) -> None:
        settings = self._settings
        self.feed = ChangeFeed(
            self.client.list_changes,
            on_changes=self._on_changes,
            on_reset=self._on_reset,
            interval_s=settings.poll_interval_s,
        )
        self._spawn(self.feed.run(), "change-feed")
        self._spawn(self.prefetcher.run(), "prefetcher")
        self._spawn(self.prober.run(), "prober")
        self._spawn(self.supervisor.run(), "supervisor")
        self._spawn(self.quotas.run(), "quotas")
        self._spawn(self.usage.run(), "usage")
        self._spawn(self._enrollment.run(), "node-key")
        self._spawn(self.outcomes.run(), "outcomes")
        self._hints: HintSubscriber | None = None
        if settings.redis_url is not None:
            self._hints = HintSubscriber(
                settings.redis_url.get_secret_value(),
                on_hint=self._on_hint,
                on_connect=self.feed.poke,
                allowance=TenantAllowance(per_s=settings.hints_per_s, burst=64),
            )
            self._spawn(self._hints.run(), "hints")
            self._reporter = ResidencyReporter(
                settings.redis_url.get_secret_value(),
                feed=self.residency,
                identify=self.client.identify,
                describe=self._describe,
                metrics=self.metrics,
            )
            self._spawn(self._reporter.run(), "residency-reports")
            staging = StagingReader(
                settings.redis_url.get_secret_value(),
                identify=self.client.identify,
                stage=self.prefetcher.hint,
                release=self.prefetcher.unload,
                is_in_use=self.prefetcher.is_in_use,
                is_full=lambda: self.prefetcher.is_full,
                staged=Allowance(per_s=settings.hints_per_s, burst=64),
                released=Allowance(per_s=1.0, burst=8),
            )
            self._spawn(staging.run(), "staging")
        self._spawn(self._show_metrics(), "metrics")
        self._spawn(self._watch_health(), "health")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_log_end)
        self._tasks.append(task)

    async def _show_metrics(self) -> None:
        settings = self._settings
        while True:
            try:
                self._state = await self.supervisor.state()
                self.metrics.show_engine(self._state, page_size=settings.page_size, max_slots=settings.max_slots)
            except UnavailableError:
                pass  # the engine restarts; its last figures stay
            counts = self.resolver.counts
            self.metrics.show_held(self.residency.tiers(), disk_bytes=self.cache.num_bytes, unloading=self.unloads.num_pending)
            self.metrics.show_circuits(Counter(circuit.state.value for circuit in self.prefetcher.circuits()))
            self.metrics.show_catalog(
                age_s=self.feed.age_s,
                answers={"fresh": counts.fresh, "asked": counts.asked, "stale": counts.stale, "regressed": counts.regressed},
                hints_connected=self._hints is not None and self._hints.connected,
            )
            await asyncio.sleep(_METRICS_S)

    def _describe(self) -> reports_pb2.NodeReport:
        """What Redis hears of the node beside what it holds."""
        settings, state, addresses = self._settings, self._state, self.server.addresses
        report = reports_pb2.NodeReport(
            base_digest=self.base_digest,
            serving=self._is_serving,
            address=settings.advertise or ("" if addresses is None else addresses.callers),
            max_running=settings.max_sequences,
            slots=settings.max_slots,
            host_bytes_total=self.cache.max_bytes,
            host_bytes_used=self.cache.num_bytes,
        )
        if state is not None:
            report.running, report.waiting = state.running, state.waiting
            report.device_bytes_total, report.device_bytes_used = state.arena_bytes_total, state.arena_bytes_used
        return report

    def _on_changes(self, changes: tuple[Change, ...]) -> None:
        self.resolver.invalidate([Subject(change.tenant, change.adapter) for change in changes])
        for change in changes:
            if change.kind == PROBE_ASKED:
                self.prober.ask(change.tenant, change.version)
            elif change.kind == TRUST_CHANGED:
                self.prefetcher.recheck_all(where=partial(self.trusted.may_be_of, change.tenant))
            elif change.version:
                self.prefetcher.recheck(change.version)
                if change.kind == ALIAS_MOVED and self.resolver.was_asked_lately(change.tenant, change.adapter):
                    self.prefetcher.expect(change.version, change.tenant)

    def _on_reset(self) -> None:
        self.resolver.invalidate()
        self.prefetcher.recheck_all()

    def _on_hint(self, hint: Hint) -> None:
        self.feed.poke()
        if hint.version and (not hint.nodes or self._id in hint.nodes):
            self.prefetcher.hint(hint.version, hint.tenant)

    @property
    def _is_serving(self) -> bool:
        return not self._hindrance

    @property
    def _hindrance(self) -> str:
        """Why the node does not serve; empty while it does."""
        if self.generator.draining or self.server.is_draining:
            return "the node is draining"
        if not self.client.is_enrolled:
            return "the control plane refuses the node's key"
        if not self.supervisor.is_running:
            return "there is no engine"
        is_fresh = self.feed.age_s <= self._settings.t_stale_s + self._settings.poll_interval_s
        return "" if is_fresh else "the catalogue is older than answers may be"

    async def _watch_health(self) -> None:
        """Reports NOT_SERVING while something hinders the node, and logs what."""
        was_serving = True
        while True:
            hindrance = self._hindrance
            serving = not hindrance
            if serving != was_serving:
                was_serving = serving
                await self.server.set_serving(serving)
                _log.warning("health changed", extra={"serving": serving, "cause": hindrance})
            await asyncio.sleep(_HEALTH_S)

    async def _refuse(self) -> None:
        self.generator.draining = True


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("a background task ended", extra={"task": task.get_name(), "cause": type(error).__name__})
