"""Isolation of tenants: every method that either plane serves, for every kind of caller, on every listener; and what differs
between something foreign and something that does not exist, which is nothing.

The methods are read from the running services by reflection: a new one without a row in `tests.e2e.access.TABLE` fails.
"""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.e2e.access import NF, OK, TABLE, WHO, Listener, Scene, expected, without_row
from tests.e2e.conftest import Publish, Secrets
from tests.e2e.driving import greedy
from tests.fixtures.adapters import AdapterFiles, make_adapter_folder
from veneer.artifact import BaseDescription
from veneer.canary_calls import CanaryStep
from veneer.channel import bearer
from veneer.client import Client
from veneer.controlplane.v1 import canaries_pb2, catalog_pb2, nodes_pb2, nodes_pb2_grpc, tenants_pb2
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.local.stack import LocalStack
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_OPEN = ("grpc.health.", "grpc.reflection.")
_ENDLESS = ("WatchResidency",)  # the first message of such a stream says enough
_NOWHERE = "0" * 64


@pytest.fixture
async def scene(
    stack: LocalStack,
    secrets: Secrets,
    acme: Client,
    operator: OperatorClient,
    publish: Publish,
    model_base: BaseDescription,
    tmp_path: Path,
) -> Scene:
    spare = (await publish(acme, "B", adapter="tone")).version.digest
    tried = (await publish(acme, "C", adapter="tone")).version.digest
    current = (await publish(acme, "A", adapter="tone", alias="stable")).version.digest
    await acme.set_alias("tone", {spare: 1}, alias="turned")
    await acme.set_alias("tone", {current: 1}, alias="turned")
    await acme.set_alias("tone", {current: 1}, alias="turned")
    await acme.set_alias("tone", {tried: 1}, alias="tried")
    await acme.start_canary("tone", current, [CanaryStep(1, 3600, 1000)], alias="tried")
    await acme.create_grant("tone", "strict")
    caller, revoked, throwaway = [await acme.create_key(roles=["caller"]) for _ in range(3)]
    await acme.revoke_key(revoked.key.id)
    organization = f"group-{uuid.uuid4().hex[:8]}"
    await operator.create_organization(organization)
    await operator.create_tenant(f"{organization}--team", organization=organization)
    chief, spare_chief = [await operator.create_organization_key(roles=["owner"], organization=organization) for _ in range(2)]
    node_secret, _ = await _enrolled(stack, operator, model_base)
    _, node_id = await _enrolled(stack, operator, model_base)
    async with grpc.aio.insecure_channel(stack.state.control) as channel:
        nodes, options = nodes_pb2_grpc.NodeServiceStub(channel), {"metadata": bearer(node_secret), "timeout": 60}
        target = nodes_pb2.AdapterTarget(adapter="tone", version=current)
        key_digest = hashlib.sha256(secrets.acme.encode()).digest()
        await nodes.Resolve(
            nodes_pb2.ResolveRequest(key_digest=key_digest, target=target, base_digest=model_base.digest), **options
        )
        granted = await nodes.GrantBlobs(nodes_pb2.GrantBlobsRequest(version=current), **options)
    return Scene(
        credentials={
            "owner": secrets.acme,
            "caller": caller.secret,
            "other": secrets.rival,
            "no key": "",
            "revoked key": revoked.secret,
            "node": node_secret,
            "operator": stack.state.operator_key,
            "organization": chief.secret,
        },
        base=model_base,
        current=current,
        spare=spare,
        key_id=throwaway.key.id,
        node_id=node_id,
        grant=granted.grant,
        blob=granted.blobs[0].digest,
        files=AdapterFiles.of(make_adapter_folder(tmp_path / "matrix", model_base)),
        organization=organization,
        organization_tenant=f"{organization}--team",
        organization_key_id=spare_chief.key.id,
    )


async def _enrolled(stack: LocalStack, operator: OperatorClient, base: BaseDescription) -> tuple[str, str]:
    """Secret and id of a new node."""
    token = (await operator.create_enrollment_token("matrix")).token
    async with grpc.aio.insecure_channel(stack.state.control) as channel:
        request = nodes_pb2.EnrollNodeRequest(base_digest=base.digest)
        enrolled = await nodes_pb2_grpc.NodeServiceStub(channel).EnrollNode(request, metadata=bearer(token), timeout=60)
    return enrolled.secret, enrolled.node.id


