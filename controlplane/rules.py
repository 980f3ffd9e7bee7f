"""Who may call which method of the control plane. A method that is not here is served to nobody: the start fails."""

from __future__ import annotations

from veneer.access import Rule, Rules

_OPERATOR = Rule.of("operator")
_NODE = Rule.of("node")
_TENANT = Rule.of("tenant")
_FALLBACK = Rule.of("tenant", "operator", roles=["owner"])
_KEYS = Rule.of("tenant", "organization", "operator", roles=["owner"])
_AUDIT = Rule.of("tenant", "organization", "operator", roles=["owner", "auditor"])
_ORGANIZATION = Rule.of("organization", "operator", roles=["owner"])
_ORGANIZATION_AUDIT = Rule.of("organization", "operator", roles=["owner", "auditor"])
_PUBLISH = Rule.of("tenant", roles=["owner", "publisher"])


def _service(name: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    return {f"/veneer.controlplane.v1.{name}/{method}": rule for method, rule in rules.items()}


RULES: Rules = {
    **_service("BaseService", {"RegisterBase": _OPERATOR, "ListBases": Rule.of("tenant", "operator", "node")}),
    **_service(
        "TenantService",
        {
            "CreateTenant": _ORGANIZATION,
            "ListTenants": _ORGANIZATION_AUDIT,
            "SetTenantLimits": _OPERATOR,
            "SetTenantQuotas": _OPERATOR,
            "SetFallback": _FALLBACK,
            "CreateKey": _KEYS,
            "RotateKey": _KEYS,
            "ListKeys": _AUDIT,
            "RevokeKey": _KEYS,
            "CreateGrant": _PUBLISH,
            "ListGrants": _TENANT,
            "RevokeGrant": _PUBLISH,
            "ListAudit": _AUDIT,
            "ListUsage": _AUDIT,
        },
    ),
    **_service(
        "OrganizationService",
        {
            "CreateOrganization": _OPERATOR,
            "ListOrganizations": _OPERATOR,
            "GetOrganization": _ORGANIZATION_AUDIT,
            "SetOrganizationQuotas": _OPERATOR,
            "AdoptTenant": _OPERATOR,
            "CreateOrganizationKey": _ORGANIZATION,
            "RotateOrganizationKey": _ORGANIZATION,
            "ListOrganizationKeys": _ORGANIZATION_AUDIT,
            "RevokeOrganizationKey": _ORGANIZATION,
        },
    ),
    **_service(
        "CatalogService",
        {
            "Publish": _PUBLISH,
            "GetAdapter": _TENANT,
            "ListAdapters": _TENANT,
            "ListVersions": _TENANT,
            "SetAlias": Rule.of("tenant", roles=["publisher"]),
            "Rollback": Rule.of("tenant", roles=["publisher"]),
            "Promote": Rule.of("tenant", roles=["publisher"]),
            "FreezeAlias": _PUBLISH,
            "StartCanary": Rule.of("tenant", roles=["publisher"]),
            "GetCanary": _TENANT,
            "StopCanary": Rule.of("tenant", roles=["publisher"]),
            "RetireVersion": _PUBLISH,
            "DeleteVersion": _PUBLISH,
            "DeleteAdapter": Rule.of("tenant", roles=["owner"]),
        },
    ),
    **_service(
        "SignatureService",
        {
            "AddTrustedKey": Rule.of("tenant", roles=["owner"]),
            "ListTrustedKeys": _TENANT,
            "RemoveTrustedKey": Rule.of("tenant", roles=["owner"]),
            "SetSignaturePolicy": Rule.of("tenant", roles=["owner"]),
            "AttachSignature": _PUBLISH,
        },
    ),
    **_service("PlacementService", {"LocateAdapter": Rule.of("tenant", roles=["caller"])}),
    **_service(
        "NodeService",
        {
            "CreateEnrollmentToken": _OPERATOR,
            "EnrollNode": Rule.of("enrollment"),
            "RotateNodeKey": _NODE,
            "ListNodes": _OPERATOR,
            "RevokeNode": _OPERATOR,
            "Resolve": _NODE,
            "Introspect": _NODE,
            "GrantBlobs": _NODE,
            "ReadBlob": _NODE,
            "ListChanges": _NODE,
            "ReportVersion": _NODE,
            "LeaseQuotas": _NODE,
            "ReportOutcomes": _NODE,
            "ReportUsage": _NODE,
            "TakeProbe": _NODE,
            "ReportProbe": _NODE,
        },
    ),
}
