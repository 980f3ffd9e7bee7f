"""Asynchronous client of the control plane for an organisation's key."""

from __future__ import annotations

from veneer.connection import identified, typed
from veneer.controlplane.v1 import tenants_pb2
from veneer.organization_calls import OrganizationCalls


class OrganizationClient(OrganizationCalls):
    """What an organisation's key can do, at the callers' listener of the control plane. Owned by one event loop.

    Calls about tenants' keys, usage and writes name the tenant; `audit` without one is about the organisation itself.
    """

    async def create_tenant(
        self,
        name: str,
        *,
        fallback: tenants_pb2.FallbackPolicy.ValueType = tenants_pb2.FALLBACK_POLICY_ALLOWED,
        default_fallback: tenants_pb2.DefaultFallback.ValueType = tenants_pb2.DEFAULT_FALLBACK_NONE,
        request_id: str = "",
    ) -> tenants_pb2.Tenant:
        """Creates a tenant, whose name begins with the organisation's and two hyphens."""
        tenant = tenants_pb2.Tenant(name=name, fallback=fallback, default_fallback=default_fallback)
        request = tenants_pb2.CreateTenantRequest(tenant=tenant, request_id=identified(request_id))
        response = await self._ask(self._tenants.CreateTenant, request)
        return typed(tenants_pb2.Tenant, response.tenant)
