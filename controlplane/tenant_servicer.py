"""TenantService: proto in, use case, proto out."""

from __future__ import annotations

from datetime import UTC, timedelta
from typing import Any

import grpc

from controlplane.audit import Audit
from controlplane.grants import Sharing
from controlplane.tenants import Tenants
from controlplane.usage import UsageLedger
from controlplane.wire import (
    audit_message,
    fallback_policy,
    grant_message,
    key_message,
    limits_of,
    quotas_of,
    role_name,
    tenant_message,
    usage_message,
)
from veneer.access import current_identity
from veneer.controlplane.v1 import tenants_pb2, tenants_pb2_grpc
from veneer.errors import InvalidArgumentError, NotFoundError, Violation

_Context = grpc.aio.ServicerContext[Any, Any]
_MAX_LIFETIME = timedelta(days=3650)
_OVERLAP = timedelta(days=1)


class TenantServicer(tenants_pb2_grpc.TenantServiceServicer):
    """Serves tenants, keys and grants. Tenants act for themselves only; operators name the tenant whose keys they manage."""

    def __init__(self, tenants: Tenants, sharing: Sharing, audit: Audit, usage: UsageLedger) -> None:
        self._tenants = tenants
        self._sharing = sharing
        self._audit = audit
        self._usage = usage

    async def CreateTenant(self, request: tenants_pb2.CreateTenantRequest, context: _Context) -> tenants_pb2.CreateTenantResponse:
        """See the API."""
        wanted = request.tenant
        fallback = fallback_policy(wanted.fallback, wanted.default_fallback)
        tenant = await self._tenants.create(
            wanted.name,
            fallback=fallback,
            weight=wanted.weight or 1,
            limits=limits_of(wanted.limits),
            quotas=quotas_of(wanted.quotas),
            request_id=request.request_id,
        )
        return tenants_pb2.CreateTenantResponse(tenant=tenant_message(tenant))

    async def ListTenants(self, request: tenants_pb2.ListTenantsRequest, context: _Context) -> tenants_pb2.ListTenantsResponse:
        """See the API."""
        tenants, token = await self._tenants.page(page_size=request.page_size, token=request.page_token)
        return tenants_pb2.ListTenantsResponse(tenants=map(tenant_message, tenants), next_page_token=token)

    async def SetTenantLimits(
        self, request: tenants_pb2.SetTenantLimitsRequest, context: _Context
    ) -> tenants_pb2.SetTenantLimitsResponse:
        """See the API."""
        tenant = await self._tenants.set_limits(request.tenant, limits_of(request.limits), request_id=request.request_id)
        return tenants_pb2.SetTenantLimitsResponse(tenant=tenant_message(tenant))

    async def SetTenantQuotas(
        self, request: tenants_pb2.SetTenantQuotasRequest, context: _Context
    ) -> tenants_pb2.SetTenantQuotasResponse:
        """See the API."""
        tenant = await self._tenants.set_quotas(request.tenant, quotas_of(request.quotas), request_id=request.request_id)
        return tenants_pb2.SetTenantQuotasResponse(tenant=tenant_message(tenant))

    async def SetFallback(self, request: tenants_pb2.SetFallbackRequest, context: _Context) -> tenants_pb2.SetFallbackResponse:
        """See the API."""
        fallback = fallback_policy(request.fallback, request.default_fallback)
        tenant = await self._tenants.set_fallback(_tenant_of(request.tenant), fallback, request_id=request.request_id)
        return tenants_pb2.SetFallbackResponse(tenant=tenant_message(tenant))

    async def CreateKey(self, request: tenants_pb2.CreateKeyRequest, context: _Context) -> tenants_pb2.CreateKeyResponse:
        """See the API."""
        tenant = _tenant_of(request.tenant)
        roles = [role_name(role) for role in request.roles]
        made = await self._tenants.create_key(
            tenant, roles, label=request.label, lifetime=_lifetime(request), request_id=request.request_id
        )
        return tenants_pb2.CreateKeyResponse(key=key_message(made.key), secret=made.secret)

    async def RotateKey(self, request: tenants_pb2.RotateKeyRequest, context: _Context) -> tenants_pb2.RotateKeyResponse:
        """See the API."""
        overlap = request.overlap.ToTimedelta() if request.HasField("overlap") else _OVERLAP
        made = await self._tenants.rotate_key(
            _tenant_of(request.tenant), request.id, overlap=overlap, lifetime=_lifetime(request), request_id=request.request_id
        )
        assert made.previous is not None
        return tenants_pb2.RotateKeyResponse(key=key_message(made.key), secret=made.secret, previous=key_message(made.previous))

    async def ListKeys(self, request: tenants_pb2.ListKeysRequest, context: _Context) -> tenants_pb2.ListKeysResponse:
        """See the API."""
        tenant = _tenant_of(request.tenant)
        keys, token = await self._tenants.list_keys(tenant, page_size=request.page_size, token=request.page_token)
        return tenants_pb2.ListKeysResponse(keys=map(key_message, keys), next_page_token=token)

    async def RevokeKey(self, request: tenants_pb2.RevokeKeyRequest, context: _Context) -> tenants_pb2.RevokeKeyResponse:
        """See the API."""
        key = await self._tenants.revoke_key(_tenant_of(request.tenant), request.id, request_id=request.request_id)
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
        )
        return tenants_pb2.ListUsageResponse(usage=map(usage_message, used), next_page_token=token)

    async def ListAudit(self, request: tenants_pb2.ListAuditRequest, context: _Context) -> tenants_pb2.ListAuditResponse:
        """See the API."""
        is_operator = current_identity().kind == "operator"
        tenant = request.tenant if is_operator else _tenant_of(request.tenant)
        entries, token = await self._audit.page(tenant, page_size=request.page_size, token=request.page_token)
        return tenants_pb2.ListAuditResponse(entries=map(audit_message, entries), next_page_token=token)


def _tenant_of(named: str) -> str:
    """The tenant whose keys a call is about: a tenant's own, or the one that an operator names."""
    identity = current_identity()
    if identity.kind == "tenant":
        if named not in ("", identity.tenant):
            raise NotFoundError("there is no such tenant")  # as if it did not exist: whether it does is not theirs to know
        return identity.tenant
    if not named:
        raise InvalidArgumentError.of([Violation("tenant", "operators must name the tenant")])
    return named


def _lifetime(request: tenants_pb2.CreateKeyRequest | tenants_pb2.RotateKeyRequest) -> timedelta | None:
    if not request.HasField("lifetime"):
        return None
    duration = request.lifetime
    # Seconds are compared first: a Duration may hold more than a timedelta can.
    if duration.seconds > _MAX_LIFETIME.total_seconds():
        raise InvalidArgumentError.of([Violation("lifetime", f"must be at most {_MAX_LIFETIME.days} days")])
    return duration.ToTimedelta()
