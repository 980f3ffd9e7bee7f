"""Who may call what, as a table: a row for every method that either plane serves, a cell for every kind of caller.

Requests speak of objects of the tenant `acme`, so a cell of the other tenant shows what a stranger learns of them.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from tests.e2e.driving import greedy
from tests.fixtures.adapters import AdapterFiles
from veneer.artifact import BaseDescription
from veneer.controlplane.v1 import (
    bases_pb2,
    canaries_pb2,
    catalog_pb2,
    nodes_pb2,
    organizations_pb2,
    placement_pb2,
    signatures_pb2,
    tenants_pb2,
)
from veneer.dataplane.v1 import admin_pb2
from veneer.dataplane.v1 import generation_pb2 as pb

OK, NF, PD, UA, IA = "OK", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT"


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
        organization: An organisation, with a key among the credentials, and a tenant that is not `acme`.
        organization_tenant: That tenant.
        organization_key_id: A key of it to rotate and revoke.
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
    organization: str
    organization_tenant: str
    organization_key_id: str


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


def _usage(scene: Scene) -> Message:
    entry = nodes_pb2.UsageEntry(tenant="acme", requests=1, hour=Timestamp(seconds=3600))
    return nodes_pb2.ReportUsageRequest(journal="0" * 32, first_sequence=1, last_sequence=1, entries=[entry])


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
    organization: str = PD


TABLE = {
    "veneer.controlplane.v1.BaseService": {
        "RegisterBase": Row(lambda s: bases_pb2.RegisterBaseRequest(base=_base(s)), PD, PD, PD, PD, OK),
        "ListBases": Row(lambda s: bases_pb2.ListBasesRequest(), OK, OK, OK, OK, OK),
    },
    "veneer.controlplane.v1.TenantService": {
        "CreateTenant": Row(
            lambda s: tenants_pb2.CreateTenantRequest(tenant=tenants_pb2.Tenant(name=f"t-{uuid.uuid4().hex[:8]}")),
            *(PD, PD, PD, PD, OK, IA),  # an organisation may not choose such a name
        ),
        "SetTenantLimits": Row(lambda s: tenants_pb2.SetTenantLimitsRequest(tenant="strict"), PD, PD, PD, PD, OK),
        "SetTenantQuotas": Row(lambda s: tenants_pb2.SetTenantQuotasRequest(tenant="strict"), PD, PD, PD, PD, OK),
        "SetFallback": Row(lambda s: tenants_pb2.SetFallbackRequest(tenant="acme"), OK, PD, NF, PD, OK),
        "ListTenants": Row(lambda s: tenants_pb2.ListTenantsRequest(), PD, PD, PD, PD, OK, OK),
        "CreateKey": Row(
            lambda s: tenants_pb2.CreateKeyRequest(tenant="acme", roles=[tenants_pb2.ROLE_CALLER]), OK, PD, NF, PD, OK, NF
        ),
        "RotateKey": Row(
            lambda s: tenants_pb2.RotateKeyRequest(tenant="acme", id=s.key_id, request_id=s.key_id), OK, PD, NF, PD, OK, NF
        ),
        "ListKeys": Row(lambda s: tenants_pb2.ListKeysRequest(tenant="acme"), OK, PD, NF, PD, OK, NF),
        "RevokeKey": Row(lambda s: tenants_pb2.RevokeKeyRequest(tenant="acme", id=s.key_id), OK, PD, NF, PD, OK, NF),
        "CreateGrant": Row(lambda s: tenants_pb2.CreateGrantRequest(adapter="tone", grantee="strict"), OK, PD, NF, PD, PD),
        "ListGrants": Row(lambda s: tenants_pb2.ListGrantsRequest(), OK, OK, OK, PD, PD),
        "RevokeGrant": Row(lambda s: tenants_pb2.RevokeGrantRequest(adapter="tone", grantee="strict"), OK, PD, NF, PD, PD),
        "ListAudit": Row(lambda s: tenants_pb2.ListAuditRequest(tenant="acme"), OK, PD, NF, PD, OK, NF),
        "ListUsage": Row(lambda s: tenants_pb2.ListUsageRequest(tenant="acme"), OK, PD, NF, PD, OK, NF),
    },
    "veneer.controlplane.v1.OrganizationService": {
        "CreateOrganization": Row(
            lambda s: organizations_pb2.CreateOrganizationRequest(
                organization=organizations_pb2.Organization(name=f"o-{uuid.uuid4().hex[:8]}")
            ),
            *(PD, PD, PD, PD, OK),
        ),
        "ListOrganizations": Row(lambda s: organizations_pb2.ListOrganizationsRequest(), PD, PD, PD, PD, OK),
        "GetOrganization": Row(
            lambda s: organizations_pb2.GetOrganizationRequest(organization=s.organization), PD, PD, PD, PD, OK, OK
        ),
        "SetOrganizationQuotas": Row(
            lambda s: organizations_pb2.SetOrganizationQuotasRequest(organization=s.organization), PD, PD, PD, PD, OK
        ),
        "AdoptTenant": Row(  # which it has, so that nothing changes
            lambda s: organizations_pb2.AdoptTenantRequest(organization=s.organization, tenant=s.organization_tenant),
            *(PD, PD, PD, PD, OK),
        ),
        "CreateOrganizationKey": Row(
            lambda s: organizations_pb2.CreateOrganizationKeyRequest(
                organization=s.organization, roles=[tenants_pb2.ROLE_AUDITOR]
            ),
            *(PD, PD, PD, PD, OK, OK),
        ),
        "RotateOrganizationKey": Row(
            lambda s: organizations_pb2.RotateOrganizationKeyRequest(
                organization=s.organization, id=s.organization_key_id, request_id=s.organization_key_id
            ),
            *(PD, PD, PD, PD, OK, OK),
        ),
        "ListOrganizationKeys": Row(
            lambda s: organizations_pb2.ListOrganizationKeysRequest(organization=s.organization), PD, PD, PD, PD, OK, OK
        ),
        "RevokeOrganizationKey": Row(
            lambda s: organizations_pb2.RevokeOrganizationKeyRequest(organization=s.organization, id=s.organization_key_id),
            *(PD, PD, PD, PD, OK, OK),
        ),
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
        "Promote": Row(lambda s: catalog_pb2.PromoteRequest(adapter="tone", version=s.current, dry_run=True), OK, PD, NF, PD, PD),
        "FreezeAlias": Row(lambda s: catalog_pb2.FreezeAliasRequest(adapter="tone"), OK, PD, NF, PD, PD),
        "StartCanary": Row(
            lambda s: canaries_pb2.StartCanaryRequest(
                adapter="tone", version=s.spare, steps=[canaries_pb2.CanaryStep(weight_percent=1)], dry_run=True
            ),
            *(OK, PD, NF, PD, PD),
        ),
        "GetCanary": Row(lambda s: canaries_pb2.GetCanaryRequest(adapter="tone", alias="tried"), OK, OK, NF, PD, PD),
        "StopCanary": Row(
            lambda s: canaries_pb2.StopCanaryRequest(adapter="tone", alias="tried", dry_run=True), OK, PD, NF, PD, PD
        ),
        "DeleteVersion": Row(
            lambda s: catalog_pb2.DeleteVersionRequest(adapter="tone", version=s.spare, dry_run=True), OK, PD, NF, PD, PD
        ),
        "DeleteAdapter": Row(
            lambda s: catalog_pb2.DeleteAdapterRequest(adapter="tone", force=True, dry_run=True), OK, PD, NF, PD, PD
        ),
        "RetireVersion": Row(lambda s: catalog_pb2.RetireVersionRequest(adapter="tone", version=s.spare), OK, PD, NF, PD, PD),
    },
    "veneer.controlplane.v1.SignatureService": {
        "AddTrustedKey": Row(lambda s: signatures_pb2.AddTrustedKeyRequest(name="k", pem=b"k"), IA, PD, IA, PD, PD),  # no key
        "ListTrustedKeys": Row(lambda s: signatures_pb2.ListTrustedKeysRequest(), OK, OK, OK, PD, PD),  # of one's own tenant
        "RemoveTrustedKey": Row(lambda s: signatures_pb2.RemoveTrustedKeyRequest(id="0" * 64), NF, PD, NF, PD, PD),
        "SetSignaturePolicy": Row(
            lambda s: signatures_pb2.SetSignaturePolicyRequest(policy=signatures_pb2.SIGNATURE_POLICY_OFF), OK, PD, OK, PD, PD
        ),
        "AttachSignature": Row(  # no signature
            lambda s: signatures_pb2.AttachSignatureRequest(adapter="tone", version=s.current, signature=b"s"), IA, PD, NF, PD, PD
        ),
    },
    "veneer.controlplane.v1.PlacementService": {
        "LocateAdapter": Row(lambda s: placement_pb2.LocateAdapterRequest(adapter="tone", owner="acme"), OK, OK, NF, PD, PD),
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
        "ReportUsage": Row(_usage, PD, PD, PD, PD, PD),  # let in, and without a ticket for the tenant
        "LeaseQuotas": Row(  # let in, and without a ticket for the tenant
            lambda s: nodes_pb2.LeaseQuotasRequest(demands=[nodes_pb2.QuotaDemand(tenant="acme")]), PD, PD, PD, PD, PD
        ),
        "ReportOutcomes": Row(
            lambda s: nodes_pb2.ReportOutcomesRequest(
                epoch=str(uuid.uuid4()),
                sequence=1,
                outcomes=[
                    nodes_pb2.ArmOutcomes(owner="acme", adapter="tone", alias="tried", generation=2, version=s.spare, ok=1)
                ],
            ),
            *(PD, PD, PD, OK, PD),
        ),
        "TakeProbe": Row(lambda s: nodes_pb2.TakeProbeRequest(version=s.spare), PD, PD, PD, NF, PD),  # there is none
        "ReportProbe": Row(
            lambda s: nodes_pb2.ReportProbeRequest(version=s.spare, measures=nodes_pb2.ProbeMeasures()), PD, PD, PD, NF, PD
        ),
    },
    "veneer.dataplane.v1.GenerationService": {
        "Generate": Row(
            lambda s: pb.GenerateRequest(adapter=pb.AdapterRef(adapter="tone", owner="acme"), text="hello", sampling=greedy(2)),
            *(OK, OK, NF, UA, UA, UA),  # whose key it is the control plane says, and it knows tenants only
        ),
    },
    "veneer.dataplane.v1.AdminService": {
        "GetResidency": Row(lambda s: admin_pb2.GetResidencyRequest(), PD, PD, PD, PD, OK),
        "WatchResidency": Row(lambda s: admin_pb2.WatchResidencyRequest(), PD, PD, PD, PD, OK),
        "UnloadVersion": Row(lambda s: admin_pb2.UnloadVersionRequest(version="0" * 64), PD, PD, PD, PD, OK),
        "PinVersion": Row(lambda s: admin_pb2.PinVersionRequest(version=s.spare), PD, PD, PD, PD, IA),  # for no time
        "UnpinVersion": Row(lambda s: admin_pb2.UnpinVersionRequest(version=s.spare), PD, PD, PD, PD, OK),
        "ListPins": Row(lambda s: admin_pb2.ListPinsRequest(), PD, PD, PD, PD, OK),
        # A grace that no drain can have: whoever is let in hears of it, and the node goes on.
        "Drain": Row(lambda s: admin_pb2.DrainRequest(grace=Duration(seconds=-1)), PD, PD, PD, PD, IA),
    },
}
"""By service and method."""

WHO = ("owner", "caller", "other", "no key", "revoked key", "node", "operator", "organization")


@dataclass(frozen=True, slots=True)
class Listener:
    """A listener, and what it serves by its own account: service → methods."""

    plane: str
    name: str
    address: str
    services: Mapping[str, frozenset[str]]


def without_row(services: Mapping[str, Collection[str]]) -> set[str]:
    """Methods that `TABLE` does not speak of."""
    return {f"{name}/{method}" for name, methods in services.items() for method in methods if method not in TABLE.get(name, {})}


def expected(listener: Listener, service: str, method: str, who: str) -> str:
    """The status of one cell."""
    if service not in listener.services:
        return "UNIMPLEMENTED"
    if who in ("no key", "revoked key"):
        return UA
    if who == "organization" and listener.plane == "dataplane":
        return UA  # data planes know no organisations
    home = "operators" if who == "operator" else "callers"
    row = TABLE[service][method]
    if listener.name == home or method == "Generate":
        return str(getattr(row, who))
    return PD
