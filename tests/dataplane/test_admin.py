"""Operators see what a node holds as it changes, and unload versions with proof. A whole node over a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio
from google.protobuf.duration_pb2 import Duration

from dataplane import admin
from dataplane.hints import Hint
from dataplane.node import Node
from dataplane.residency_reports import head_key, holdings_key
from tests.dataplane.rig import BOT, OPERATOR, TENANT, ControlPlane, Rig, bearer, digest_of, run_node, save_model, settings_for
from veneer.artifact import describe_base
from veneer.controlplane.v1 import nodes_pb2, reports_pb2
from veneer.dataplane.v1 import admin_pb2
from veneer.local.valkey import Valkey


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture
async def plane(model_dir: Path, tmp_path: Path) -> AsyncIterator[tuple[ControlPlane, str]]:
    made = ControlPlane(describe_base(model_dir), tmp_path / "adapter")
    server = grpc.aio.server()
    made.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield made, f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def rig(model_dir: Path, tmp_path: Path, plane: tuple[ControlPlane, str]) -> AsyncIterator[Rig]:
    node = Node(settings_for(model_dir, tmp_path, plane[1]), in_process=True)
    async with run_node(node, plane[0]) as made:
        yield made


class Watch:
    """A reader of the stream, and what it knows."""

    def __init__(self, rig: Rig, after: admin_pb2.ResidencyPosition | None = None) -> None:
        request = admin_pb2.WatchResidencyRequest(after=after)
        self.call: Any = rig.admin.WatchResidency(request, metadata=bearer(OPERATOR))
        self.known: dict[str, admin_pb2.ResidentVersion] = {}
        self.position = admin_pb2.ResidencyPosition()
        self.num_snapshots = self.num_messages = 0

    async def read(self) -> None:
        message = await self.call.read()
        assert message is not grpc.aio.EOF
        self.num_messages += 1
        if message.snapshot:
            self.num_snapshots += 1
            self.known.clear()
        self.known.update({version.version: version for version in message.versions})
        for version in message.gone:
            self.known.pop(version, None)
        self.position = message.position

    async def until(self, tier: int | None, version: str) -> None:
        """Reads until the version is in a tier, or gone."""
        async with asyncio.timeout(60):
            while (self.known[version].tier if version in self.known else None) != tier:
                await self.read()


async def unload(rig: Rig, version: str, *, wait_s: int = 60) -> admin_pb2.UnloadVersionResponse:
    request = admin_pb2.UnloadVersionRequest(version=version, wait=Duration(seconds=wait_s))
    response: admin_pb2.UnloadVersionResponse = await rig.admin.UnloadVersion(request, metadata=bearer(OPERATOR))
    return response


async def test_a_reader_hears_of_loads_and_ends_without_asking(rig: Rig) -> None:
    version = rig.plane.source.version
    watch = Watch(rig)
    await watch.read()
    assert (watch.known, watch.num_snapshots) == ({}, 1)
    await rig.read(**BOT)
    await watch.until(admin_pb2.TIER_DEVICE, version)
    seen = watch.known[version]
    assert (seen.max_rank, seen.epoch) == (4, 1)
    assert (seen.owner, seen.adapter, seen.number) == ("acme", "bot", 1)
    assert seen.size_bytes > 0
    await unload(rig, version)
    await watch.until(None, version)
    assert watch.num_snapshots == 1


async def test_a_reader_that_comes_back_hears_what_it_missed_and_no_more(rig: Rig) -> None:
    version = rig.plane.source.version
    first = Watch(rig)
    await first.read()
    first.call.cancel()
    await rig.read(**BOT)
    again = Watch(rig, first.position)
    await again.until(admin_pb2.TIER_DEVICE, version)
    assert again.num_snapshots == 0
    strange = Watch(rig, admin_pb2.ResidencyPosition(epoch=1, sequence=1))
    await strange.read()
    assert (strange.num_snapshots, set(strange.known)) == (1, {version})


async def test_a_reader_slower_than_the_changes_that_are_kept_is_told_to_start_again(rig: Rig) -> None:
    watch = Watch(rig)
    await watch.read()
    watch.call.cancel()
    feed = rig.node.residency
    for number in range(feed._changes.maxlen or 0):
        feed._changes.append(f"v{number}")
        feed._sequence += 1
    feed._sequence += 1
    again = Watch(rig, watch.position)
    await again.read()
    assert again.num_snapshots == 1


async def test_a_large_snapshot_comes_in_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_VERSIONS_IN_MESSAGE", 3)
    feed = rig.node.residency
    monkeypatch.setattr(feed, "show", lambda _: None)  # what the node looks at once a second would take them away
    feed._held = {f"v{number}": admin.Held(f"v{number}", "disk", size_bytes=1) for number in range(8)}
    call = rig.admin.WatchResidency(admin_pb2.WatchResidencyRequest(), metadata=bearer(OPERATOR))
    parts = [await call.read() for _ in range(3)]
    assert [(len(part.versions), part.snapshot, part.more) for part in parts] == [
        (3, True, True),
        (3, False, True),
        (2, False, False),
    ]
    call.cancel()


async def test_a_silent_node_says_that_it_lives_and_a_watch_ends_in_order(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_SILENCE_S", 0.01)
    watch = Watch(rig)
    for _ in range(3):
        await watch.read()
    assert watch.num_snapshots == 1
    watch.call.cancel()
    monkeypatch.setattr(admin, "_WATCH_S", 0.05)
    ends = Watch(rig)
    async with asyncio.timeout(60):
        while await ends.call.read() is not grpc.aio.EOF:
            pass
    assert await ends.call.code() is grpc.StatusCode.OK


async def test_readers_are_bounded_and_operators_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_MAX_WATCHERS", 1)
    first = Watch(rig)
    await first.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Watch(rig).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.call.cancel()
    for method, request in (
        (rig.admin.WatchResidency, admin_pb2.WatchResidencyRequest()),
        (rig.admin.UnloadVersion, admin_pb2.UnloadVersionRequest(version="a" * 64)),
    ):
        call = method(request, metadata=bearer(TENANT))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if hasattr(call, "read") else call)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_an_unload_says_what_came_free_in_every_tier_and_nothing_is_left(rig: Rig) -> None:
    version = rig.plane.source.version
    await rig.read(**BOT, max_tokens=40)
    before = (await rig.residency()).engine
    file_bytes = rig.node.cache.size_of(version)
    response = await unload(rig, version)
    assert response.complete
    assert response.freed.device_bytes == before.arena_bytes_used > 0
    assert response.freed.host_bytes == before.host_bytes_used > 0
    assert response.freed.disk_bytes == file_bytes == before.disk_bytes_used
    assert response.freed.kv_bytes == before.kv_pages_kept * before.kv_page_bytes > 0
    assert response.took.ToNanoseconds() > 0
    residency = await rig.residency()
    engine = residency.engine
    assert list(residency.versions) == []
    assert (engine.arena_bytes_used, engine.host_bytes_used, engine.disk_bytes_used, engine.kv_pages_kept) == (0, 0, 0, 0)
    assert not rig.node.cache.path(version).exists()
    assert (await unload(rig, version)).freed == response.freed, "what came free then"
    assert (await rig.read(**BOT))[0].version == version, "it may be served, so it is loaded again"


async def test_a_hint_is_left_by_nodes_that_it_does_not_name(rig: Rig) -> None:
    version = rig.plane.source.version
    rig.node._on_hint(Hint(version, "acme", ("elsewhere",)))
    assert rig.node.prefetcher.num_loads == 0
    for nodes in (("elsewhere", "id"), ()):  # the latter by a control plane of before
        rig.node._on_hint(Hint(version, "acme", nodes))
        assert rig.node.prefetcher.num_loads == 1
        assert await rig.node.prefetcher.break_off(version)


async def test_a_pinned_version_is_brought_to_the_device_and_the_pin_ends_with_an_unload(rig: Rig) -> None:
    version = rig.plane.source.version
    watch = Watch(rig)
    request = admin_pb2.PinVersionRequest(version=version, lifetime=Duration(seconds=600))
    made = (await rig.admin.PinVersion(request, metadata=bearer(OPERATOR))).pin
    assert rig.plane.operators[0] == digest_of(OPERATOR), "the control plane verifies that an operator has told the node"
    await watch.until(admin_pb2.TIER_DEVICE, version)
    assert made.size_bytes == rig.node.cache.size_of(version)
    listed = await rig.admin.ListPins(admin_pb2.ListPinsRequest(), metadata=bearer(OPERATOR))
    assert list(listed.pins) == [made]
    assert listed.pinned_bytes == made.size_bytes <= listed.max_pinned_bytes_per_tenant
    assert (await unload(rig, version)).complete
    listed = await rig.admin.ListPins(admin_pb2.ListPinsRequest(), metadata=bearer(OPERATOR))
    assert not listed.pins
    for lifetime in (Duration(), Duration(seconds=2_592_001)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.admin.PinVersion(admin_pb2.PinVersionRequest(version=version, lifetime=lifetime), metadata=bearer(OPERATOR))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unload_waits_for_streams_up_to_its_time_and_they_end_well(rig: Rig) -> None:
    version = rig.plane.source.version
    alone = (await rig.read(**BOT, max_tokens=150))[1]
    call = rig.call(**BOT, max_tokens=150)
    ids = list((await call.read()).chunk.ids)
    response = await unload(rig, version, wait_s=0)
    assert (response.complete, response.leases) == (False, 1)
    waits = asyncio.create_task(unload(rig, version))
    while (message := await call.read()) is not grpc.aio.EOF:
        ids += message.chunk.ids
    assert ids == alone
    done = await waits
    assert done.complete
    assert done.freed.device_bytes > 0
    assert (await rig.residency()).engine.arena_bytes_used == 0


@pytest.mark.parametrize("caller", ["stays", "leaves"])
async def test_an_unload_while_several_choices_of_a_request_run_ends_with_the_last_and_loses_nothing(
    rig: Rig, caller: str
) -> None:
    version = rig.plane.source.version
    alone = (await rig.read(**BOT, max_tokens=200))[1]
    before = (await rig.residency()).engine
    call = rig.call(**BOT, max_tokens=200, n=3)
    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while not all(ids.values()):
        chunk = (await call.read()).chunk
        ids[chunk.choice] += chunk.ids
    begun = await unload(rig, version, wait_s=0)
    assert (begun.complete, begun.leases) == (False, 3), "each choice is counted, and once"
    waits = asyncio.create_task(unload(rig, version))
    if caller == "leaves":
        call.cancel()
    else:
        while (message := await call.read()) is not grpc.aio.EOF:
            ids[message.chunk.choice] += message.chunk.ids
        assert ids == {0: alone, 1: alone, 2: alone}
    done = await waits
    assert done.complete
    assert done.freed.device_bytes == before.arena_bytes_used > 0
    assert done.freed.host_bytes == before.host_bytes_used > 0
    assert done.freed.disk_bytes == before.disk_bytes_used > 0
    residency = await rig.residency()
    assert (residency.engine.leases, residency.engine.arena_bytes_used, list(residency.versions)) == (0, 0, [])
    assert (await rig.read(**BOT))[0].version == version, "and it may come again"


async def test_a_retired_version_goes_by_itself_and_its_bytes_can_be_asked_for_later(rig: Rig) -> None:
    version = rig.plane.source.version
    await rig.read(**BOT, max_tokens=40)
    watch = Watch(rig)
    await watch.until(admin_pb2.TIER_DEVICE, version)
    rig.plane.state = "RETIRED"
    rig.plane.changes.append(nodes_pb2.Change(kind=nodes_pb2.CHANGE_KIND_VERSION, tenant="acme", adapter="bot", version=version))
    await watch.until(None, version)
    rig.node.prefetcher.hint(version)
    rig.node.prefetcher.want(version)
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.read(**BOT)
    response = await unload(rig, version)
    assert response.complete
    freed = response.freed
    assert min(freed.device_bytes, freed.host_bytes, freed.disk_bytes, freed.kv_bytes) > 0
    assert list((await rig.residency()).versions) == []
    assert rig.node.cache.versions() == ()


async def test_what_a_node_holds_is_in_redis_while_it_lives(
    model_dir: Path, tmp_path: Path, plane: tuple[ControlPlane, str], valkey: Valkey
) -> None:
    client = redis.asyncio.from_url(valkey.url())
    await client.flushall()
    settings = settings_for(model_dir, tmp_path, plane[1], redis_url=valkey.url(), advertise="node-1.example:7700")
    async with run_node(Node(settings, in_process=True), plane[0]) as rig:
        version = rig.plane.source.version
        await rig.read(**BOT)
        epoch = rig.node.residency.position.epoch
        tier = None
        async with asyncio.timeout(60):
            while tier != reports_pb2.HOLDING_TIER_DEVICE:
                await asyncio.sleep(0.02)
                raw = await client.hget(holdings_key("id", epoch), version)
                tier = None if raw is None else reports_pb2.NodeHolding.FromString(raw).tier
        report = reports_pb2.NodeReport.FromString(await client.hget(head_key("id"), "report"))
        assert (report.address, report.slots, report.serving) == ("node-1.example:7700", settings.max_slots, True)
        assert report.base_digest == rig.plane.source.grant.base_digest
        assert report.device_bytes_total > 0
    assert await client.keys("*") == []
    await client.aclose()
