"""The service of generation over a generator that yields what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc

from dataplane.access import RULES
from dataplane.asked import GenerationRequest, Part
from dataplane.binding import Served
from dataplane.servicer import GenerationServicer
from dataplane.token_stream import End, Piece
from tests.dataplane.doubles import BASE, VERSION
from veneer.access import Authenticator, Identity
from veneer.dataplane.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from veneer.errors import VeneerError
from veneer.server import PlaneServer, ServerOptions, Service

SERVED = Served("mine", BASE, VERSION, "acme", "bot", 7, "stable", 3, 1, True)


class Script:
    """A generator that yields what the test says, when the test says."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.parts: list[Part | VeneerError] = [
            Part(SERVED, Piece(0, (70,), "he", None)),
            Part(None, Piece(1, (71, 72), "llo", End("stop", 3, 3))),
        ]
        self.gates: dict[int, asyncio.Event] = {}
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    async def run(self, request: GenerationRequest) -> AsyncIterator[Part]:
        self.requests.append(request)
        self.started.set()
        try:
            for place, part in enumerate(self.parts):
                if place in self.gates:
                    await self.gates[place].wait()
                if isinstance(part, VeneerError):
                    raise part
                yield part
        finally:
            self.ended.set()


class Nobody(Authenticator):
    """Knows no credential."""

    async def authenticate(self, key_digest: bytes) -> Identity | None:
        return None


@asynccontextmanager
async def serve(script: Script) -> AsyncIterator[Any]:
    """A stub of the service over the wire."""
    server = PlaneServer(
        ServerOptions(callers="127.0.0.1:0", operators="127.0.0.1:0"),
        services=[
            Service(
                generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
                partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, GenerationServicer(script)),
                ("callers",),
            ),
            Service(
                admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
                partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, admin_pb2_grpc.AdminServiceServicer()),
                ("operators",),
            ),
        ],
        rules=RULES,
        authenticators={"callers": Nobody(), "operators": Nobody()},
    )
    addresses = await server.start()
    async with grpc.aio.insecure_channel(addresses.callers) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)
    await server.stop(grace_s=0)