@pytest.fixture(scope="module")
def listeners(stack: LocalStack) -> list[Listener]:
    state = stack.state
    addresses = {
        ("controlplane", "callers"): state.control,
        ("controlplane", "operators"): state.control_operators,
        ("dataplane", "callers"): state.data,
        ("dataplane", "operators"): state.data_operators,
    }
    return [Listener(*name, address, _served(address)) for name, address in addresses.items()]


def _served(address: str) -> dict[str, frozenset[str]]:
    """Asks a listener by reflection."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        found = {}
        for name in database.get_services():
            if not name.startswith(_OPEN):
                file = database.FindFileContainingSymbol(name)
                service = next(one for one in file.service if f"{file.package}.{one.name}" == name)
                found[name] = frozenset(method.name for method in service.method)
        return found


async def call(
    channel: grpc.aio.Channel, method: MethodDescriptor, request: Message | list[Message], secret: str
) -> tuple[str, str, list[Any]]:
    """Code, text and messages of a call; made again when grpc.aio puts an error of its own in the place of an early answer."""
    while True:
        code, text, answers = await _call_once(channel, method, request, secret)
        if text != "Internal error from Core":
            return code, text, answers


async def _call_once(
    channel: grpc.aio.Channel, method: MethodDescriptor, request: Message | list[Message], secret: str
) -> tuple[str, str, list[Any]]:
    path = f"/{method.containing_service.full_name}/{method.name}"
    codec = {
        "request_serializer": lambda message: message.SerializeToString(),
        "response_deserializer": message_factory.GetMessageClass(method.output_type).FromString,
    }
    options = {"metadata": bearer(secret), "timeout": 60.0}
    try:
        if isinstance(request, list):
            return OK, "", [await channel.stream_unary(path, **codec)(iter(request), **options)]
        if method.server_streaming:
            stream = channel.unary_stream(path, **codec)(request, **options)
            if method.name in _ENDLESS:
                return OK, "", [await stream.read()]
            return OK, "", [message async for message in stream]
        return OK, "", [await channel.unary_unary(path, **codec)(request, **options)]
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or "", []


def _descriptor(service: str, method: str) -> MethodDescriptor:
    return descriptor_pool.Default().FindServiceByName(service).methods_by_name[method]


def test_every_served_method_has_a_row_and_every_row_a_method(listeners: list[Listener]) -> None:
    served: dict[str, frozenset[str]] = {}
    for listener in listeners:
        served |= listener.services
    assert without_row(served) == set()
    assert {name: set(methods) for name, methods in TABLE.items()} == {name: set(methods) for name, methods in served.items()}


def test_a_new_method_without_a_row_is_noticed(listeners: list[Listener]) -> None:
    grown = {name: {*methods, "Copy"} for name, methods in listeners[0].services.items()}
    assert without_row(grown) == {f"{name}/Copy" for name in grown}
    assert without_row({"veneer.controlplane.v1.DebugService": ["Dump"]}) == {"veneer.controlplane.v1.DebugService/Dump"}


async def test_every_method_answers_every_kind_of_caller_as_the_table_says(
    listeners: list[Listener], scene: Scene, acme: Client, operator: OperatorClient
) -> None:
    wrong: list[str] = []
    num_cells = 0
    for listener in listeners:
        # Keys of its own for each: they are rotated and revoked on one listener after another.
        key = await acme.create_key(roles=["caller"])
        chief = await operator.create_organization_key(roles=["owner"], organization=scene.organization)
        scene = dataclasses.replace(scene, key_id=key.key.id, organization_key_id=chief.key.id)
        async with grpc.aio.insecure_channel(listener.address) as channel:
            for service, rows in TABLE.items():
                for name, row in rows.items():
                    for who in WHO:
                        request = row.request(scene)
                        code, text, answers = await call(channel, _descriptor(service, name), request, scene.credentials[who])
                        num_cells += 1
                        wanted = expected(listener, service, name, who)
                        if code != wanted:
                            wrong.append(f"{listener.plane} {listener.name} {name} {who}: {code} ({text}), not {wanted}")
                        if code == OK and name == "RotateNodeKey":
                            scene.credentials["node"] = answers[0].secret
    assert not wrong, "\n".join(wrong)
    assert num_cells == len(WHO) * len(listeners) * sum(map(len, TABLE.values()))


@dataclass(frozen=True, slots=True)
class Pair:
    """The same question about something foreign and about something that does not exist."""

    service: str
    method: str
    foreign: Message
    unknown: Message


def _pairs(scene: Scene) -> list[Pair]:
    catalog, tenant = "veneer.controlplane.v1.CatalogService", "veneer.controlplane.v1.TenantService"
    nobody = str(uuid.uuid4())

    def arms(version: str) -> list[catalog_pb2.Arm]:
        return [catalog_pb2.Arm(version=version, weight=1)]

    def both(service: str, method: str, kind: type[Message], foreign: dict[str, Any], unknown: dict[str, Any]) -> Pair:
        return Pair(service, method, kind(**foreign), kind(**{**foreign, **unknown}))

    c, t = catalog_pb2, tenants_pb2
    role = [t.ROLE_CALLER]
    return [
        both(catalog, "GetAdapter", c.GetAdapterRequest, {"adapter": "tone"}, {"adapter": "none"}),
        both(catalog, "ListVersions", c.ListVersionsRequest, {"adapter": "tone"}, {"adapter": "none"}),
        both(catalog, "SetAlias", c.SetAliasRequest, {"adapter": "tone", "arms": arms(scene.current)}, {"adapter": "none"}),
        both(
            catalog,
            "SetAlias",
            c.SetAliasRequest,
            {"adapter": "own", "arms": arms(scene.current)},
            {"arms": arms(_NOWHERE)},
        ),
        both(catalog, "Rollback", c.RollbackRequest, {"adapter": "tone"}, {"adapter": "none"}),
        both(catalog, "Rollback", c.RollbackRequest, {"adapter": "own", "alias": "turned"}, {"alias": "nothere"}),
        both(catalog, "Rollback", c.RollbackRequest, {"adapter": "own", "version": scene.current}, {"version": _NOWHERE}),
        both(catalog, "RetireVersion", c.RetireVersionRequest, {"adapter": "tone", "version": scene.spare}, {"adapter": "none"}),
        both(catalog, "RetireVersion", c.RetireVersionRequest, {"adapter": "own", "version": scene.spare}, {"version": _NOWHERE}),
        both(catalog, "Promote", c.PromoteRequest, {"adapter": "tone", "version": scene.current}, {"adapter": "none"}),
        both(catalog, "FreezeAlias", c.FreezeAliasRequest, {"adapter": "tone"}, {"adapter": "none"}),
        both(
            catalog,
            "StartCanary",
            canaries_pb2.StartCanaryRequest,
            {"adapter": "tone", "version": scene.spare, "steps": [canaries_pb2.CanaryStep(weight_percent=1)]},
            {"adapter": "none"},
        ),
        both(catalog, "GetCanary", canaries_pb2.GetCanaryRequest, {"adapter": "tone", "alias": "tried"}, {"adapter": "none"}),
        both(catalog, "StopCanary", canaries_pb2.StopCanaryRequest, {"adapter": "tone", "alias": "tried"}, {"adapter": "none"}),
        both(catalog, "DeleteVersion", c.DeleteVersionRequest, {"adapter": "tone", "version": scene.spare}, {"adapter": "none"}),
        both(catalog, "DeleteVersion", c.DeleteVersionRequest, {"adapter": "own", "version": scene.spare}, {"version": _NOWHERE}),
        both(catalog, "DeleteAdapter", c.DeleteAdapterRequest, {"adapter": "tone", "force": True}, {"adapter": "none"}),
        both(tenant, "CreateGrant", t.CreateGrantRequest, {"adapter": "tone", "grantee": "strict"}, {"adapter": "none"}),
        both(tenant, "RevokeGrant", t.RevokeGrantRequest, {"adapter": "tone", "grantee": "strict"}, {"adapter": "none"}),
        both(tenant, "SetFallback", t.SetFallbackRequest, {"tenant": "acme"}, {"tenant": "nobody"}),
        both(tenant, "CreateKey", t.CreateKeyRequest, {"tenant": "acme", "roles": role}, {"tenant": "nobody"}),
        both(tenant, "ListKeys", t.ListKeysRequest, {"tenant": "acme"}, {"tenant": "nobody"}),
        both(tenant, "ListAudit", t.ListAuditRequest, {"tenant": "acme"}, {"tenant": "nobody"}),
        both(tenant, "RevokeKey", t.RevokeKeyRequest, {"tenant": "acme", "id": scene.key_id}, {"tenant": "nobody"}),
        both(tenant, "RevokeKey", t.RevokeKeyRequest, {"id": scene.key_id}, {"id": nobody}),
        both(tenant, "RotateKey", t.RotateKeyRequest, {"tenant": "acme", "id": scene.key_id}, {"tenant": "nobody"}),
        both(tenant, "RotateKey", t.RotateKeyRequest, {"id": scene.key_id}, {"id": nobody}),
    ]


async def test_the_control_plane_answers_foreign_and_unknown_alike(
    stack: LocalStack, scene: Scene, rival: Client, publish: Publish
) -> None:
    await publish(rival, "C", adapter="own")
    async with grpc.aio.insecure_channel(stack.state.control) as channel:
        for pair in _pairs(scene):
            method = _descriptor(pair.service, pair.method)
            answers = [
                await call(channel, method, request, scene.credentials["other"]) for request in (pair.foreign, pair.unknown)
            ]
            assert answers[0] == answers[1], pair.method
            assert answers[0][0] == NF, (pair.method, answers[0])


def _references(scene: Scene) -> dict[str, pb.AdapterRef]:
    ref = pb.AdapterRef
    return {
        "unknown adapter": ref(adapter="none", owner="acme"),
        "unknown owner": ref(adapter="tone", owner="nobody"),
        "unknown own adapter": ref(adapter="none"),
        "unknown alias": ref(adapter="own", alias="nothere"),
        "unknown version": ref(adapter="own", version=_NOWHERE),
        "unknown alias of a foreign adapter": ref(adapter="tone", owner="acme", alias="nothere"),
        "unknown version of a foreign adapter": ref(adapter="tone", owner="acme", version=_NOWHERE),
        "foreign adapter": ref(adapter="tone", owner="acme"),
        "foreign adapter by name alone": ref(adapter="tone"),
        "foreign alias": ref(adapter="tone", owner="acme", alias="stable"),
        "foreign version": ref(adapter="tone", owner="acme", version=scene.current),
        "foreign version of an own adapter": ref(adapter="own", version=scene.current),
        "foreign version that was retired": ref(adapter="tone", owner="acme", version=scene.spare),
    }


@pytest.mark.parametrize("mode", [pb.FALLBACK_MODE_NONE, pb.FALLBACK_MODE_NOT_READY, pb.FALLBACK_MODE_ANY])
async def test_the_data_plane_answers_foreign_and_unknown_alike(
    stack: LocalStack, scene: Scene, acme: Client, rival: Client, publish: Publish, mode: pb.FallbackMode.ValueType
) -> None:
    await publish(rival, "C", adapter="own")
    await acme.retire("tone", scene.spare)
    generate = _descriptor("veneer.dataplane.v1.GenerationService", "Generate")
    found: dict[str, tuple[str, str, list[Any]]] = {}
    async with grpc.aio.insecure_channel(stack.state.data) as channel:
        for name, reference in _references(scene).items():
            request = pb.GenerateRequest(
                adapter=reference, text="hello", sampling=greedy(1), fallback=mode, request_id="same", split_unit="same"
            )
            found[name] = await call(channel, generate, request, scene.credentials["other"])
    first = found["unknown adapter"]
    assert first[0] == (OK if mode == pb.FALLBACK_MODE_ANY else NF)
    for name, answer in found.items():
        assert answer == first, name


async def test_lists_show_ones_own_and_nothing_else(acme: Client, rival: Client, scene: Scene, publish: Publish) -> None:
    await publish(rival, "C", adapter="own")
    mine, theirs = [{adapter.name for adapter in await client.adapters()} for client in (rival, acme)]
    assert "own" in mine
    assert "tone" in theirs
    assert "tone" not in mine
    assert "own" not in theirs
    assert {adapter.owner for adapter in await rival.adapters()} == {"rival"}
    assert {key.tenant for key in await rival.keys()} == {"rival"}
    assert scene.key_id not in {key.id for key in await rival.keys()}
    granted = await rival.grants()
    assert {grant.owner for grant in granted.given} <= {"rival"}
    assert {grant.grantee for grant in granted.received} <= {"rival"}


async def test_a_grantee_uses_what_it_may_and_still_reads_nothing(secrets: Secrets, scene: Scene, stack: LocalStack) -> None:
    strict = secrets.strict  # the scene grants it `tone`
    async with grpc.aio.insecure_channel(stack.state.control) as channel:
        for pair in _pairs(scene):
            if "own" not in str(pair.foreign):
                method = _descriptor(pair.service, pair.method)
                answers = [await call(channel, method, request, strict) for request in (pair.foreign, pair.unknown)]
                assert answers[0] == answers[1], pair.method
