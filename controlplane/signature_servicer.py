"""SignatureService: proto in, use case, proto out."""

from __future__ import annotations

from typing import Any

import grpc

from controlplane.signatures import Signatures
from veneer.access import current_identity
from veneer.controlplane.v1 import signatures_pb2, signatures_pb2_grpc
from veneer.signature.messages import key_message, policy_of, policy_value, report_message

_Context = grpc.aio.ServicerContext[Any, Any]


class SignatureServicer(signatures_pb2_grpc.SignatureServiceServicer):
    """Serves what the caller's own tenant trusts, and later signatures of its versions."""

    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures

    async def AddTrustedKey(
        self, request: signatures_pb2.AddTrustedKeyRequest, context: _Context
    ) -> signatures_pb2.AddTrustedKeyResponse:
        """See the API."""
        owner = current_identity().tenant
        stored = await self._signatures.add(owner, request.name, request.pem, request_id=request.request_id)
        return signatures_pb2.AddTrustedKeyResponse(key=key_message(stored.key, stored.create_time))

    async def ListTrustedKeys(
        self, request: signatures_pb2.ListTrustedKeysRequest, context: _Context
    ) -> signatures_pb2.ListTrustedKeysResponse:
        """See the API."""
        policy, keys = await self._signatures.list(current_identity().tenant)
        messages = [key_message(one.key, one.create_time) for one in keys]
        return signatures_pb2.ListTrustedKeysResponse(keys=messages, policy=policy_value(policy))

    async def RemoveTrustedKey(
        self, request: signatures_pb2.RemoveTrustedKeyRequest, context: _Context
    ) -> signatures_pb2.RemoveTrustedKeyResponse:
        """See the API."""
        removed = await self._signatures.remove(current_identity().tenant, request.id, request_id=request.request_id)
        return signatures_pb2.RemoveTrustedKeyResponse(key=key_message(removed.key, removed.create_time))

    async def SetSignaturePolicy(
        self, request: signatures_pb2.SetSignaturePolicyRequest, context: _Context
    ) -> signatures_pb2.SetSignaturePolicyResponse:
        """See the API."""
        policy = policy_of(request.policy)
        policy = await self._signatures.set_policy(current_identity().tenant, policy, request_id=request.request_id)
        return signatures_pb2.SetSignaturePolicyResponse(policy=policy_value(policy))

    async def AttachSignature(
        self, request: signatures_pb2.AttachSignatureRequest, context: _Context
    ) -> signatures_pb2.AttachSignatureResponse:
        """See the API."""
        found = await self._signatures.attach(
            current_identity().tenant, request.adapter, request.version, request.signature, request_id=request.request_id
        )
        return signatures_pb2.AttachSignatureResponse(signature=report_message(found))
