"""Who may call what: every method that either plane serves, for every kind of caller, on every listener.

The methods are read from the running services by reflection: a new one without a row in `TABLE` fails. Requests speak of objects
of the tenant `acme`, so a cell of the other tenant shows what a stranger learns of them.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.e2e.conftest import Connect, Publish, Secrets
from tests.e2e.driving import greedy
from tests.fixtures.adapters import AdapterFiles, make_adapter_folder
from veneer.artifact import BaseDescription
from veneer.channel import bearer
from veneer.client import Client
from veneer.controlplane.v1 import bases_pb2, catalog_pb2, nodes_pb2, nodes_pb2_grpc, tenants_pb2
from veneer.dataplane.v1 import admin_pb2
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.local.stack import LocalStack
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

OK, NF, PD, UA, IA = "OK", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT"
_OPEN = ("grpc.health.", "grpc.reflection.")
_NOWHERE = "0" * 64


@dataclass(slots=True)
class Scene:
    """Objects of the tenant `acme`, and everybody's credentials.

    Attributes:
        credentials: Secret by kind of caller; empty for none.
        base: The base that is served.
        current: Version that the alias `stable` of the adapter `tone` serves.
        spare: Version that no alias serves.
        key_id: A key to revoke.
        node_id: A node to revoke.
        grant: A grant for the blobs of `current`, for the node.
        blob: Digest of one of them.
        files: An adapter to publish.
    """

    credentials: dict[str, str]
    base: BaseDescription
    current: str
    spare: str
    key_id: str
    node_id: str
    grant: str
    blob: str
    files: AdapterFiles


def _key_digest(scene: Scene) -> bytes:
    return hashlib.sha256(scene.credentials["owner"].encode()).digest()


def _base(scene: Scene) -> bases_pb2.Base:
    base = scene.base
    modules = [
        bases_pb2.TargetModule(path=one.path, site=one.site, in_features=one.in_features, out_features=one.out_features)
        for one in base.modules
    ]
    return bases_pb2.Base(
        digest=base.digest,
        name=base.name,
        family=base.family,
        num_layers=base.num_layers,
        modules=modules,
        vocab_size=base.vocab_size,
        max_context=base.max_context,
        known_names=base.known_names,
    )


def _upload(scene: Scene) -> list[Message]:
    header = catalog_pb2.PublishHeader(adapter="from-matrix", base=scene.base.digest, request_id="matrix")
    parts = (
        catalog_pb2.PublishPart(file=catalog_pb2.ADAPTER_FILE_CONFIG, data=scene.files.config),
        catalog_pb2.PublishPart(file=catalog_pb2.ADAPTER_FILE_WEIGHTS, data=scene.files.weights.read_bytes()),
    )
    return [catalog_pb2.PublishRequest(header=header), *(catalog_pb2.PublishRequest(part=part) for part in parts)]


@dataclass(frozen=True, slots=True)
class Row:
    """What a method answers to each kind of caller on the caller's own listener.

    No key and a revoked one are UNAUTHENTICATED everywhere; a valid key on the other listener is PERMISSION_DENIED.
    """

    request: Callable[[Scene], Message | list[Message]]
    owner: str
    caller: str
    other: str
    node: str
    operator: str


TABLE = {
    "veneer.controlplane.v1.BaseService": {
        "RegisterBase": Row(lambda s: bases_pb2.RegisterBaseRequest(base=_base(s)), PD, PD, PD, PD, OK),
        "ListBases": Row(lambda s: bases_pb2.ListBasesRequest(), OK, OK, OK, OK, OK),
    },
    "veneer.controlplane.v1.TenantService": {
        "CreateTenant": Row(
            lambda s: tenants_pb2.CreateTenantRequest(tenant=tenants_pb2.Tenant(name=f"t-{uuid.uuid4().hex[:8]}")),
            *(PD, PD, PD, PD, OK),
        ),
        "ListTenants": Row(lambda s: tenants_pb2.ListTenantsRequest(), PD, PD, PD, PD, OK),
        "CreateKey": Row(
            lambda s: tenants_pb2.CreateKeyRequest(tenant="acme", roles=[tenants_pb2.ROLE_CALLER]), OK, PD, NF, PD, OK
        ),
        "ListKeys": Row(lambda s: tenants_pb2.ListKeysRequest(tenant="acme"), OK, PD, NF, PD, OK),
        "RevokeKey": Row(lambda s: tenants_pb2.RevokeKeyRequest(tenant="acme", id=s.key_id), OK, PD, NF, PD, OK),
        "CreateGrant": Row(lambda s: tenants_pb2.CreateGrantRequest(adapter="tone", grantee="strict"), OK, PD, NF, PD, PD),
        "ListGrants": Row(lambda s: tenants_pb2.ListGrantsRequest(), OK, OK, OK, PD, PD),
        "RevokeGrant": Row(lambda s: tenants_pb2.RevokeGrantRequest(adapter="tone", grantee="strict"), OK, PD, NF, PD, PD),
    },
    "veneer.controlplane.v1.CatalogService": {
        "Publish": Row(_upload, OK, PD, OK, PD, PD),  # into one's own part of the catalogue
        "GetAdapter": Row(lambda s: catalog_pb2.GetAdapterRequest(adapter="tone"), OK, OK, NF, PD, PD),
        "ListAdapters": Row(lambda s: catalog_pb2.ListAdaptersRequest(), OK, OK, OK, PD, PD),
        "ListVersions": Row(lambda s: catalog_pb2.ListVersionsRequest(adapter="tone"), OK, OK, NF, PD, PD),
        "SetAlias": Row(
            lambda s: catalog_pb2.SetAliasRequest(
                adapter="tone", alias="next", arms=[catalog_pb2.Arm(version=s.current, weight=1)]
            ),
            *(OK, PD, NF, PD, PD),
        ),
        "Rollback": Row(
            lambda s: catalog_pb2.RollbackRequest(adapter="tone", alias="turned", version=s.current), OK, PD, NF, PD, PD
        ),
        "RetireVersion": Row(lambda s: catalog_pb2.RetireVersionRequest(adapter="tone", version=s.spare), OK, PD, NF, PD, PD),
    },
    "veneer.controlplane.v1.NodeService": {
        "CreateEnrollmentToken": Row(
            lambda s: nodes_pb2.CreateEnrollmentTokenRequest(node_name="matrix-token"), PD, PD, PD, PD, OK
        ),
        "EnrollNode": Row(lambda s: nodes_pb2.EnrollNodeRequest(base_digest=s.base.digest), PD, PD, PD, PD, PD),
        "RotateNodeKey": Row(lambda s: nodes_pb2.RotateNodeKeyRequest(), PD, PD, PD, OK, PD),
        "ListNodes": Row(lambda s: nodes_pb2.ListNodesRequest(), PD, PD, PD, PD, OK),
        "RevokeNode": Row(lambda s: nodes_pb2.RevokeNodeRequest(id=s.node_id), PD, PD, PD, PD, OK),
        "Resolve": Row(
            lambda s: nodes_pb2.ResolveRequest(
                key_digest=_key_digest(s), target=nodes_pb2.AdapterTarget(adapter="tone"), base_digest=s.base.digest
            ),
            *(PD, PD, PD, OK, PD),
        ),
        "Introspect": Row(lambda s: nodes_pb2.IntrospectRequest(key_digest=_key_digest(s)), PD, PD, PD, OK, PD),
        "GrantBlobs": Row(lambda s: nodes_pb2.GrantBlobsRequest(version=s.current), PD, PD, PD, OK, PD),
        "ReadBlob": Row(lambda s: nodes_pb2.ReadBlobRequest(grant=s.grant, digest=s.blob), PD, PD, PD, OK, PD),
        "ListChanges": Row(lambda s: nodes_pb2.ListChangesRequest(), PD, PD, PD, OK, PD),
        "ReportVersion": Row(
            lambda s: nodes_pb2.ReportVersionRequest(version=s.spare, fault=nodes_pb2.VERSION_FAULT_CORRUPT), PD, PD, PD, OK, PD
        ),
    },
    "veneer.dataplane.v1.GenerationService": {
        "Generate": Row(
            lambda s: pb.GenerateRequest(adapter=pb.AdapterRef(adapter="tone", owner="acme"), text="hello", sampling=greedy(2)),
            *(OK, OK, NF, UA, UA),  # whose key it is the control plane says, and it knows tenants only
        ),
    },
    "veneer.dataplane.v1.AdminService": {
        "GetResidency": Row(lambda s: admin_pb2.GetResidencyRequest(), PD, PD, PD, PD, OK),
        # A grace that no drain can have: whoever is let in hears of it, and the node goes on.
        "Drain": Row(lambda s: admin_pb2.DrainRequest(grace=Duration(seconds=-1)), PD, PD, PD, PD, IA),
    },
}
"""By service and method."""

WHO = ("owner", "caller", "other", "no key", "revoked key", "node", "operator")


@pytest.fixture
async def scene(
    stack: LocalStack,
    secrets: Secrets,
    acme: Client,
    operator: OperatorClient,
    publish: Publish,
    model_base: BaseDescription,
    tmp_path: Any,
) -> Scene:
    spare = (await publish(acme, "B", adapter="tone")).version.digest
    current = (await publish(acme, "A", adapter="tone", alias="stable")).version.digest
    await acme.set_alias("tone", {spare: 1}, alias="turned")
    await acme.set_alias("tone", {current: 1}, alias="turned")
    await acme.set_alias("tone", {current: 1}, alias="turned")
    await acme.create_grant("tone", "strict")
    caller, revoked, throwaway = [await acme.create_key(roles=["caller"]) for _ in range(3)]
    await acme.revoke_key(revoked.key.id)
    node_secret, _ = await _enrolled(stack, operator, model_base)
    _, node_id = await _enrolled(stack, operator, model_base)
    async with grpc.aio.insecure_channel(stack.state.control) as channel:
        request = nodes_pb2.GrantBlobsRequest(version=current)
        granted = await nodes_pb2_grpc.NodeServiceStub(channel).GrantBlobs(request, metadata=bearer(node_secret), timeout=30)
    return Scene(
        credentials={
            "owner": secrets.acme,
            "caller": caller.secret,
            "other": secrets.rival,
            "no key": "",
            "revoked key": revoked.secret,
            "node": node_secret,
            "operator": stack.state.operator_key,
        },
        base=model_base,
        current=current,
        spare=spare,
        key_id=throwaway.key.id,
        node_id=node_id,
        grant=granted.grant,
        blob=granted.blobs[0].digest,
        files=AdapterFiles.of(make_adapter_folder(tmp_path / "matrix", model_base)),
    )


async def _enrolled(stack: LocalStack, operator: OperatorClient, base: BaseDescription) -> tuple[str, str]:
    """Secret and id of a new node."""
    token = (await operator.create_enrollment_token("matrix")).token
    async with grpc.aio.insecure_channel(stack.state.control) as channel:
        request = nodes_pb2.EnrollNodeRequest(base_digest=base.digest)
        enrolled = await nodes_pb2_grpc.NodeServiceStub(channel).EnrollNode(request, metadata=bearer(token), timeout=30)
    return enrolled.secret, enrolled.node.id


@dataclass(frozen=True, slots=True)
class Listener:
    """A listener, and what it serves by its own account: service → methods."""

    plane: str
    name: str
    address: str
    services: Mapping[str, frozenset[str]]


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


def without_row(services: Mapping[str, Collection[str]]) -> set[str]:
    """Methods that `TABLE` does not speak of."""
    return {f"{name}/{method}" for name, methods in services.items() for method in methods if method not in TABLE.get(name, {})}


def expected(listener: Listener, service: str, method: str, who: str) -> str:
    """The status of one cell."""
    if service not in listener.services:
        return "UNIMPLEMENTED"
    if who in ("no key", "revoked key"):
        return UA
    home = "operators" if who == "operator" else "callers"
    row = TABLE[service][method]
    if listener.name == home or method == "Generate":
        return str(getattr(row, who))
    return PD


async def call(
    channel: grpc.aio.Channel, method: MethodDescriptor, request: Message | list[Message], secret: str
) -> tuple[str, str, list[Any]]:
    """Code, text and messages of a call."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    codec = {
        "request_serializer": lambda message: message.SerializeToString(),
        "response_deserializer": message_factory.GetMessageClass(method.output_type).FromString,
    }
    options = {"metadata": bearer(secret), "timeout": 60.0}
    try:
        if isinstance(request, list):
            return OK, "", [await channel.stream_unary(path, **codec)(iter(request), **options)]
        if _streams(method):
            return OK, "", [message async for message in channel.unary_stream(path, **codec)(request, **options)]
        return OK, "", [await channel.unary_unary(path, **codec)(request, **options)]
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or "", []


