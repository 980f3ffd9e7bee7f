"""What operators and organisations may both ask of an organisation: the part of their clients that is about that."""

from __future__ import annotations

from collections.abc import Sequence

from veneer.connection import Connection, identified, role, typed
from veneer.controlplane.v1 import organizations_pb2, organizations_pb2_grpc, tenants_pb2


class OrganizationCalls(Connection):
    """Reads an organisation and manages its keys; operators name it. Owned by one event loop."""

    @property
    def _organizations(self) -> organizations_pb2_grpc.OrganizationServiceAsyncStub:
        return organizations_pb2_grpc.OrganizationServiceStub(self._channel("control"))

    async def tenants(self, *, organization: str = "") -> list[tenants_pb2.Tenant]:
        """All tenants by name that the key may see, or those of one organisation."""
        stub, request = self._tenants, tenants_pb2.ListTenantsRequest(organization=organization)
        return await self._all(lambda token: self._ask(stub.ListTenants, _at(request, token)), "tenants")

    async def organization(self, name: str = "") -> organizations_pb2.GetOrganizationResponse:
        """An organisation with what its tenants have together; without a name the key's own."""
        request = organizations_pb2.GetOrganizationRequest(organization=name)
        return await self._ask(self._organizations.GetOrganization, request)  # type: ignore[no-any-return]

    async def create_organization_key(
        self,
        *,
        roles: Sequence[str],
        organization: str = "",
        label: str = "",
        lifetime_s: float | None = None,
        request_id: str = "",
    ) -> organizations_pb2.CreateOrganizationKeyResponse:
        """Creates a key of an organisation; `secret` of the response is shown this once.

        Args:
            roles: At least one of `owner`, `auditor`.
            organization: Whose; empty is the key's own.
            label: Free text.
            lifetime_s: How long it lives; None until revoked.
            request_id: Identifies this key: the same again gives the same key and secret. Empty makes one.
        """
        request = organizations_pb2.CreateOrganizationKeyRequest(
            organization=organization, roles=[role(name) for name in roles], label=label, request_id=identified(request_id)
        )
        if lifetime_s is not None:
            request.lifetime.FromMilliseconds(round(lifetime_s * 1000))
        return await self._ask(self._organizations.CreateOrganizationKey, request)  # type: ignore[no-any-return]

    async def rotate_organization_key(
        self,
        key_id: str,
        *,
        organization: str = "",
        overlap_s: float | None = None,
        lifetime_s: float | None = None,
        request_id: str = "",
    ) -> organizations_pb2.RotateOrganizationKeyResponse:
        """Creates a key in the place of another one, which ends after an overlap; `secret` of the response is the new one.

        Args:
            key_id: Key whose place is taken.
            organization: Whose; empty is the key's own.
            overlap_s: How long it goes on working; None is a day.
            lifetime_s: How long the new key lives; None: as long as the other one was made for.
            request_id: Identifies this rotation: the same again gives the same key and secret. Empty makes one.
        """
        request = organizations_pb2.RotateOrganizationKeyRequest(
            organization=organization, id=key_id, request_id=identified(request_id)
        )
        if overlap_s is not None:
            request.overlap.FromMilliseconds(round(overlap_s * 1000))
        if lifetime_s is not None:
            request.lifetime.FromMilliseconds(round(lifetime_s * 1000))
        return await self._ask(self._organizations.RotateOrganizationKey, request)  # type: ignore[no-any-return]

    async def organization_keys(self, *, organization: str = "") -> list[tenants_pb2.Key]:
        """An organisation's keys without their secrets, newest first."""
        stub, request = self._organizations, organizations_pb2.ListOrganizationKeysRequest(organization=organization)
        return await self._all(lambda token: self._ask(stub.ListOrganizationKeys, _at(request, token)), "keys")

    async def revoke_organization_key(self, key_id: str, *, organization: str = "", request_id: str = "") -> tenants_pb2.Key:
        """Revokes a key of an organisation at once."""
        request = organizations_pb2.RevokeOrganizationKeyRequest(
            organization=organization, id=key_id, request_id=identified(request_id)
        )
        response = await self._ask(self._organizations.RevokeOrganizationKey, request)
        return typed(tenants_pb2.Key, response.key)


_Request = tenants_pb2.ListTenantsRequest | organizations_pb2.ListOrganizationKeysRequest


def _at(request: _Request, token: str) -> _Request:
    request.page_token = token
    return request
