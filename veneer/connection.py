"""What all clients share: channels to both planes, opened at their first use, and the calls that each kind of key may make."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from veneer.channel import ClientTls, bearer, open_channel, pages, typed_errors
from veneer.controlplane.v1 import tenants_pb2, tenants_pb2_grpc
from veneer.errors import FailedPreconditionError, InvalidArgumentError, Violation

_T = TypeVar("_T")

_MAX_PAGE = 1000


class Connection:
    """Channels to both planes, opened at their first use. Owned by one event loop."""

    def __init__(
        self, *, control: str = "", data: str = "", key: str = "", tls: ClientTls | None = None, timeout_s: float = 30.0
    ) -> None:
        """Prepares the client; nothing connects yet.

        Args:
            control: Address of the control plane, `host:port`.
            data: Address of the data plane, `host:port`; a client of a tenant takes several, with commas between them.
            key: The credential.
            tls: Transport security; None is plaintext.
            timeout_s: Deadline of calls that have none of their own.
        """
        self._addresses = {"control": control, "data": data}
        self._metadata = bearer(key)
        self._tls = tls
        self._timeout_s = timeout_s
        self._channels: dict[tuple[str, bool], grpc.aio.Channel] = {}
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channels; calls that run end cancelled, later ones are refused. A second time does nothing."""
        self._is_closed = True
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def _channel(self, plane: str, *, retries: bool = True) -> grpc.aio.Channel:
        address = self._addresses[plane]
        if not address:
            raise FailedPreconditionError(f"this client was given no address of the {plane} plane")
        return self._channel_to(address, retries=retries)

    def _channel_to(self, address: str, *, retries: bool) -> grpc.aio.Channel:
        if self._is_closed:
            raise FailedPreconditionError("this client was closed")
        if (address, retries) not in self._channels:
            self._channels[address, retries] = open_channel(address, tls=self._tls, retries=retries)
        return self._channels[address, retries]

    async def _ask(self, method: Any, request: Any, *, timeout_s: float | None = None) -> Any:
        with typed_errors():
            return await method(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata)

    async def _all(self, fetch: Callable[[str], Awaitable[Any]], field: str) -> list[Any]:
        return [row async for row in pages(fetch, field)]

    @property
    def _tenants(self) -> tenants_pb2_grpc.TenantServiceAsyncStub:
        return tenants_pb2_grpc.TenantServiceStub(self._channel("control"))

    async def create_key(
        self, *, roles: Sequence[str], tenant: str = "", label: str = "", lifetime_s: float | None = None, request_id: str = ""
    ) -> tenants_pb2.CreateKeyResponse:
        """Creates a key; `secret` of the response is shown this once.

        Args:
            roles: At least one of `owner`, `publisher`, `caller`, `auditor`.
            tenant: Tenant to create it for; empty is the caller's own.
            label: Free text.
            lifetime_s: How long it lives; None until revoked.
            request_id: Identifies this key: the same again gives the same key and secret. Empty makes one.
        """
        request = tenants_pb2.CreateKeyRequest(
            tenant=tenant, roles=[role(name) for name in roles], label=label, request_id=identified(request_id)
        )
        if lifetime_s is not None:
            request.lifetime.FromMilliseconds(round(lifetime_s * 1000))
        return await self._ask(self._tenants.CreateKey, request)  # type: ignore[no-any-return]

    async def rotate_key(
        self,
        key_id: str,
        *,
        tenant: str = "",
        overlap_s: float | None = None,
        lifetime_s: float | None = None,
        request_id: str = "",
    ) -> tenants_pb2.RotateKeyResponse:
        """Creates a key in the place of another one, which ends after an overlap; `secret` of the response is the new one.

        Args:
            key_id: Key whose place is taken.
            tenant: Tenant that it belongs to; empty is the caller's own.
            overlap_s: How long it goes on working; None is a day.
            lifetime_s: How long the new key lives; None: as long as the other one was made for.
            request_id: Identifies this rotation: the same again gives the same key and secret. Empty makes one.
        """
        request = tenants_pb2.RotateKeyRequest(tenant=tenant, id=key_id, request_id=identified(request_id))
        if overlap_s is not None:
            request.overlap.FromMilliseconds(round(overlap_s * 1000))
        if lifetime_s is not None:
            request.lifetime.FromMilliseconds(round(lifetime_s * 1000))
        return await self._ask(self._tenants.RotateKey, request)  # type: ignore[no-any-return]

    async def keys(self, *, tenant: str = "") -> list[tenants_pb2.Key]:
        """A tenant's keys without their secrets, newest first."""
        stub = self._tenants
        return await self._all(
            lambda token: self._ask(stub.ListKeys, tenants_pb2.ListKeysRequest(tenant=tenant, page_token=token)), "keys"
        )

    async def usage(
        self,
        *,
        tenant: str = "",
        period: tenants_pb2.UsagePeriod.ValueType = tenants_pb2.USAGE_PERIOD_DAY,
        since: datetime | None = None,
    ) -> list[tenants_pb2.Usage]:
        """What a tenant's requests used, by adapter and by hour or day, latest first."""
        stub, request = self._tenants, tenants_pb2.ListUsageRequest(tenant=tenant, period=period)
        if since is not None:
            request.start_time.FromDatetime(since.astimezone(UTC))

        def ask(token: str) -> Awaitable[tenants_pb2.ListUsageResponse]:
            request.page_token = token
            return self._ask(stub.ListUsage, request)

        return await self._all(ask, "usage")

    async def revoke_key(self, key_id: str, *, tenant: str = "", request_id: str = "") -> tenants_pb2.Key:
        """Revokes a key at once."""
        request = tenants_pb2.RevokeKeyRequest(tenant=tenant, id=key_id, request_id=identified(request_id))
        response = await self._ask(self._tenants.RevokeKey, request)
        return typed(tenants_pb2.Key, response.key)

    async def audit(self, *, tenant: str = "", limit: int = 100) -> list[tenants_pb2.AuditEntry]:
        """The last writes of a tenant's part of the catalogue, newest first.

        Args:
            tenant: Whose; empty is the caller's own, and for operators what is no tenant's.
            limit: How many at most.
        """
        found, token = list[tenants_pb2.AuditEntry](), ""
        while len(found) < limit:
            size = min(limit - len(found), _MAX_PAGE)
            request = tenants_pb2.ListAuditRequest(tenant=tenant, page_size=size, page_token=token)
            response = await self._ask(self._tenants.ListAudit, request)
            found += response.entries
            token = response.next_page_token
            if not token:
                break
        return found


def identified(request_id: str) -> str:
    """The identifier of a write: the caller's own, or a new one, so that it may be sent again should its answer be lost."""
    return request_id or uuid.uuid4().hex


def typed(kind: type[_T], message: Any) -> _T:
    """The message, with its type known to the reader."""
    assert isinstance(message, kind)
    return message


def role(name: str) -> tenants_pb2.Role.ValueType:
    """A role by its name in lower case.

    Raises:
        InvalidArgumentError: There is none of this name.
    """
    known = {
        one.removeprefix("ROLE_").lower(): one
        for one in tenants_pb2.Role.keys()  # noqa: SIM118  an enum, no dictionary
        if one != "ROLE_UNSPECIFIED"
    }
    if name not in known:
        raise InvalidArgumentError.of([Violation("roles", f"`{name}` is no role; there are {', '.join(sorted(known))}")])
    return tenants_pb2.Role.Value(known[name])