def _streams(method: MethodDescriptor) -> bool:
    return method.name in ("Generate", "ReadBlob")


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


async def test_every_method_answers_every_kind_of_caller_as_the_table_says(listeners: list[Listener], scene: Scene) -> None:
    wrong: list[str] = []
    num_cells = 0
    for listener in listeners:
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
        both(tenant, "CreateGrant", t.CreateGrantRequest, {"adapter": "tone", "grantee": "strict"}, {"adapter": "none"}),
        both(tenant, "RevokeGrant", t.RevokeGrantRequest, {"adapter": "tone", "grantee": "strict"}, {"adapter": "none"}),
        both(tenant, "CreateKey", t.CreateKeyRequest, {"tenant": "acme", "roles": role}, {"tenant": "nobody"}),
        both(tenant, "ListKeys", t.ListKeysRequest, {"tenant": "acme"}, {"tenant": "nobody"}),
        both(tenant, "RevokeKey", t.RevokeKeyRequest, {"tenant": "acme", "id": scene.key_id}, {"tenant": "nobody"}),
        both(tenant, "RevokeKey", t.RevokeKeyRequest, {"id": scene.key_id}, {"id": nobody}),
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


async def test_a_grantee_uses_what_it_may_and_still_reads_nothing(
    acme: Client, connect: Connect, secrets: Secrets, scene: Scene, stack: LocalStack
) -> None:
    strict = secrets.strict  # the scene grants it `tone`
    async with grpc.aio.insecure_channel(stack.state.control) as channel:
        for pair in _pairs(scene):
            if "own" not in str(pair.foreign):
                method = _descriptor(pair.service, pair.method)
                answers = [await call(channel, method, request, strict) for request in (pair.foreign, pair.unknown)]
                assert answers[0] == answers[1], pair.method
