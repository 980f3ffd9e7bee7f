"""Planes that answer as they are told, for tests of clients."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from veneer.access import Identity, Rule, method_names
from veneer.client import Event
from veneer.controlplane.v1 import catalog_pb2, catalog_pb2_grpc, tenants_pb2, tenants_pb2_grpc
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.dataplane.v1 import generation_pb2_grpc
from veneer.errors import (
    InvalidArgumentError,
    UnavailableError,
    Violation,
)
from veneer.server import PlaneServer, ServerOptions, Service

KEY = "vnr_" + "k" * 43
SERVED = pb.GenerateResponse(served=pb.Served(base_digest="b"), chunk=pb.Chunk(index=0, ids=[7], text="a"))
LAST = pb.GenerateResponse(chunk=pb.Chunk(index=1, ids=[8], text="b"), finish=pb.Finish(completion_tokens=2))


class Generation(generation_pb2_grpc.GenerationServiceServicer):
    """Plays a script: messages are sent, exceptions raised, events waited for."""

    def __init__(self) -> None:
        self.scripts: list[list[Any]] = []
        self.requests: list[pb.GenerateRequest] = []
        self.ended = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # type: ignore[override]
        self.requests.append(request)
        try:
            for step in self.scripts.pop(0):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.ended.set()


class Catalog(catalog_pb2_grpc.CatalogServiceServicer):
    """Keeps what was published; each other method answers as told."""

    def __init__(self) -> None:
        self.received: dict[int, bytes] = {}
        self.headers: list[catalog_pb2.PublishHeader] = []
        self.refuse_after: int | None = None
        self.away: list[UnavailableError] = []
        self.calls: list[str] = []
        self.request_ids: list[str] = []
        self.error: Exception | None = None

    async def Publish(self, request_iterator: Any, context: Any) -> catalog_pb2.PublishResponse:  # type: ignore[override]
        parts = 0
        async for request in request_iterator:
            if request.HasField("header"):
                self.headers.append(request.header)
                continue
            parts += 1
            if self.away:
                raise self.away.pop()
            assert len(request.part.data) <= 1 << 20
            self.received[request.part.file] = self.received.get(request.part.file, b"") + request.part.data
            if parts == self.refuse_after:
                raise InvalidArgumentError.of([Violation("adapter_config.json: r", "is 0"), Violation("lora_A", "has no lora_B")])
        return catalog_pb2.PublishResponse(version=catalog_pb2.Version(number=3))

    async def ListAdapters(self, request: catalog_pb2.ListAdaptersRequest, context: Any) -> catalog_pb2.ListAdaptersResponse:  # type: ignore[override]
        page = int(request.page_token or 0)
        names = [catalog_pb2.Adapter(name=f"adapter-{page}-{index}") for index in range(2)]
        return catalog_pb2.ListAdaptersResponse(adapters=names, next_page_token=str(page + 1) if page < 2 else "")

    async def Rollback(self, request: catalog_pb2.RollbackRequest, context: Any) -> catalog_pb2.RollbackResponse:  # type: ignore[override]
        self.calls.append("Rollback")
        self.request_ids.append(request.request_id)
        raise self.error or AssertionError

    async def GetAdapter(self, request: catalog_pb2.GetAdapterRequest, context: Any) -> catalog_pb2.GetAdapterResponse:  # type: ignore[override]
        self.calls.append("GetAdapter")
        raise self.error or AssertionError

    async def SetAlias(self, request: catalog_pb2.SetAliasRequest, context: Any) -> catalog_pb2.SetAliasResponse:  # type: ignore[override]
        arms = [catalog_pb2.Arm(version=arm.version, weight=arm.weight) for arm in request.arms]
        generation = request.expected_generation + 1 if request.HasField("expected_generation") else 99
        return catalog_pb2.SetAliasResponse(alias=catalog_pb2.Alias(name=request.alias, generation=generation, arms=arms))

    async def ListVersions(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        await asyncio.Event().wait()

    async def RetireVersion(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class Tenants(tenants_pb2_grpc.TenantServiceServicer):
    """Creates keys."""

    async def CreateKey(self, request: tenants_pb2.CreateKeyRequest, context: Any) -> tenants_pb2.CreateKeyResponse:  # type: ignore[override]
        return tenants_pb2.CreateKeyResponse(key=tenants_pb2.Key(roles=request.roles, label=request.label), secret="s")


for _name in (
    "CreateTenant",
    "ListTenants",
    "SetTenantLimits",
    "ListKeys",
    "RevokeKey",
    "CreateGrant",
    "ListGrants",
    "RevokeGrant",
):
    setattr(Tenants, _name, None)
Tenants.__abstractmethods__ = frozenset()


class OneTenant:
    async def authenticate(self, key_digest: bytes) -> Identity | None:
        return Identity(kind="tenant", key_digest=key_digest, tenant="acme", roles=frozenset({"caller"}))


async def collect(stream: AsyncIterator[Event], *, into: list[Event] | None = None) -> list[Event]:
    events = [] if into is None else into
    async for event in stream:
        events.append(event)  # kept when the stream ends with an error
    return events


def scripted_plane(generation: Generation, catalog: Catalog) -> PlaneServer:
    """A plane of both kinds that serves these and one tenant; it is not started."""
    services = [
        Service(
            pb.DESCRIPTOR.services_by_name["GenerationService"],
            partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, generation),
        ),
        Service(
            catalog_pb2.DESCRIPTOR.services_by_name["CatalogService"],
            partial(catalog_pb2_grpc.add_CatalogServiceServicer_to_server, catalog),
        ),
        Service(
            tenants_pb2.DESCRIPTOR.services_by_name["TenantService"],
            partial(tenants_pb2_grpc.add_TenantServiceServicer_to_server, Tenants()),
        ),
    ]
    return PlaneServer(
        ServerOptions(callers="127.0.0.1:0", operators="127.0.0.1:0"),
        services=services,
        rules={name: Rule.of("tenant") for name in method_names([service.descriptor for service in services])},
        authenticators={"callers": OneTenant(), "operators": OneTenant()},
    )
