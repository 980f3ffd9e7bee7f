"""Who may call what: every method of the control plane by every kind of identity on both listeners."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor

from controlplane.rules import RULES
from controlplane.vault import new_secret
from tests.fixtures.controlplane import AUDITOR, CALLER, OWNER, PUBLISHER, Client, World
from veneer.access import method_names
from veneer.controlplane.v1 import (
    bases_pb2,
    catalog_pb2,
    nodes_pb2,
    organizations_pb2,
    placement_pb2,
    signatures_pb2,
    tenants_pb2,
)

SERVICES = [
    bases_pb2.DESCRIPTOR.services_by_name["BaseService"],
    tenants_pb2.DESCRIPTOR.services_by_name["TenantService"],
    organizations_pb2.DESCRIPTOR.services_by_name["OrganizationService"],
    catalog_pb2.DESCRIPTOR.services_by_name["CatalogService"],
    nodes_pb2.DESCRIPTOR.services_by_name["NodeService"],
    placement_pb2.DESCRIPTOR.services_by_name["PlacementService"],
    signatures_pb2.DESCRIPTOR.services_by_name["SignatureService"],
]
AUDIT = {"ListKeys", "ListAudit", "ListUsage"}
ISSUING = {"CreateKey", "RotateKey", "RevokeKey"}
KEYS = {"SetFallback"} | ISSUING | AUDIT
OVERSEEING = {"ListTenants", "GetOrganization", "ListOrganizationKeys"}
MANAGING = {"CreateTenant", "CreateOrganizationKey", "RotateOrganizationKey", "RevokeOrganizationKey"} | OVERSEEING
SHARING = {"Publish", "AttachSignature", "RetireVersion", "DeleteVersion", "FreezeAlias", "CreateGrant", "RevokeGrant"}
MOVING = {"SetAlias", "Rollback", "Promote", "StartCanary", "StopCanary"}
READING = {"ListBases", "GetAdapter", "ListAdapters", "ListVersions", "ListGrants", "GetCanary", "ListTrustedKeys"}
TRUSTING = {"AddTrustedKey", "RemoveTrustedKey", "SetSignaturePolicy"}
RUNNING = {
    "RotateNodeKey",
    "Resolve",
    "Introspect",
    "GrantBlobs",
    "ReadBlob",
    "ListChanges",
    "ReportVersion",
    "ReportOutcomes",
    "LeaseQuotas",
    "ReportUsage",
    "TakeProbe",
    "ReportProbe",
}
OPERATING = {
    "RegisterBase",
    "ListBases",
    "CreateOrganization",
    "ListOrganizations",
    "SetOrganizationQuotas",
    "AdoptTenant",
    "SetTenantLimits",
    "SetTenantQuotas",
    "CreateEnrollmentToken",
    "ListNodes",
    "RevokeNode",
}

ADMITTED = {
    ("callers", "owner"): KEYS | SHARING | READING | TRUSTING | {"DeleteAdapter"},
    ("callers", "publisher"): SHARING | MOVING | READING,
    ("callers", "caller"): READING | {"LocateAdapter"},
    ("callers", "auditor"): READING | AUDIT,
    ("callers", "organization owner"): MANAGING | ISSUING | AUDIT,
    ("callers", "organization auditor"): OVERSEEING | AUDIT,
    ("callers", "node"): RUNNING | {"ListBases"},
    ("callers", "enrollment"): {"EnrollNode"},
    ("operators", "operator"): OPERATING | MANAGING | KEYS,
}
"""Methods past the rules, by listener and identity; every other pair admits nothing. Written apart from the table under test."""
NOBODY = {"unknown", "revoked", "none"}


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """A secret of every kind of identity."""

    secrets: dict[str, str]

    @classmethod
    async def of(cls, world: World) -> Cast:
        await world.base()
        await world.tenant("acme")
        secrets = {
            "owner": (await world.key("acme", OWNER)).secret,
            "publisher": (await world.key("acme", PUBLISHER)).secret,
            "caller": (await world.key("acme", CALLER)).secret,
            "auditor": (await world.key("acme", AUDITOR)).secret,
            "operator": world.operator.secret,
            "organization owner": (await world.organization("group", OWNER)).secret,
            "organization auditor": (await world.organization_key("group", AUDITOR)).secret,
            "unknown": new_secret(),
            "none": "",
        }
        request = tenants_pb2.CreateKeyRequest(tenant="acme", roles=[OWNER, PUBLISHER, CALLER])
        made = await world.operator.tenants.CreateKey(request)
        await world.operator.tenants.RevokeKey(tenants_pb2.RevokeKeyRequest(tenant="acme", id=made.key.id))
        token = await world.operator.nodes.CreateEnrollmentToken(nodes_pb2.CreateEnrollmentTokenRequest(node_name="n"))
        return cls({**secrets, "revoked": made.secret, "enrollment": token.token, "node": (await world.node()).secret})


async def call(client: Client, method: MethodDescriptor) -> grpc.StatusCode:
    """Status of a call with an empty request, which gets no further than its validation unless an empty one is valid."""
    stubs = {
        "BaseService": client.bases,
        "TenantService": client.tenants,
        "OrganizationService": client.organizations,
        "CatalogService": client.catalog,
        "NodeService": client.nodes,
        "PlacementService": client.placement,
        "SignatureService": client.signatures,
    }
    stub = getattr(stubs[method.containing_service.name], method.name)
    request: Any = method.input_type._concrete_class()
    try:
        if method.name == "ReadBlob":
            async for _ in stub(request):
                pass
        else:
            await stub(iter([]) if method.name == "Publish" else request)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_every_method_has_a_rule_and_every_rule_a_method() -> None:
    assert set(RULES) == method_names(SERVICES)


async def test_every_method_admits_exactly_whom_it_is_for(world: World) -> None:
    cast = await Cast.of(world)
    wrong = []
    for service in SERVICES:
        for method in service.methods:
            if method.name == "RotateNodeKey":
                continue  # an admitted call would end the node's key for all that follow; see below
            for identity, secret in cast.secrets.items():
                for listener, client in (("callers", world.caller(secret)), ("operators", world.on_operators(secret))):
                    code = await call(client, method)
                    expected = expected_codes(listener, identity, service.name, method.name)
                    if code not in expected:
                        wrong.append((service.name, method.name, listener, identity, code.name))
    assert wrong == []


async def test_only_nodes_rotate_node_keys(world: World) -> None:
    cast = await Cast.of(world)
    method = nodes_pb2.DESCRIPTOR.services_by_name["NodeService"].methods_by_name["RotateNodeKey"]
    codes = {identity: await call(world.caller(secret), method) for identity, secret in cast.secrets.items()}
    assert {identity for identity, code in codes.items() if code == grpc.StatusCode.OK} == {"node"}


def expected_codes(listener: str, identity: str, service: str, method: str) -> set[grpc.StatusCode]:
    if listener == "operators" and service in ("CatalogService", "PlacementService", "SignatureService"):
        return {grpc.StatusCode.UNIMPLEMENTED}
    if identity in NOBODY:
        return {grpc.StatusCode.UNAUTHENTICATED}
    if method in ADMITTED.get((listener, identity), set()):
        return {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    return {grpc.StatusCode.PERMISSION_DENIED}
