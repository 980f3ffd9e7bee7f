"""The operators' calls: what is resident where, and drain."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

import grpc

from dataplane.engine.messages import Holding, State
from dataplane.generation import Generator
from dataplane.lora.host_cache import HostCache
from dataplane.metrics import Metrics
from veneer.dataplane.v1 import admin_pb2, admin_pb2_grpc

_TIERS = {"host": admin_pb2.TIER_HOST, "loading": admin_pb2.TIER_LOADING, "device": admin_pb2.TIER_DEVICE}
_DEFAULT_GRACE_S = 60.0


class EngineView(Protocol):
    """What operators see of the engine."""

    async def state(self) -> State:
        """Returns its counters.

        Raises:
            UnavailableError: There is no engine now.
        """


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Serves `veneer.dataplane.v1.AdminService`.

    Args:
        engine: The engine.
        cache: Host images.
        generator: Running streams.
        metrics: Mean load times.
        base_digest: Digest of the base that is served.
        stop_serving: Reports NOT_SERVING.
    """

    def __init__(
        self,
        *,
        engine: EngineView,
        cache: HostCache,
        generator: Generator,
        metrics: Metrics,
        base_digest: str,
        stop_serving: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._generator = generator
        self._metrics = metrics
        self._base_digest = base_digest
        self._stop_serving = stop_serving

    async def GetResidency(  # noqa: N802
        self,
        request: admin_pb2.GetResidencyRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> admin_pb2.GetResidencyResponse:
        """Tells what the engine and the host cache hold; for versions in both, the higher tier."""
        state = await self._engine.state()
        return admin_pb2.GetResidencyResponse(
            base_digest=self._base_digest,
            versions=self._versions(state.holdings),
            engine=_engine_state(state),
            device_hits=state.device_hits,
            host_hits=state.host_hits,
            store_loads=state.store_loads,
            mean_store_load_s=self._metrics.mean_load_s("store", "host"),
            mean_device_load_s=self._metrics.mean_load_s("host", "device"),
        )

    async def Drain(  # noqa: N802
        self,
        request: admin_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> admin_pb2.DrainResponse:
        """Reports NOT_SERVING, refuses new requests and waits for running ones up to the grace."""
        grace_s = request.grace.ToNanoseconds() / 1e9 if request.HasField("grace") else _DEFAULT_GRACE_S
        await self._stop_serving()
        self._generator.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._generator.wait_idle()
        except TimeoutError:
            pass
        return admin_pb2.DrainResponse(remaining=self._generator.num_streams)

    def _versions(self, holdings: Iterable[Holding]) -> list[admin_pb2.ResidentVersion]:
        versions = {
            holding.version: admin_pb2.ResidentVersion(
                version=holding.version,
                tier=_TIERS[holding.place],
                max_rank=holding.rank,
                size_bytes=holding.size_bytes,
                leases=holding.leases,
                epoch=holding.epoch,
            )
            for holding in holdings
        }
        for version in self._cache.versions():
            if version not in versions:
                versions[version] = admin_pb2.ResidentVersion(version=version, tier=admin_pb2.TIER_HOST)
        return [versions[version] for version in sorted(versions)]


def _engine_state(state: State) -> admin_pb2.EngineState:
    return admin_pb2.EngineState(
        running=state.running,
        waiting=state.waiting,
        kv_pages_used=state.kv_pages_used,
        kv_pages_total=state.kv_pages_total,
        arena_bytes_used=state.arena_bytes_used,
        arena_bytes_total=state.arena_bytes_total,
        leases=state.leases,
        steps=state.steps,
        max_adapters_in_step=state.max_adapters_in_step,
        max_rows_in_step=state.max_rows_in_step,
        mixed_steps=state.mixed_steps,
        generated_tokens=state.generated_tokens,
        tasks=len(asyncio.all_tasks()),
        kv_pages_kept=state.kv_pages_kept,
        prefix_queries=state.prefix_queries,
        prefix_hits=state.prefix_hits,
    )
