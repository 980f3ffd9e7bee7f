"""OrganizationService: proto in, use case, proto out."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc

from controlplane.callers import lifetime_of, organization_of, overlap_of
from controlplane.keys import Keys
from controlplane.limits import OrganizationQuotas
from controlplane.organizations import Organization, Organizations
from controlplane.tenants import Tenants
from controlplane.wire import (
    key_message,
    limits_message,
    limits_of,
    masked,
    quotas_message,
    quotas_of,
    role_name,
    tenant_message,
    timestamp,
)
from veneer.controlplane.v1 import organizations_pb2 as pb
from veneer.controlplane.v1 import organizations_pb2_grpc
from veneer.errors import InvalidArgumentError, Violation

_Context = grpc.aio.ServicerContext[Any, Any]


class OrganizationServicer(organizations_pb2_grpc.OrganizationServiceServicer):
    """Serves organisations and their keys. An organisation acts for itself only; operators name the one that a call is about."""

    def __init__(self, organizations: Organizations, keys: Keys, tenants: Tenants) -> None:
        self._organizations = organizations
        self._keys = keys
        self._tenants = tenants

    async def CreateOrganization(self, request: pb.CreateOrganizationRequest, context: _Context) -> pb.CreateOrganizationResponse:
        """See the API."""
        wanted = request.organization
        made = await self._organizations.create(
            wanted.name,
            quotas=_quotas_of(wanted.quotas),
            tenant_limits=limits_of(wanted.tenant_limits),
            tenant_quotas=quotas_of(wanted.tenant_quotas),
            request_id=request.request_id,
        )
        return pb.CreateOrganizationResponse(organization=_message(made))

    async def ListOrganizations(self, request: pb.ListOrganizationsRequest, context: _Context) -> pb.ListOrganizationsResponse:
        """See the API."""
        found, token = await self._organizations.page(page_size=request.page_size, token=request.page_token)
        return pb.ListOrganizationsResponse(organizations=map(_message, found), next_page_token=token)

    async def GetOrganization(self, request: pb.GetOrganizationRequest, context: _Context) -> pb.GetOrganizationResponse:
        """See the API."""
        found, use = await self._organizations.get(_named(request.organization))
        return pb.GetOrganizationResponse(organization=_message(found), use=pb.OrganizationUse(**dataclasses.asdict(use)))

    async def SetOrganizationQuotas(
        self, request: pb.SetOrganizationQuotasRequest, context: _Context
    ) -> pb.SetOrganizationQuotasResponse:
        """See the API."""
        numbers = masked(
            request.update_mask,
            quotas=_quotas_of(request.quotas),
            tenant_limits=limits_of(request.tenant_limits),
            tenant_quotas=quotas_of(request.tenant_quotas),
        )
        changed = await self._organizations.set_quotas(
            request.organization,
            numbers["quotas"],
            tenant_limits=numbers["tenant_limits"],
            tenant_quotas=numbers["tenant_quotas"],
            request_id=request.request_id,
        )
        return pb.SetOrganizationQuotasResponse(organization=_message(changed))

    async def AdoptTenant(self, request: pb.AdoptTenantRequest, context: _Context) -> pb.AdoptTenantResponse:
        """See the API."""
        tenant = await self._tenants.adopt(request.organization, request.tenant, request_id=request.request_id)
        return pb.AdoptTenantResponse(tenant=tenant_message(tenant))

    async def CreateOrganizationKey(
        self, request: pb.CreateOrganizationKeyRequest, context: _Context
    ) -> pb.CreateOrganizationKeyResponse:
        """See the API."""
        made = await self._keys.create(
            _named(request.organization),
            [role_name(role) for role in request.roles],
            label=request.label,
            lifetime=lifetime_of(request),
            request_id=request.request_id,
        )
        return pb.CreateOrganizationKeyResponse(key=key_message(made.key), secret=made.secret)

    async def RotateOrganizationKey(
        self, request: pb.RotateOrganizationKeyRequest, context: _Context
    ) -> pb.RotateOrganizationKeyResponse:
        """See the API."""
        made = await self._keys.rotate(
            _named(request.organization),
            request.id,
            overlap=overlap_of(request),
            lifetime=lifetime_of(request),
            request_id=request.request_id,
        )
        assert made.previous is not None
        previous = key_message(made.previous)
        return pb.RotateOrganizationKeyResponse(key=key_message(made.key), secret=made.secret, previous=previous)

    async def ListOrganizationKeys(
        self, request: pb.ListOrganizationKeysRequest, context: _Context
    ) -> pb.ListOrganizationKeysResponse:
        """See the API."""
        name = _named(request.organization)
        keys, token = await self._keys.page(name, page_size=request.page_size, token=request.page_token)
        return pb.ListOrganizationKeysResponse(keys=map(key_message, keys), next_page_token=token)

    async def RevokeOrganizationKey(
        self, request: pb.RevokeOrganizationKeyRequest, context: _Context
    ) -> pb.RevokeOrganizationKeyResponse:
        """See the API."""
        key = await self._keys.revoke(_named(request.organization), request.id, request_id=request.request_id)
        return pb.RevokeOrganizationKeyResponse(key=key_message(key))


def _named(named: str) -> str:
    """The organisation that a call is about, which operators must name."""
    organization = organization_of(named)
    if not organization:
        raise InvalidArgumentError.of([Violation("organization", "operators must name the organisation")])
    return organization


def _message(organization: Organization) -> pb.Organization:
    return pb.Organization(
        name=organization.name,
        quotas=pb.OrganizationQuotas(**dataclasses.asdict(organization.quotas)),
        tenant_limits=limits_message(organization.tenant_limits),
        tenant_quotas=quotas_message(organization.tenant_quotas),
        create_time=timestamp(organization.create_time),
    )


def _quotas_of(message: pb.OrganizationQuotas) -> OrganizationQuotas:
    return OrganizationQuotas(
        max_tenants=message.max_tenants, max_adapters=message.max_adapters, max_stored_bytes=message.max_stored_bytes
    )
