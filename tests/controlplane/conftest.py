"""A control plane on real servers, and what tests publish to it."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import save

from controlplane.schema import make_first_operator
from controlplane.service import ControlPlane
from controlplane.settings import Settings
from controlplane.vault import open_vault
from tests.fixtures.services import TestDatabase
from veneer.artifact import BaseDescription, Limits, Report, TargetModule, check
from veneer.controlplane.v1 import (
    bases_pb2,
    bases_pb2_grpc,
    catalog_pb2,
    catalog_pb2_grpc,
    nodes_pb2,
    nodes_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
)

HIDDEN = 8
BASE_DIGEST = hashlib.sha256(b"tiny").hexdigest()
OWNER, PUBLISHER, CALLER = tenants_pb2.ROLE_OWNER, tenants_pb2.ROLE_PUBLISHER, tenants_pb2.ROLE_CALLER


def tiny_base(digest: str = BASE_DIGEST, name: str = "tiny") -> BaseDescription:
    """A base with one layer and one projection."""
    module = TargetModule("model.layers.{layer}.self_attn.q_proj", "qkv", HIDDEN, HIDDEN)
    return BaseDescription(digest, name, "llama", 1, (module,), vocab_size=32, max_context=64)


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    """An adapter's two files."""

    config: bytes
    weights: bytes


def adapter_files(seed: int, *, rank: int = 2) -> Files:
    """A small adapter in PEFT's format; every seed gives another one."""
    random = np.random.default_rng(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": random.standard_normal((rank, HIDDEN)).astype(np.float32),
        f"{prefix}.lora_B.weight": random.standard_normal((HIDDEN, rank)).astype(np.float32),
    }
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "tiny"}
    return Files(json.dumps(config).encode(), save(tensors))


async def check_here(config: Path, weights: Path, base: BaseDescription, limits: Limits, *, timeout_s: float) -> Report:
    """The check without its jail: starting a child for each of hundreds of publishes would only take time."""
    return await asyncio.to_thread(lambda: check(config.read_bytes(), io.BytesIO(weights.read_bytes()), base, limits).report)


@dataclasses.dataclass(frozen=True, slots=True)
class Client:
    """Stubs of one credential on one listener."""

    bases: Any
    tenants: Any
    catalog: Any
    nodes: Any
    secret: str

    @classmethod
    def on(cls, channel: grpc.aio.Channel, secret: str) -> Client:
        """Stubs that send a credential; none when it is empty."""
        metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
        return cls(
            _Stub(bases_pb2_grpc.BaseServiceStub(channel), metadata),
            _Stub(tenants_pb2_grpc.TenantServiceStub(channel), metadata),
            _Stub(catalog_pb2_grpc.CatalogServiceStub(channel), metadata),
            _Stub(nodes_pb2_grpc.NodeServiceStub(channel), metadata),
            secret,
        )

    @property
    def digest(self) -> bytes:
        """What a node forwards of the credential."""
        return hashlib.sha256(self.secret.encode()).digest()


class _Stub:
    def __init__(self, stub: Any, metadata: Sequence[tuple[str, str]]) -> None:
        self._stub, self._metadata = stub, metadata

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)
        return lambda request, **options: method(request, metadata=self._metadata, timeout=30, **options)


