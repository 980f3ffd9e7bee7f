"""The error that a violated constraint of the schema means to a caller.

Use cases look before they write, and name the errors of their own races when they open a transaction. This table answers for the
rest: every constraint and unique index is in it (`tests/controlplane/test_constraints.py` walks the catalogue of a migrated
database), so that the name of none reaches a caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from veneer.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    VeneerError,
    Violation,
)

NEUTRAL: Final = InternalError("internal error")
"""Of a constraint that only a fault of the control plane itself can violate: the caller learns no more, the log does."""

_TENANT_NAME: Final = "must be 1 to 63 of lower-case letters, digits and inner hyphens"
_ENDS: Final = "of lower-case letters, digits, '.', '_' and hyphens that begins and ends with a letter or digit"
_ADAPTER_NAME: Final = f"must be 1 to 100 {_ENDS}"
_ALIAS_NAME: Final = f"must be 1 to 63 {_ENDS}"
_ORGANIZATION_NAME: Final = "must be 1 to 30 of lower-case letters, digits and single inner hyphens"
_NUMBERS: Final = "must be 0 or more"


def _invalid(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError.of([Violation(field, description)])


_NO_TENANT = NotFoundError("there is no such tenant")
_NO_ORGANIZATION = NotFoundError("there is no such organisation")
_NO_ADAPTER = NotFoundError("there is no such adapter")
_NO_VERSION = NotFoundError("there is no such version")
_NO_NODE = NotFoundError("there is no such node")
_NO_BASE = FailedPreconditionError("the base is not registered")
_PUBLISHED = AlreadyExistsError("this content was published already")
_RACED = AbortedError("another change came first; try again", retry_after_s=0.1)
_IN_USE = AbortedError("the same request_id is in use by another call right now; try again", retry_after_s=0.5)

CONSTRAINTS: Final[Mapping[str, VeneerError]] = {
    # adapters
    "ck_adapters_name": _invalid("adapter", _ADAPTER_NAME),
    "fk_adapters_tenant_tenants": _NO_TENANT,
    "pk_adapters": _RACED,
    # aliases
    "ck_aliases_generation": NEUTRAL,
    "ck_aliases_name": _invalid("alias", _ALIAS_NAME),
    "fk_aliases_tenant_adapter_adapters": _NO_ADAPTER,
    "pk_aliases": _RACED,
    # arms
    "ck_arms_weight": _invalid("arms.weight", "must be 1 to 10000"),
    "fk_arms_tenant_adapter_alias_aliases": NEUTRAL,
    "fk_arms_tenant_adapter_version_versions": _NO_VERSION,
    "pk_arms": NEUTRAL,
    "uq_arms_tenant_adapter_alias_generation_version": _invalid("arms", "name a version twice"),
    # audit
    "ck_audit_action": NEUTRAL,
    "pk_audit": NEUTRAL,
    # bases
    "ck_bases_chat_contents": _invalid("base.chat_contents", "must be one of the values of ChatContents"),
    "ck_bases_digest": _invalid("base.digest", "must be 64 lower-case hex digits"),
    "pk_bases": AlreadyExistsError("a base with this digest is registered already"),
    "uq_bases_name": AlreadyExistsError("another base has this name"),
    # blob_leases
    "pk_blob_leases": NEUTRAL,
    # canaries, canary_steps
    "ck_canaries_end_time": NEUTRAL,
    "ck_canaries_state": NEUTRAL,
    "fk_canaries_tenant_adapter_alias_aliases": _NO_ADAPTER,
    "ix_canaries_running": _RACED,
    "pk_canaries": NEUTRAL,
    "fk_canary_steps_tenant_adapter_alias_canary_canaries": NEUTRAL,
    "pk_canary_steps": NEUTRAL,
    # change_floor, changes
    "ck_change_floor_one": NEUTRAL,
    "pk_change_floor": NEUTRAL,
    "pk_changes": NEUTRAL,
    # enrollments
    "pk_enrollments": NEUTRAL,
    "uq_enrollments_hash": NEUTRAL,
    # grants
    "ck_grants_grantee": _invalid("grantee", "is the owner, who needs no grant"),
    "ck_grants_grantee_name": _invalid("grantee", _TENANT_NAME),
    "fk_grants_tenant_adapter_adapters": _NO_ADAPTER,
    "pk_grants": _RACED,
    # keys
    "ck_keys_roles": _invalid("roles", "must be one or more of the roles of a tenant's keys"),
    "fk_keys_tenant_tenants": _NO_TENANT,
    "pk_keys": NEUTRAL,
    "uq_keys_hash": NEUTRAL,
    # leaders
    "pk_leaders": NEUTRAL,
    # node_versions
    "pk_node_versions": NEUTRAL,
    # nodes
    "fk_nodes_base_digest_bases": _NO_BASE,
    "pk_nodes": NEUTRAL,
    "uq_nodes_hash": NEUTRAL,
    "uq_nodes_previous_hash": NEUTRAL,
    # operators
    "pk_operators": NEUTRAL,
    "uq_operators_hash": AlreadyExistsError("this key is an operator's already"),
    "uq_operators_origin": AlreadyExistsError("the operator was made before"),
    # organization_keys, organization_requests, organizations
    "ck_organization_keys_roles": _invalid("roles", "must be one or more of the roles of an organisation's keys"),
    "fk_organization_keys_organization_organizations": _NO_ORGANIZATION,
    "pk_organization_keys": NEUTRAL,
    "uq_organization_keys_hash": NEUTRAL,
    "fk_organization_requests_organization_organizations": _NO_ORGANIZATION,
    "pk_organization_requests": _IN_USE,
    "ck_organizations_name": _invalid("organization.name", _ORGANIZATION_NAME),
    "ck_organizations_quotas": _invalid("quotas", _NUMBERS),
    "pk_organizations": AlreadyExistsError("there is an organisation of this name already"),
    # outbox
    "pk_outbox": NEUTRAL,
    # outcome_batches
    "fk_outcome_batches_node_nodes": _NO_NODE,
    "pk_outcome_batches": _RACED,
    # quota_leases
    "fk_quota_leases_node_nodes": _NO_NODE,
    "fk_quota_leases_tenant_tenants": _NO_TENANT,
    "pk_quota_leases": _RACED,
    # reports
    "ck_reports_fault": _invalid("fault", "must be one of the faults that a node can report"),
    "fk_reports_node_nodes": _NO_NODE,
    "fk_reports_tenant_version_versions": _NO_VERSION,
    "pk_reports": _RACED,
    # requests
    "fk_requests_tenant_tenants": _NO_TENANT,
    "pk_requests": _IN_USE,
    # signature_policies, signatures
    "ck_signature_policies_policy": _invalid("policy", "must be one of the policies"),
    "fk_signature_policies_tenant_tenants": _NO_TENANT,
    "pk_signature_policies": _RACED,
    "fk_signatures_tenant_version_versions": _NO_VERSION,
    "pk_signatures": AlreadyExistsError("the version has this signature already"),
    # tenants
    "ck_tenants_default_allowed": _invalid("default_fallback", "must be allowed by the tenant's own policy"),
    "ck_tenants_default_fallback": _invalid("default_fallback", "must be one of the fallback modes"),
    "ck_tenants_limits": _invalid("limits", _NUMBERS),
    "ck_tenants_name": _invalid("tenant.name", _TENANT_NAME),
    "ck_tenants_previous_allowed": _invalid("fallback", "cannot allow the base and forbid an earlier version"),
    "ck_tenants_quotas": _invalid("quotas", _NUMBERS),
    "ck_tenants_weight": _invalid("tenant.weight", "must be 1 to 1000"),
    "fk_tenants_organization_organizations": _NO_ORGANIZATION,
    "pk_tenants": AlreadyExistsError("there is a tenant of this name already"),
    # trusted_keys
    "ck_trusted_keys_id": NEUTRAL,
    "ck_trusted_keys_kind": NEUTRAL,
    "fk_trusted_keys_tenant_tenants": _NO_TENANT,
    "pk_trusted_keys": AlreadyExistsError("this key is trusted already"),
    "uq_trusted_keys_tenant_name": AlreadyExistsError("there is a trusted key of this name already"),
    # uploads
    "pk_uploads": NEUTRAL,
    # usage, usage_journals
    "fk_usage_tenant_tenants": _NO_TENANT,
    "pk_usage": _RACED,
    "fk_usage_journals_node_nodes": _NO_NODE,
    "pk_usage_journals": _RACED,
    # versions
    "ck_versions_digest": NEUTRAL,
    "ck_versions_retire_time": NEUTRAL,
    "ck_versions_state": NEUTRAL,
    "fk_versions_base_digest_bases": _NO_BASE,
    "fk_versions_tenant_adapter_adapters": _NO_ADAPTER,
    "pk_versions": _PUBLISHED,
    "uq_versions_digest": _PUBLISHED,
    "uq_versions_tenant_adapter_digest": _PUBLISHED,
    "uq_versions_tenant_adapter_number": _RACED,
}
"""By name. Errors are raised as copies of these."""
