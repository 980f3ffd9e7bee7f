"""Every field of every request of the control plane with what the database cannot hold: refused by its name, in our words."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from controlplane.constraints import CONSTRAINTS
from controlplane.rules import RULES
from tests.fixtures.controlplane import AUDITOR, CALLER, OWNER, PUBLISHER, Client, World, tiny_base

PACKAGE = "veneer.controlplane.v1"
FILES = ("bases", "canaries", "catalog", "nodes", "organizations", "placement", "signatures", "tenants")
UUID = "123e4567-e89b-42d3-a456-426614174000"
TEXTS = {
    "digest": "a" * 64,
    "base_digest": tiny_base().digest,
    "id": UUID,
    "epoch": UUID,
    "journal": "f" * 32,
    "site": "embed",
    "dtype": "F32",
    "sha256": "a" * 64,
    "path": "model.layers.{layer}.self_attn.q_proj",
    "adapter": "style",
    "page_token": "",
    "cursor": "",
    "data_digest": "",
    "tenant": "acme",
    "owner": "acme",
    "alias": "stable",
    "source": "stable",
    "grantee": "friend",
    "organization": "group",
    "version": "a" * 64,
}
# By request, where a field means something else.
OTHERS = {
    "RemoveTrustedKeyRequest": {"id": "b" * 64},
    "CreateTenantRequest": {"organization": ""},
    "Tenant": {"organization": ""},
    "ListTenantsRequest": {"organization": ""},
}
PEM = (
    ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
    .public_key()
    .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
)
NUMBERS = {"weight_percent": 5, "weight": 1, "page_size": 1, "sequence": 1}
REQUEST_IDS = (f"request-{number}" for number in itertools.count())
WIDE = {
    FieldDescriptor.TYPE_UINT32: (1 << 32) - 1,
    FieldDescriptor.TYPE_UINT64: (1 << 64) - 1,
    FieldDescriptor.TYPE_INT32: (1 << 31) - 1,
    FieldDescriptor.TYPE_INT64: (1 << 63) - 1,
    FieldDescriptor.TYPE_DOUBLE: 1e308,
}


@dataclass(frozen=True, slots=True)
class Place:
    """A field of a request, below the messages that hold it."""

    method: MethodDescriptor
    path: tuple[FieldDescriptor, ...]

    def __str__(self) -> str:
        return f"{self.method.name}-{'.'.join(field.name for field in self.path)}"

    def request(self, value: Any) -> Message:
        """An ordinary request with this in the field."""
        request = GetMessageClass(self.method.input_type)()
        fill(request)
        if self.path:
            put(request, self.path, value)
        return request


def methods() -> Iterator[MethodDescriptor]:
    for name in FILES:
        file = importlib.import_module(f"{PACKAGE}.{name}_pb2").DESCRIPTOR
        for service in file.services_by_name.values():
            yield from service.methods_by_name.values()


def places(*types: int) -> list[Place]:
    def below(message: Descriptor, path: tuple[FieldDescriptor, ...]) -> Iterator[tuple[FieldDescriptor, ...]]:
        for field in message.fields:
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                yield from below(field.message_type, (*path, field))
            elif field.type in types:
                yield (*path, field)

    return [Place(method, path) for method in methods() for path in below(method.input_type, ())]


def fill(message: Message) -> None:
    """Fills a message with ordinary values, as far as a table knows them."""
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None and message.WhichOneof(field.containing_oneof.name):
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if field.message_type.full_name == "google.protobuf.Timestamp":
                getattr(message, field.name).FromSeconds(3600)
            if field.message_type.GetOptions().map_entry or field.message_type.full_name.startswith("google."):
                continue
            fill(getattr(message, field.name).add() if field.is_repeated else getattr(message, field.name))
            if not field.is_repeated:
                getattr(message, field.name).SetInParent()
        elif field.name == "roles":
            message.roles.append(OWNER)
        elif field.is_repeated:
            continue
        elif field.name == "request_id":
            message.request_id = next(REQUEST_IDS)
        elif field.type == FieldDescriptor.TYPE_STRING:
            texts = {**TEXTS, **OTHERS.get(message.DESCRIPTOR.name, {})}
            setattr(message, field.name, texts.get(field.name, "x1"))
        elif field.type == FieldDescriptor.TYPE_BYTES:
            setattr(message, field.name, PEM if field.name == "pem" else b"k" * 32)
        elif field.type == FieldDescriptor.TYPE_ENUM:
            setattr(message, field.name, field.enum_type.values[-1].number)
        elif field.type == FieldDescriptor.TYPE_BOOL:
            continue
        elif field.name in NUMBERS:
            setattr(message, field.name, NUMBERS[field.name])
        elif field.name != "expected_generation":
            setattr(message, field.name, 1)


def put(message: Message, path: tuple[FieldDescriptor, ...], value: Any) -> None:
    field, *rest = path
    if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
        (part,) = rest
        getattr(message, field.name)[value if part.name == "key" else "k"] = value if part.name == "value" else "v"
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        inner = getattr(message, field.name)
        put((inner[0] if len(inner) else inner.add()) if field.is_repeated else inner, tuple(rest), value)
    elif field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


@dataclass(frozen=True, slots=True)
class Scene:
    """A client for each kind of caller."""

    clients: dict[str, Client]

    async def outcome(self, place: Place, value: Any) -> tuple[str, str]:
        """Name of the code and text of the answer to the first kind of caller that may call the method."""
        method, request = place.method, place.request(value)
        rule = RULES[f"/{method.containing_service.full_name}/{method.name}"]
        kinds = rule.kinds if "bearer" not in rule.kinds else {"tenant"}
        client = next(client for kind, client in self.clients.items() if kind in kinds)
        service = {
            "BaseService": client.bases,
            "TenantService": client.tenants,
            "CatalogService": client.catalog,
            "NodeService": client.nodes,
            "PlacementService": client.placement,
            "OrganizationService": client.organizations,
            "SignatureService": client.signatures,
        }[method.containing_service.name]
        call = getattr(service, method.name)(iter([request]) if method.client_streaming else request)
        try:
            if method.server_streaming:
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""


@pytest.fixture
async def scene(world: World) -> Scene:
    await world.base()
    acme = await world.tenant("acme", OWNER, PUBLISHER, CALLER, AUDITOR)
    await world.publish(acme)
    token = await world.operator.nodes.CreateEnrollmentToken(
        importlib.import_module(f"{PACKAGE}.nodes_pb2").CreateEnrollmentTokenRequest(node_name="late")
    )
    clients = {
        "tenant": acme,
        "operator": world.operator,
        "node": await world.node(),
        "enrollment": world.caller(token.token),
        "organization": await world.organization("group"),
    }
    return Scene(clients)


SCHEMA = re.compile(
    "|".join([*CONSTRAINTS, "ck_", "pk_", "fk_", "uq_", "veneer_app", "relation", "violates", "psycopg", "sqlalchemy"])
)


async def test_every_text_with_a_nul_character_or_without_end_is_refused_by_its_name(scene: Scene) -> None:
    found = places(FieldDescriptor.TYPE_STRING)
    assert len(found) > 100
    for place in found:
        name = next(field.name for field in reversed(place.path) if field.name not in {"key", "value"})
        for value in ("\0", "a\0b", "a" * 100_000):
            code, said = await scene.outcome(place, value)
            assert code == "INVALID_ARGUMENT", (str(place), value[:9], said)
            assert name in said, (str(place), said)
            assert SCHEMA.search(said) is None, (str(place), said)


@pytest.mark.parametrize("value", ["é\n", "' OR 1=1 --", "\U0010ffff", "../..", "%s", "A" * 30, "-"])
async def test_no_text_is_an_internal_error_or_shows_the_schema(scene: Scene, value: str) -> None:
    for place in places(FieldDescriptor.TYPE_STRING):
        code, said = await scene.outcome(place, value)
        assert code not in {"INTERNAL", "UNKNOWN", "UNAVAILABLE"}, (str(place), said)
        assert SCHEMA.search(said) is None, (str(place), said)


@pytest.mark.parametrize("sign", [1, -1])
async def test_no_number_is_an_internal_error_or_shows_the_schema(scene: Scene, sign: int) -> None:
    for place in places(*WIDE):
        kind = place.path[-1].type
        is_signed = kind in {FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_DOUBLE}
        if sign < 0 and not is_signed:
            continue
        code, said = await scene.outcome(place, WIDE[kind] * sign)
        assert code not in {"INTERNAL", "UNKNOWN", "UNAVAILABLE"}, (str(place), said)
        assert SCHEMA.search(said) is None, (str(place), said)


async def test_the_requests_without_a_hostile_field_are_refused_for_no_form(scene: Scene) -> None:
    """Else what is tried above would be refused before it is looked at."""
    refused = set()
    for method in methods():
        code, said = await scene.outcome(Place(method, ()), None)
        if code == "INVALID_ARGUMENT":
            refused.add((method.name, said))
    assert refused == {("Publish", "adapter_config.json: is missing; adapter_model.safetensors: is missing")}