class World:
    """A served control plane with shortcuts. Made by the fixture `world`; owned by the test.

    Attributes:
        plane: The control plane.
        settings: Its settings.
        operator: Client of the first operator.
    """

    def __init__(self, plane: ControlPlane, settings: Settings, operator_secret: str) -> None:
        assert plane.server.addresses is not None
        self.plane = plane
        self.settings = settings
        self._callers = grpc.aio.insecure_channel(plane.server.addresses.callers)
        self._operators = grpc.aio.insecure_channel(plane.server.addresses.operators)
        self._request_ids = (f"request-{number}" for number in itertools.count())
        self.operator = Client.on(self._operators, operator_secret)

    async def close(self) -> None:
        await self._callers.close()
        await self._operators.close()

    def caller(self, secret: str) -> Client:
        """Client of any credential on the callers' listener."""
        return Client.on(self._callers, secret)

    def on_operators(self, secret: str) -> Client:
        """Client of any credential on the operators' listener."""
        return Client.on(self._operators, secret)

    async def base(self, description: BaseDescription | None = None) -> str:
        """Registers a base; its digest."""
        known = description or tiny_base()
        fields = dataclasses.asdict(known)
        fields["modules"] = [bases_pb2.TargetModule(**module) for module in fields["modules"]]
        await self.operator.bases.RegisterBase(bases_pb2.RegisterBaseRequest(base=bases_pb2.Base(**fields)))
        return known.digest

    async def tenant(self, name: str, *roles: int, **fields: Any) -> Client:
        """Creates a tenant with a key of all roles, or of those given."""
        await self.operator.tenants.CreateTenant(
            tenants_pb2.CreateTenantRequest(tenant=tenants_pb2.Tenant(name=name, **fields))
        )
        return await self.key(name, *roles)

    async def key(self, tenant: str, *roles: int, **fields: Any) -> Client:
        """Creates a key of a tenant, as the operator."""
        request = tenants_pb2.CreateKeyRequest(tenant=tenant, roles=roles or (OWNER, PUBLISHER, CALLER), **fields)
        return self.caller((await self.operator.tenants.CreateKey(request)).secret)

    async def node(self, name: str = "node-1", base_digest: str = BASE_DIGEST) -> Client:
        """Enrols a node."""
        request = nodes_pb2.CreateEnrollmentTokenRequest(node_name=name)
        token = (await self.operator.nodes.CreateEnrollmentToken(request)).token
        enrolled = await self.caller(token).nodes.EnrollNode(nodes_pb2.EnrollNodeRequest(base_digest=base_digest))
        return self.caller(enrolled.secret)

    async def publish(self, client: Client, adapter: str = "style", *, seed: int = 0, **fields: Any) -> Any:
        """Publishes a small adapter."""
        header = {"adapter": adapter, "base": BASE_DIGEST, "request_id": next(self._request_ids), **fields}
        return await client.catalog.Publish(upload(adapter_files(seed), **header))


def upload(files: Files, *, part_bytes: int = 1 << 20, **header: Any) -> Iterator[catalog_pb2.PublishRequest]:
    """The messages of a publish."""
    yield catalog_pb2.PublishRequest(header=catalog_pb2.PublishHeader(**header))
    for file, data in ((catalog_pb2.ADAPTER_FILE_CONFIG, files.config), (catalog_pb2.ADAPTER_FILE_WEIGHTS, files.weights)):
        for start in range(0, len(data), part_bytes):
            part = catalog_pb2.PublishPart(file=file, data=data[start : start + part_bytes])
            yield catalog_pb2.PublishRequest(part=part)


@pytest.fixture
def settings(database: TestDatabase, pepper_file: Path, tmp_path: Path) -> Settings:
    """Settings of a control plane for tests."""
    return settings_for(database, pepper_file, tmp_path)


def settings_for(database: TestDatabase, pepper_file: Path, tmp_path: Path, **more: Any) -> Settings:
    """Settings on a database, with small pools and free ports."""
    fields = {
        "database_url": database.url,
        "owner_url": database.owner_url,
        "pepper_file": pepper_file,
        "store_url": f"file://{tmp_path}/store",
        "listen_callers": "127.0.0.1:0",
        "listen_operators": "127.0.0.1:0",
        "listen_metrics": "127.0.0.1:0",
        "pool_size": 4,
        "pool_overflow": 4,
        "pool_timeout_s": 20.0,
        "drain_grace_s": 0.0,
        "relay_interval_s": 0.05,
    }
    return Settings(**{**fields, **more})


@pytest.fixture
async def world(settings: Settings) -> AsyncIterator[World]:
    """A served control plane."""
    async for one in serve(settings):
        yield one


async def serve(settings: Settings) -> AsyncIterator[World]:
    """Serves a control plane with its first operator."""
    vault = open_vault(settings)
    secret = await asyncio.to_thread(make_first_operator, settings, vault)
    async with ControlPlane(settings, vault, check=check_here) as plane:
        await plane.server.start()
        world = World(plane, settings, secret)
        try:
            yield world
        finally:
            await world.close()
            await plane.server.stop(grace_s=0)
