"""A client of several data planes: where its requests go, and what it does when one is away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.veneer.raw_server import ENDINGS, RawServer, answer, reset
from tests.veneer.scripted import KEY, LAST, SERVED, OneTenant, collect
from veneer import locations, replicas
from veneer.access import Rule, method_names
from veneer.client import Client
from veneer.controlplane.v1 import placement_pb2, placement_pb2_grpc
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.dataplane.v1 import generation_pb2_grpc
from veneer.errors import NotFoundError, ResourceExhaustedError, UnavailableError
from veneer.server import PlaneServer, ServerOptions, Service


@dataclass
class DataPlane(generation_pb2_grpc.GenerationServiceServicer):
    """Answers, or fails as told: at once, or after a first message."""

    address: str = ""
    error: Exception | None = None
    late_error: Exception | None = None
    keys: list[str | None] = field(default_factory=list)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # type: ignore[override]
        self.keys.append(dict(context.invocation_metadata()).get("x-veneer-adapter-key"))
        if self.error is not None:
            raise self.error
        yield SERVED
        if self.late_error is not None:
            raise self.late_error
        yield LAST


@dataclass
class Placement(placement_pb2_grpc.PlacementServiceServicer):
    """Says where adapters are."""

    addresses: list[str] = field(default_factory=list)
    error: Exception | None = None

    async def LocateAdapter(self, request: Any, context: Any) -> placement_pb2.LocateAdapterResponse:  # type: ignore[override]
        if self.error is not None:
            raise self.error
        return placement_pb2.LocateAdapterResponse(key=f"acme/{request.adapter}", addresses=self.addresses)


async def serve(name: str, pb2: Any, add: Any) -> PlaneServer:
    service = Service(pb2.DESCRIPTOR.services_by_name[name], add)
    return PlaneServer(
        ServerOptions(callers="127.0.0.1:0", operators="127.0.0.1:0"),
        services=[service],
        rules={method: Rule.of("tenant") for method in method_names([service.descriptor])},
        authenticators={"callers": OneTenant(), "operators": OneTenant()},
    )


@dataclass
class World:
    planes: list[DataPlane]
    servers: list[PlaneServer]
    placement: Placement
    client: Client


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Three data planes and a client, whose times are longer than what a busy machine takes for two requests."""
    monkeypatch.setattr(replicas, "_FIRST_REST_S", 600.0)
    monkeypatch.setattr(replicas, "_LONGEST_REST_S", 600.0)
    monkeypatch.setattr(locations, "_PATIENCE_S", 60.0)
    planes, servers = [DataPlane() for _ in range(3)], []
    for plane in planes:
        server = await serve("GenerationService", pb, partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, plane))
        plane.address = (await server.start()).callers
        servers.append(server)
    placement = Placement()
    control = await serve(
        "PlacementService", placement_pb2, partial(placement_pb2_grpc.add_PlacementServiceServicer_to_server, placement)
    )
    address = (await control.start()).callers
    async with Client(control=address, data=",".join(plane.address for plane in planes), key=KEY, timeout_s=60) as client:
        yield World(planes, servers, placement, client)
    for server in (*servers, control):
        await server.stop(grace_s=0)


def counts(world: World) -> list[int]:
    return [len(plane.keys) for plane in world.planes]


async def test_requests_go_where_the_adapter_is_and_carry_its_key(world: World) -> None:
    world.placement.addresses = [world.planes[1].address, "127.0.0.1:1"]
    for _ in range(5):
        assert len(await collect(world.client.stream_complete("hi", adapter="tone"))) == 4
    assert counts(world) == [0, 5, 0]
    assert set(world.planes[1].keys) == {"acme/tone"}


async def test_requests_of_the_base_spread_and_carry_no_key(world: World) -> None:
    streams = [world.client.stream_complete("hi") for _ in range(6)]
    for stream in streams:
        await anext(stream)
    assert counts(world) == [2, 2, 2]
    assert world.planes[0].keys == [None, None]
    for stream in streams:
        await stream.aclose()


