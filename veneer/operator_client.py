"""Asynchronous client of both planes for an operator's key; its addresses are those of the operators' listeners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence

from google.protobuf.field_mask_pb2 import FieldMask

from veneer.artifact import BaseDescription
from veneer.channel import typed_errors
from veneer.connection import identified, typed
from veneer.controlplane.v1 import bases_pb2, nodes_pb2, nodes_pb2_grpc, organizations_pb2, tenants_pb2
from veneer.dataplane.v1 import admin_pb2, admin_pb2_grpc
from veneer.errors import InvalidArgumentError, UnavailableError, Violation
from veneer.organization_calls import OrganizationCalls
from veneer.serving_calls import ServingCalls

_AGAIN_S = 1.0


class OperatorClient(OrganizationCalls, ServingCalls):
    """What an operator's key can do. Owned by one event loop."""

    @property
    def _nodes(self) -> nodes_pb2_grpc.NodeServiceAsyncStub:
        return nodes_pb2_grpc.NodeServiceStub(self._channel("control"))

    @property
    def _admin(self) -> admin_pb2_grpc.AdminServiceAsyncStub:
        if "," in self._addresses["data"]:
            raise InvalidArgumentError.of([Violation("data", "names several data planes, and this is about one: name it alone")])
        return admin_pb2_grpc.AdminServiceStub(self._channel("data"))

    async def register_base(self, base: BaseDescription) -> bases_pb2.Base:
        """Registers a base as `veneer.artifact.describe_base` computes it. Registering it again changes nothing."""
        modules = [
            bases_pb2.TargetModule(
                path=module.path, site=module.site, in_features=module.in_features, out_features=module.out_features
            )
            for module in base.modules
        ]
        message = bases_pb2.Base(
            digest=base.digest,
            name=base.name,
            family=base.family,
            num_layers=base.num_layers,
            modules=modules,
            vocab_size=base.vocab_size,
            max_context=base.max_context,
            known_names=base.known_names,
            ends=None if base.eos_ids is None else bases_pb2.SequenceEnds(token_ids=base.eos_ids),
            edges=None
            if base.edge_digests is None
            else bases_pb2.EdgeDigests(
                digests=[bases_pb2.EdgeDigest(site=one.site, dtype=one.dtype, sha256=one.sha256) for one in base.edge_digests]
            ),
            chat_contents=bases_pb2.ChatContents.Value(f"CHAT_CONTENTS_{(base.chat_contents or 'unspecified').upper()}"),
            chat_fault=base.chat_fault,
        )
        response = await self._ask(self._bases.RegisterBase, bases_pb2.RegisterBaseRequest(base=message))
        return typed(bases_pb2.Base, response.base)

    async def create_tenant(
        self,
        name: str,
        *,
        fallback: tenants_pb2.FallbackPolicy.ValueType = tenants_pb2.FALLBACK_POLICY_ALLOWED,
        default_fallback: tenants_pb2.DefaultFallback.ValueType = tenants_pb2.DEFAULT_FALLBACK_NONE,
        weight: int = 1,
        limits: tenants_pb2.TenantLimits | None = None,
        organization: str = "",
        request_id: str = "",
    ) -> tenants_pb2.Tenant:
        """Creates a tenant, of an organisation or of none; the same again under the same `request_id` gives the same answer."""
        tenant = tenants_pb2.Tenant(
            name=name,
            fallback=fallback,
            default_fallback=default_fallback,
            weight=weight,
            limits=limits,
            organization=organization,
        )
        request = tenants_pb2.CreateTenantRequest(tenant=tenant, request_id=identified(request_id))
        response = await self._ask(self._tenants.CreateTenant, request)
        return typed(tenants_pb2.Tenant, response.tenant)

    async def set_tenant_limits(
        self,
        name: str,
        *,
        max_rank_rows: int | None = None,
        max_arena_bytes: int | None = None,
        max_host_bytes: int | None = None,
        request_id: str = "",
    ) -> tenants_pb2.Tenant:
        """Sets what a tenant may use at most on one data plane; 0 leaves a limit to the data plane's settings, None as it is.

        Raises:
            InvalidArgumentError: No limit is given.
        """
        given = _given(max_rank_rows=max_rank_rows, max_arena_bytes=max_arena_bytes, max_host_bytes=max_host_bytes)
        request = tenants_pb2.SetTenantLimitsRequest(
            tenant=name,
            limits=tenants_pb2.TenantLimits(**given),
            update_mask=FieldMask(paths=[f"limits.{field}" for field in given]),
            request_id=identified(request_id),
        )
        response = await self._ask(self._tenants.SetTenantLimits, request)
        return typed(tenants_pb2.Tenant, response.tenant)

    async def set_tenant_quotas(
        self,
        name: str,
        *,
        max_requests_per_minute: int | None = None,
        max_tokens_per_minute: int | None = None,
        max_streams: int | None = None,
        max_adapters: int | None = None,
        max_stored_bytes: int | None = None,
        request_id: str = "",
    ) -> tenants_pb2.Tenant:
        """Sets what a tenant may use at most in all, over all data planes; 0 is no limit, None leaves a quota as it is.

        Raises:
            InvalidArgumentError: No quota is given.
        """
        given = _given(
            max_requests_per_minute=max_requests_per_minute,
            max_tokens_per_minute=max_tokens_per_minute,
            max_streams=max_streams,
            max_adapters=max_adapters,
            max_stored_bytes=max_stored_bytes,
        )
        request = tenants_pb2.SetTenantQuotasRequest(
            tenant=name,
            quotas=tenants_pb2.TenantQuotas(**given),
            update_mask=FieldMask(paths=[f"quotas.{field}" for field in given]),
            request_id=identified(request_id),
        )
        response = await self._ask(self._tenants.SetTenantQuotas, request)
        return typed(tenants_pb2.Tenant, response.tenant)

    async def create_organization(
        self,
        name: str,
        *,
        quotas: organizations_pb2.OrganizationQuotas | None = None,
        tenant_limits: tenants_pb2.TenantLimits | None = None,
        tenant_quotas: tenants_pb2.TenantQuotas | None = None,
        request_id: str = "",
    ) -> organizations_pb2.Organization:
        """Creates an organisation.

        Args:
            name: 1 to 30 lower-case letters, digits and single inner hyphens.
            quotas: What its tenants may have at most together; None is no limit.
            tenant_limits: What each tenant that it makes may use at most on one data plane.
            tenant_quotas: What each tenant that it makes may use at most in all.
            request_id: Identifies this change: the same again is done once. Empty makes one.
        """
        order = organizations_pb2.Organization(name=name, quotas=quotas, tenant_limits=tenant_limits, tenant_quotas=tenant_quotas)
        request = organizations_pb2.CreateOrganizationRequest(organization=order, request_id=identified(request_id))
        response = await self._ask(self._organizations.CreateOrganization, request)
        return typed(organizations_pb2.Organization, response.organization)

    async def set_organization_quotas(
        self,
        name: str,
        *,
        quotas: organizations_pb2.OrganizationQuotas | None = None,
        tenant_limits: tenants_pb2.TenantLimits | None = None,
        tenant_quotas: tenants_pb2.TenantQuotas | None = None,
        fields: Sequence[str] = (),
        request_id: str = "",
    ) -> organizations_pb2.Organization:
        """Sets an organisation's ceilings, and what the tenants may use that it makes from now on.

        Args:
            name: The organisation.
            quotas: What its tenants may have at most together; None leaves it as it is.
            tenant_limits: What each new tenant may use at most on one data plane; None leaves it as it is.
            tenant_quotas: What each new tenant may use at most in all; None leaves it as it is.
            fields: Paths that change, such as `quotas.max_tenants`; none: all fields of what is given.
            request_id: Identifies this change: the same again is done once. Empty makes one.

        Raises:
            InvalidArgumentError: Nothing is given.
        """
        parts = {"quotas": quotas, "tenant_limits": tenant_limits, "tenant_quotas": tenant_quotas}
        whole = [f"{part}.{field.name}" for part, one in parts.items() if one is not None for field in one.DESCRIPTOR.fields]
        if not whole:
            raise InvalidArgumentError.of([Violation("quotas", "give at least one number")])
        request = organizations_pb2.SetOrganizationQuotasRequest(
            organization=name,
            quotas=quotas,
            tenant_limits=tenant_limits,
            tenant_quotas=tenant_quotas,
            update_mask=FieldMask(paths=fields or whole),
            request_id=identified(request_id),
        )
        response = await self._ask(self._organizations.SetOrganizationQuotas, request)
        return typed(organizations_pb2.Organization, response.organization)

    async def organizations(self) -> list[organizations_pb2.Organization]:
        """All organisations by name."""
        stub = self._organizations

        def ask(token: str) -> Awaitable[organizations_pb2.ListOrganizationsResponse]:
            return self._ask(stub.ListOrganizations, organizations_pb2.ListOrganizationsRequest(page_token=token))

        return await self._all(ask, "organizations")

    async def adopt_tenant(self, organization: str, tenant: str, *, request_id: str = "") -> tenants_pb2.Tenant:
        """Gives a tenant that belongs to no organisation to one, for ever."""
        request = organizations_pb2.AdoptTenantRequest(
            organization=organization, tenant=tenant, request_id=identified(request_id)
        )
        response = await self._ask(self._organizations.AdoptTenant, request)
        return typed(tenants_pb2.Tenant, response.tenant)

    async def create_enrollment_token(self, node_name: str) -> nodes_pb2.CreateEnrollmentTokenResponse:
        """Creates a token that lets one data plane in, once."""
        request = nodes_pb2.CreateEnrollmentTokenRequest(node_name=node_name)
        return await self._ask(self._nodes.CreateEnrollmentToken, request)  # type: ignore[no-any-return]

    async def nodes(self) -> list[nodes_pb2.Node]:
        """The data planes by name."""
        stub = self._nodes
        return await self._all(
            lambda token: self._ask(stub.ListNodes, nodes_pb2.ListNodesRequest(page_token=token)),
            "nodes",
        )

    async def revoke_node(self, node_id: str) -> nodes_pb2.Node:
        """Revokes a data plane's key at once."""
        response = await self._ask(self._nodes.RevokeNode, nodes_pb2.RevokeNodeRequest(id=node_id))
        return typed(nodes_pb2.Node, response.node)

    async def residency(self) -> admin_pb2.GetResidencyResponse:
        """What is resident where on the data plane, and what its engine is doing."""
        return await self._ask(self._admin.GetResidency, admin_pb2.GetResidencyRequest())  # type: ignore[no-any-return]

    async def watch_residency(self) -> AsyncGenerator[admin_pb2.WatchResidencyResponse]:
        """What is resident where, and then every change; after `snapshot` the reader forgets what it knew.

        It goes on after the data plane ends a stream in order, or was away, from where it stood; closing it ends it.

        Raises:
            VeneerError: As the service said; not UnavailableError once something was read.
        """
        request, has_read = admin_pb2.WatchResidencyRequest(), False
        while True:
            call = self._admin.WatchResidency(request, metadata=self._metadata)
            try:
                with typed_errors():
                    async for response in call:
                        has_read = True
                        if not response.more:
                            request.after.CopyFrom(response.position)
                        yield response
            except UnavailableError:
                if not has_read:
                    raise
                await asyncio.sleep(_AGAIN_S)
            finally:
                call.cancel()

    async def unload(self, version: str, *, wait_s: float = 60.0) -> admin_pb2.UnloadVersionResponse:
        """Has the data plane drop a version from every tier, and waits so long for the requests that use it."""
        request = admin_pb2.UnloadVersionRequest(version=version)
        request.wait.FromMilliseconds(round(wait_s * 1000))
        timeout_s = wait_s + self._timeout_s
        return await self._ask(self._admin.UnloadVersion, request, timeout_s=timeout_s)  # type: ignore[no-any-return]

    async def pin_version(self, version: str, *, lifetime_s: float, timeout_s: float = 60.0) -> admin_pb2.Pin:
        """Brings a version to a data plane's device and keeps it there for a time."""
        request = admin_pb2.PinVersionRequest(version=version)
        request.lifetime.FromMilliseconds(round(lifetime_s * 1000))
        response = await self._ask(self._admin.PinVersion, request, timeout_s=timeout_s)
        return typed(admin_pb2.Pin, response.pin)

    async def unpin_version(self, version: str) -> bool:
        """Ends a pin; returns whether there was one."""
        response = await self._ask(self._admin.UnpinVersion, admin_pb2.UnpinVersionRequest(version=version))
        return bool(response.HasField("pin"))

    async def pins(self) -> admin_pb2.ListPinsResponse:
        """The pins of a data plane, and what may be pinned."""
        return await self._ask(self._admin.ListPins, admin_pb2.ListPinsRequest())  # type: ignore[no-any-return]

    async def drain(self, *, grace_s: float = 60.0) -> int:
        """Stops a data plane's admission and waits for its streams; returns how many still ran when the time was up."""
        request = admin_pb2.DrainRequest()
        request.grace.FromMilliseconds(round(grace_s * 1000))
        response = await self._ask(self._admin.Drain, request, timeout_s=grace_s + self._timeout_s)
        return int(response.remaining)


def _given(**numbers: int | None) -> dict[str, int]:
    """The numbers that are given.

    Raises:
        InvalidArgumentError: None is.
    """
    given = {name: value for name, value in numbers.items() if value is not None}
    if not given:
        raise InvalidArgumentError.of([Violation(", ".join(numbers), "give at least one; 0 takes a number away")])
    return given
