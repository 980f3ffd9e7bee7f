"""The operators' calls: what is resident where, as a list and as a stream; unload a version; drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import grpc

from dataplane.circuits import Circuit, CircuitState
from dataplane.engine.messages import State
from dataplane.generation import Generator
from dataplane.lora.host_cache import HostCache
from dataplane.metrics import Metrics
from dataplane.pins import Pin, Pins
from dataplane.residency_feed import Held, Position, ResidencyFeed, Update
from dataplane.unloads import Unloads
from dataplane.version_names import VersionName, VersionNames
from veneer.access import current_identity
from veneer.dataplane.v1 import admin_pb2, admin_pb2_grpc
from veneer.errors import ResourceExhaustedError

_TIERS = {
    "disk": admin_pb2.TIER_DISK,
    "host": admin_pb2.TIER_HOST,
    "loading": admin_pb2.TIER_LOADING,
    "device": admin_pb2.TIER_DEVICE,
}
_DEFAULT_GRACE_S = _DEFAULT_WAIT_S = 60.0
_MAX_WATCHERS = 64
_WATCH_S = 300.0
"""A watch ends after this, and its reader comes back with its position: so its credential is asked for again."""
_SILENCE_S = 5.0
_VERSIONS_IN_MESSAGE = 4000
_MAX_TENANTS = 1000


_CIRCUITS = {
    CircuitState.FAILING: admin_pb2.CIRCUIT_STATE_FAILING,
    CircuitState.OPEN: admin_pb2.CIRCUIT_STATE_OPEN,
    CircuitState.HALF_OPEN: admin_pb2.CIRCUIT_STATE_HALF_OPEN,
}


class EngineView(Protocol):
    """What operators see of the engine."""

    async def state(self) -> State:
        """Returns its counters.

        Raises:
            UnavailableError: There is no engine now.
        """


class Unloader(Protocol):
    """Who lets versions go, and knows which cannot be loaded; the prefetcher."""

    async def break_off(self, version: str, /) -> bool:
        """Ends the load of a version unless somebody waits for it; returns, when that is over, whether nothing brings it."""

    def unload(self, version: str, /) -> None:
        """Lets all of a version go that the node holds."""

    def circuits(self) -> list[Circuit]:
        """Returns the versions whose last load failed."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Serves `veneer.dataplane.v1.AdminService`.

    Args:
        engine: The engine.
        feed: What the node holds.
        unloader: Lets versions go.
        unloads: What came free of them.
        cache: Image files.
        generator: Running streams.
        metrics: Mean load times.
        pins: What is kept on the device.
        names: What versions are called.
        base_digest: Digest of the base that is served.
        stop_serving: Reports NOT_SERVING.
    """

    def __init__(
        self,
        *,
        engine: EngineView,
        feed: ResidencyFeed,
        unloader: Unloader,
        unloads: Unloads,
        cache: HostCache,
        generator: Generator,
        metrics: Metrics,
        pins: Pins,
        names: VersionNames,
        base_digest: str,
        stop_serving: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._feed = feed
        self._unloader = unloader
        self._unloads = unloads
        self._cache = cache
        self._num_watchers = 0
        self._generator = generator
        self._metrics = metrics
        self._pins = pins
        self._names = names
        self._base_digest = base_digest
        self._stop_serving = stop_serving

    async def GetResidency(  # noqa: N802
        self,
        request: admin_pb2.GetResidencyRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> admin_pb2.GetResidencyResponse:
        """Tells what the engine and the cache of image files hold; for versions in several tiers, the highest."""
        state = await self._engine.state()  # the feed hears of it first
        held = sorted(self._feed.read(None).held, key=lambda one: one.version)
        return admin_pb2.GetResidencyResponse(
            base_digest=self._base_digest,
            versions=[_version(one, self._names.of(one.version)) for one in held],
            engine=_engine_state(state, disk_bytes=self._cache.num_bytes, unloading=self._unloads.num_pending),
            device_hits=state.device_hits,
            host_hits=state.host_hits,
            disk_hits=state.disk_hits,
            store_loads=state.store_loads,
            mean_store_load_s=self._metrics.mean_load_s("store", "host"),
            mean_disk_load_s=self._metrics.mean_load_s("disk", "host"),
            mean_device_load_s=self._metrics.mean_load_s("host", "device"),
            failing=[_failing(one, self._names.of(one.version)) for one in self._unloader.circuits()],
            tenants=[
                admin_pb2.TenantStreams(tenant=tenant, streams=count)
                for tenant, count in self._generator.busiest_tenants(_MAX_TENANTS)
            ],
        )

    async def WatchResidency(  # noqa: N802
        self,
        request: admin_pb2.WatchResidencyRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> AsyncIterator[admin_pb2.WatchResidencyResponse]:
        """Streams what the node holds from where the reader stands.

        Raises:
            ResourceExhaustedError: Too many read already.
        """
        after = request.after
        position = Position(after.epoch, after.sequence) if request.HasField("after") else None
        clock = asyncio.get_running_loop().time
        end_s = clock() + _WATCH_S
        with self._watcher():
            while clock() < end_s:
                update = self._feed.read(position)
                for message in _messages(update, self._names):
                    yield message
                position = update.position
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SILENCE_S):
                        await self._feed.wait(position)

    async def UnloadVersion(  # noqa: N802
        self,
        request: admin_pb2.UnloadVersionRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> admin_pb2.UnloadVersionResponse:
        """Lets a version go, waits until nothing is left of it, and tells what came free."""
        version = request.version
        wait_s = request.wait.ToNanoseconds() / 1e9 if request.HasField("wait") else _DEFAULT_WAIT_S
        if not await self._break_off(version, wait_s):
            return admin_pb2.UnloadVersionResponse(came_back=True)
        await self._engine.state()
        self._feed.touch((version,))  # a load that was broken off may have left its file
        if self._feed.holds(version):
            self._unloader.unload(version)
        complete = await self._unloads.wait(version, timeout_s=wait_s)
        response = admin_pb2.UnloadVersionResponse(complete=complete)
        if not complete:
            state = await self._engine.state()
            response.leases = sum(one.leases for one in state.holdings if one.version == version)
        elif (unload := self._unloads.last(version)) is not None:
            response.freed.MergeFrom(
                admin_pb2.FreedBytes(
                    device_bytes=unload.device_bytes,
                    host_bytes=unload.host_bytes,
                    disk_bytes=unload.disk_bytes,
                    kv_bytes=unload.kv_bytes,
                )
            )
            response.took.FromNanoseconds(round(unload.seconds * 1e9))
            response.complete = not unload.came_back
            response.came_back = unload.came_back
        return response

    async def _break_off(self, version: str, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                return await self._unloader.break_off(version)
        except TimeoutError:
            return False

    async def PinVersion(  # noqa: N802
        self,
        request: admin_pb2.PinVersionRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> admin_pb2.PinVersionResponse:
        """Keeps a version on the device for a time."""
        pin = await self._pins.pin(
            request.version,
            lifetime_s=request.lifetime.ToNanoseconds() / 1e9,
            operator_key_digest=current_identity().key_digest,
        )
        return admin_pb2.PinVersionResponse(pin=_pin(pin, self._names.of(pin.version)))

    async def UnpinVersion(  # noqa: N802
        self,
        request: admin_pb2.UnpinVersionRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> admin_pb2.UnpinVersionResponse:
        """Ends a pin."""
        pin = self._pins.unpin(request.version)
        return admin_pb2.UnpinVersionResponse(pin=None if pin is None else _pin(pin, self._names.of(pin.version)))

    async def ListPins(  # noqa: N802
        self,
        request: admin_pb2.ListPinsRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> admin_pb2.ListPinsResponse:
        """Lists the pins."""
        pins, limits = self._pins.all(), self._pins.limits
        return admin_pb2.ListPinsResponse(
            pins=[_pin(one, self._names.of(one.version)) for one in pins],
            pinned_bytes=sum(pin.size_bytes for pin in pins),
            max_pinned_bytes=limits.max_bytes,
            max_pinned_bytes_per_tenant=limits.max_bytes_per_tenant,
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

    @contextmanager
    def _watcher(self) -> Iterator[None]:
        if self._num_watchers >= _MAX_WATCHERS:
            raise ResourceExhaustedError(f"{_MAX_WATCHERS} readers watch already", retry_after_s=5.0)
        self._num_watchers += 1
        self._metrics.watched(self._num_watchers)
        try:
            yield
        finally:
            self._num_watchers -= 1
            self._metrics.watched(self._num_watchers)


def _messages(update: Update, names: VersionNames) -> Iterator[admin_pb2.WatchResidencyResponse]:
    """Cuts an update into messages that every reader takes."""
    position = admin_pb2.ResidencyPosition(epoch=update.position.epoch, sequence=update.position.sequence)
    for start in range(0, max(len(update.held), 1), _VERSIONS_IN_MESSAGE):
        end = start + _VERSIONS_IN_MESSAGE
        is_last = end >= len(update.held)
        yield admin_pb2.WatchResidencyResponse(
            position=position,
            snapshot=update.is_snapshot and start == 0,
            versions=[_version(one, names.of(one.version)) for one in update.held[start:end]],
            gone=update.gone if is_last else (),
            more=not is_last,
        )


def _version(held: Held, name: VersionName) -> admin_pb2.ResidentVersion:
    return admin_pb2.ResidentVersion(
        version=held.version,
        tier=_TIERS[held.tier],
        max_rank=held.rank,
        size_bytes=held.size_bytes,
        leases=held.leases,
        epoch=held.epoch,
        uses=held.uses,
        loss=held.loss,
        loss_at=held.loss_at,
        owner=name.owner,
        adapter=name.adapter,
        number=name.number,
    )


def _failing(circuit: Circuit, name: VersionName) -> admin_pb2.FailingVersion:
    return admin_pb2.FailingVersion(
        version=circuit.version,
        state=_CIRCUITS[circuit.state],
        failures=circuit.failures,
        status=circuit.status,
        retry_after_s=circuit.retry_after_s,
        owner=name.owner,
        adapter=name.adapter,
        number=name.number,
    )


def _engine_state(state: State, *, disk_bytes: int, unloading: int) -> admin_pb2.EngineState:
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
        kv_page_bytes=state.kv_page_bytes,
        host_bytes_used=state.host_bytes,
        disk_bytes_used=disk_bytes,
        unloading=unloading,
        rank_rows=state.rank_rows,
    )


def _pin(pin: Pin, name: VersionName) -> admin_pb2.Pin:
    message = admin_pb2.Pin(
        version=pin.version, owner=pin.owner, size_bytes=pin.size_bytes, adapter=name.adapter, number=name.number
    )
    message.expire_time.FromNanoseconds(round(pin.end_unix_s * 1e9))
    return message
