"""What tenants and operators may both ask about what is served, and organisations may not: a part of the clients of both."""

from __future__ import annotations

from google.protobuf.field_mask_pb2 import FieldMask

from veneer.connection import Connection, identified, typed
from veneer.controlplane.v1 import bases_pb2, bases_pb2_grpc, tenants_pb2


class ServingCalls(Connection):
    """Reads the bases, and says what answers when a version cannot. Owned by one event loop."""

    @property
    def _bases(self) -> bases_pb2_grpc.BaseServiceAsyncStub:
        return bases_pb2_grpc.BaseServiceStub(self._channel("control"))

    async def bases(self) -> list[bases_pb2.Base]:
        """All registered bases, newest first."""
        stub = self._bases
        return await self._all(lambda token: self._ask(stub.ListBases, bases_pb2.ListBasesRequest(page_token=token)), "bases")

    async def set_fallback(
        self,
        policy: tenants_pb2.FallbackPolicy.ValueType,
        *,
        default: tenants_pb2.DefaultFallback.ValueType | None = None,
        tenant: str = "",
        request_id: str = "",
    ) -> tenants_pb2.Tenant:
        """Sets what may answer when a version cannot be had in time.

        Args:
            policy: What callers may ask for.
            default: What a request asks for that does not say; None leaves it as it is.
            tenant: Tenant whose callers it is for; empty is the caller's own.
            request_id: Identifies this change: the same again is done once. Empty makes one.
        """
        request = tenants_pb2.SetFallbackRequest(
            tenant=tenant,
            fallback=policy,
            default_fallback=default or tenants_pb2.DEFAULT_FALLBACK_UNSPECIFIED,
            update_mask=None if default is not None else FieldMask(paths=["fallback"]),
            request_id=identified(request_id),
        )
        response = await self._ask(self._tenants.SetFallback, request)
        return typed(tenants_pb2.Tenant, response.tenant)
