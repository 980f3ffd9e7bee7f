"""TenantService: proto in, use case, proto out."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import grpc

from controlplane.audit import Audit
from controlplane.callers import lifetime_of, organization_of, overlap_of
from controlplane.db import OPERATOR, Scope
from controlplane.grants import Sharing
from controlplane.keys import Keys
from controlplane.organizations import NO_ORGANIZATION
from controlplane.tenants import Tenants
from controlplane.usage import UsageLedger
from controlplane.wire import (
    audit_message,
    fallback_policy,
    grant_message,
    key_message,
    limits_of,
    masked,
    quotas_of,
    role_name,
    tenant_message,
    usage_message,
)
from veneer.access import current_identity
from veneer.controlplane.v1 import tenants_pb2, tenants_pb2_grpc
from veneer.errors import InvalidArgumentError, NotFoundError, Violation

_Context = grpc.aio.ServicerContext[Any, Any]


class TenantServicer(tenants_pb2_grpc.TenantServiceServicer):
    """Serves tenants, keys and grants.

    Tenants act for themselves only; operators, and organisations among their own, name the tenant that a call is about.
    """

    def __init__(self, tenants: Tenants, keys: Keys, sharing: Sharing, audit: Audit, usage: UsageLedger) -> None:
        self._tenants = tenants
        self._keys = keys
        self._sharing = sharing
        self._audit = audit
        self._usage = usage

    async def CreateTenant(self, request: tenants_pb2.CreateTenantRequest, context: _Context) -> tenants_pb2.CreateTenantResponse:
        """See the API."""
        wanted = request.tenant
        fallback = fallback_policy(wanted.fallback, wanted.default_fallback)
        organization = current_identity().organization
        if organization:
            _check_order(wanted, organization)
            made = await self._tenants.create_in(organization, wanted.name, fallback=fallback, request_id=request.request_id)
            return tenants_pb2.CreateTenantResponse(tenant=tenant_message(made))
        tenant = await self._tenants.create(
            wanted.name,
            fallback=fallback,
            weight=wanted.weight or 1,
            limits=limits_of(wanted.limits),
            quotas=quotas_of(wanted.quotas),
            organization=wanted.organization,
            request_id=request.request_id,
        )
        return tenants_pb2.CreateTenantResponse(tenant=tenant_message(tenant))

    async def ListTenants(self, request: tenants_pb2.ListTenantsRequest, context: _Context) -> tenants_pb2.ListTenantsResponse:
        """See the API."""
        organization, scope = organization_of(request.organization), _scope()
        tenants, token = await self._tenants.page(
            page_size=request.page_size, token=request.page_token, organization=organization, scope=scope or OPERATOR
        )
        return tenants_pb2.ListTenantsResponse(tenants=map(tenant_message, tenants), next_page_token=token)

    async def SetTenantLimits(
        self, request: tenants_pb2.SetTenantLimitsRequest, context: _Context
    ) -> tenants_pb2.SetTenantLimitsResponse:
        """See the API."""
        numbers = masked(request.update_mask, limits=limits_of(request.limits))["limits"]
        tenant = await self._tenants.set_limits(request.tenant, numbers, request_id=request.request_id)
        return tenants_pb2.SetTenantLimitsResponse(tenant=tenant_message(tenant))

    async def SetTenantQuotas(
        self, request: tenants_pb2.SetTenantQuotasRequest, context: _Context
    ) -> tenants_pb2.SetTenantQuotasResponse:
        """See the API."""
        numbers = masked(request.update_mask, quotas=quotas_of(request.quotas))["quotas"]
        tenant = await self._tenants.set_quotas(request.tenant, numbers, request_id=request.request_id)
        return tenants_pb2.SetTenantQuotasResponse(tenant=tenant_message(tenant))

    async def SetFallback(self, request: tenants_pb2.SetFallbackRequest, context: _Context) -> tenants_pb2.SetFallbackResponse:
        """See the API."""
        fallback = fallback_policy(request.fallback, request.default_fallback)
        named = set(request.update_mask.paths or ("fallback", "default_fallback"))
        tenant = await self._tenants.set_fallback(
            _tenant_of(request.tenant),
            fallback,
            keeps_policy="fallback" not in named,
            keeps_default="default_fallback" not in named,
            request_id=request.request_id,
        )
        return tenants_pb2.SetFallbackResponse(tenant=tenant_message(tenant))

    async def CreateKey(self, request: tenants_pb2.CreateKeyRequest, context: _Context) -> tenants_pb2.CreateKeyResponse:
        """See the API."""
        tenant = _tenant_of(request.tenant)
        roles = [role_name(role) for role in request.roles]
        made = await self._keys.create(
            tenant, roles, label=request.label, lifetime=lifetime_of(request), scope=_scope(), request_id=request.request_id
        )
        return tenants_pb2.CreateKeyResponse(key=key_message(made.key), secret=made.secret)

    async def RotateKey(self, request: tenants_pb2.RotateKeyRequest, context: _Context) -> tenants_pb2.RotateKeyResponse:
        """See the API."""
        made = await self._keys.rotate(
            _tenant_of(request.tenant),
            request.id,
            overlap=overlap_of(request),
            lifetime=lifetime_of(request),
            scope=_scope(),
            request_id=request.request_id,
        )
        assert made.previous is not None
        return tenants_pb2.RotateKeyResponse(key=key_message(made.key), secret=made.secret, previous=key_message(made.previous))

    async def ListKeys(self, request: tenants_pb2.ListKeysRequest, context: _Context) -> tenants_pb2.ListKeysResponse:
        """See the API."""
        tenant = _tenant_of(request.tenant)
        keys, token = await self._keys.page(tenant, page_size=request.page_size, token=request.page_token, scope=_scope())
        return tenants_pb2.ListKeysResponse(keys=map(key_message, keys), next_page_token=token)

    async def RevokeKey(self, request: tenants_pb2.RevokeKeyRequest, context: _Context) -> tenants_pb2.RevokeKeyResponse:
        """See the API."""
        key = await self._keys.revoke(_tenant_of(request.tenant), request.id, scope=_scope(), request_id=request.request_id)
        return tenants_pb2.RevokeKeyResponse(key=key_message(key))

    async def CreateGrant(self, request: tenants_pb2.CreateGrantRequest, context: _Context) -> tenants_pb2.CreateGrantResponse:
        """See the API."""
        grant = await self._sharing.create(
            current_identity().tenant, request.adapter, grantee=request.grantee, request_id=request.request_id
        )
        return tenants_pb2.CreateGrantResponse(grant=grant_message(grant))

    async def ListGrants(self, request: tenants_pb2.ListGrantsRequest, context: _Context) -> tenants_pb2.ListGrantsResponse:
        """See the API."""
        grants = await self._sharing.page(current_identity().tenant, page_size=request.page_size, token=request.page_token)
        return tenants_pb2.ListGrantsResponse(
            given=map(grant_message, grants.given),
            received=map(grant_message, grants.received),
            next_page_token=grants.next_token,
        )

    async def RevokeGrant(self, request: tenants_pb2.RevokeGrantRequest, context: _Context) -> tenants_pb2.RevokeGrantResponse:
        """See the API."""
        await self._sharing.revoke(
            current_identity().tenant, request.adapter, grantee=request.grantee, request_id=request.request_id
        )
        return tenants_pb2.RevokeGrantResponse()

    async def ListUsage(self, request: tenants_pb2.ListUsageRequest, context: _Context) -> tenants_pb2.ListUsageResponse:
        """See the API."""
        used, token = await self._usage.page(
            _tenant_of(request.tenant),
            "hour" if request.period == tenants_pb2.USAGE_PERIOD_HOUR else "day",
            start=request.start_time.ToDatetime(UTC) if request.HasField("start_time") else None,
            page_size=request.page_size,
            token=request.page_token,
            scope=_scope(),
        )
        return tenants_pb2.ListUsageResponse(usage=map(usage_message, used), next_page_token=token)

    async def ListAudit(self, request: tenants_pb2.ListAuditRequest, context: _Context) -> tenants_pb2.ListAuditResponse:
        """See the API."""
        identity = current_identity()
        tenant = _tenant_of(request.tenant) if identity.kind == "tenant" else request.tenant
        entries, token = await self._audit.page(
            tenant, page_size=request.page_size, token=request.page_token, organization=identity.organization
        )
        return tenants_pb2.ListAuditResponse(entries=map(audit_message, entries), next_page_token=token)


def _tenant_of(named: str) -> str:
    """The tenant that a call is about: a tenant's own, or the one that an operator or organisation names."""
    identity = current_identity()
    if identity.kind == "tenant":
        if named not in ("", identity.tenant):
            raise NotFoundError("there is no such tenant")  # as if it did not exist: whether it does is not theirs to know
        return identity.tenant
    if not named:
        raise InvalidArgumentError.of([Violation("tenant", "operators and organisations must name the tenant")])
    return named


def _scope() -> Scope | None:
    """On whose behalf a call acts on a tenant's rows: None for the tenant itself, and for operators, who may act as any."""
    organization = current_identity().organization
    return Scope.of_organization(organization) if organization else None


def _check_order(wanted: tenants_pb2.Tenant, organization: str) -> None:
    """Refuses what an organisation asks for its tenant that is not its to say."""
    if wanted.organization not in ("", organization):
        raise NotFoundError(NO_ORGANIZATION)
    asked = {"weight": wanted.weight > 1, "limits": bool(wanted.limits.ByteSize()), "quotas": bool(wanted.quotas.ByteSize())}
    faults = [Violation(f"tenant.{name}", "is for operators to set") for name, is_asked in asked.items() if is_asked]
    if faults:
        raise InvalidArgumentError.of(faults)
