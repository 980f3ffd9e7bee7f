"""A client of planes that answer as they are told."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from tests.veneer.scripted import KEY, Catalog, Generation, OneTenant, Tenants
from veneer.access import Rule, method_names
from veneer.client import CONFIG_NAME, WEIGHTS_NAME, Client
from veneer.controlplane.v1 import catalog_pb2, catalog_pb2_grpc, tenants_pb2, tenants_pb2_grpc
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.dataplane.v1 import generation_pb2_grpc
from veneer.server import PlaneServer, ServerOptions, Service


@pytest.fixture
async def generation() -> Generation:
    return Generation()


@pytest.fixture
async def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
async def client(generation: Generation, catalog: Catalog) -> AsyncIterator[Client]:
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
    rules = {name: Rule.of("tenant") for name in method_names([service.descriptor for service in services])}
    server = PlaneServer(
        ServerOptions(callers="127.0.0.1:0", operators="127.0.0.1:0"),
        services=services,
        rules=rules,
        authenticators={"callers": OneTenant(), "operators": OneTenant()},
    )
    address = (await server.start()).callers
    async with Client(control=address, data=address, key=KEY, timeout_s=10.0) as client:
        yield client
    await server.stop(grace_s=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_NAME).write_bytes(b'{"r": 8}')
    (tmp_path / WEIGHTS_NAME).write_bytes(bytes(range(256)) * 10_000)
    return tmp_path