@pytest.mark.parametrize("error", [None, NotFoundError("no"), UnavailableError("away")])
async def test_without_a_hint_an_adapter_keeps_to_one_data_plane(world: World, error: Exception | None) -> None:
    world.placement.error = error
    for _ in range(4):
        await collect(world.client.stream_complete("hi", adapter="tone", owner="acme"))
    assert sorted(counts(world)) == [0, 0, 4]
    assert {key for plane in world.planes for key in plane.keys} == {"acme/tone"}


async def test_a_data_plane_that_is_away_or_drains_is_left_out_until_it_has_rested(world: World) -> None:
    world.placement.addresses = [world.planes[0].address]
    world.planes[0].error = UnavailableError("the node is draining")
    assert len(await collect(world.client.stream_complete("hi", adapter="tone"))) == 4
    assert counts(world)[0] == 1
    await collect(world.client.stream_complete("hi", adapter="tone"))
    assert counts(world)[0] == 1, "it rests"
    assert sum(counts(world)) == 3
    await world.servers[1].stop(grace_s=0)
    await world.servers[2].stop(grace_s=0)
    world.planes[0].error = None
    assert len(await collect(world.client.stream_complete("hi", adapter="tone"))) == 4, "those that rest are better than none"


async def test_an_adapter_that_cannot_be_had_somewhere_leaves_the_others_there(world: World) -> None:
    world.placement.addresses = [world.planes[0].address]
    world.planes[0].error = UnavailableError("the version is not loaded yet", retry_after_s=1.0)
    await collect(world.client.stream_complete("hi", adapter="tone"))
    world.planes[0].error = None
    await collect(world.client.stream_complete("hi", adapter="tone"))
    assert counts(world)[0] == 1, "it rests for this adapter"
    await collect(world.client.stream_complete("hi", adapter="other"))
    assert counts(world)[0] == 2


async def test_after_the_first_message_nothing_is_tried_again(world: World) -> None:
    for plane in world.planes:
        plane.late_error = UnavailableError("gone")
    with pytest.raises(UnavailableError, match="gone"):
        await collect(world.client.stream_complete("hi", adapter="tone"))
    assert sum(counts(world)) == 1


@pytest.mark.parametrize("name", ENDINGS)
async def test_what_a_connection_ended_before_the_first_message_goes_elsewhere(world: World, name: str) -> None:
    async with (
        RawServer([ENDINGS[name]]) as ending,
        Client(data=f"{ending.address},{world.planes[0].address}", key=KEY, timeout_s=20.0) as client,
    ):
        assert len(await collect(client.stream_complete("hi"))) == 4
    assert (ending.num_calls, counts(world)) == (1, [1, 0, 0])


async def test_what_a_connection_ended_after_the_first_message_is_unavailable(world: World) -> None:
    async with (
        RawServer([answer(SERVED.SerializeToString())]) as ending,
        Client(data=f"{ending.address},{world.planes[0].address}", key=KEY, timeout_s=20.0) as client,
    ):
        stream = client.stream_complete("hi")
        assert [type(await anext(stream)) for _ in range(2)] == [pb.Served, pb.Chunk]
        ending.send(reset(8)(1))
        with pytest.raises(UnavailableError):
            await anext(stream)
    assert (ending.num_calls, counts(world)) == (1, [0, 0, 0])


async def test_other_errors_are_not_taken_elsewhere(world: World) -> None:
    for plane in world.planes:
        plane.error = ResourceExhaustedError("full", retry_after_s=2.0)
    with pytest.raises(ResourceExhaustedError):
        await collect(world.client.stream_complete("hi", adapter="tone"))
    assert sum(counts(world)) == 1


async def test_when_all_are_away_the_last_error_says_so(world: World) -> None:
    for plane in world.planes:
        plane.error = UnavailableError("starting")
    with pytest.raises(UnavailableError, match="starting"):
        await collect(world.client.stream_complete("hi", adapter="tone"))
    assert counts(world) == [1, 1, 1]


async def test_closing_a_stream_gives_its_place_back(world: World) -> None:
    stream = world.client.stream_complete("hi")
    await anext(stream)
    assert world.client._replicas._in_flight.total() == 1
    await stream.aclose()
    assert world.client._replicas._in_flight.total() == 0
