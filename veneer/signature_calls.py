"""What a tenant's key can do about signatures: the part of `veneer.client.Client` that is about whom to trust."""

from __future__ import annotations

from veneer.connection import Connection, identified, typed
from veneer.controlplane.v1 import signatures_pb2, signatures_pb2_grpc


class SignatureCalls(Connection):
    """Says whose signatures of adapters hold, what is asked of them, and adds later ones. Owned by one event loop.

    Each write takes a `request_id`: the same again is done once and answered the same; empty makes one.
    """

    @property
    def _signatures(self) -> signatures_pb2_grpc.SignatureServiceAsyncStub:
        return signatures_pb2_grpc.SignatureServiceStub(self._channel("control"))

    async def trust_key(self, name: str, pem: bytes, *, request_id: str = "") -> signatures_pb2.TrustedKey:
        """Trusts a public key, or the certificate of an authority, in PEM form.

        Raises:
            AlreadyExistsError: It is trusted already, or the name is taken.
        """
        request = signatures_pb2.AddTrustedKeyRequest(name=name, pem=pem, request_id=identified(request_id))
        response = await self._ask(self._signatures.AddTrustedKey, request)
        return typed(signatures_pb2.TrustedKey, response.key)

    async def trusted_keys(self) -> signatures_pb2.ListTrustedKeysResponse:
        """Whom the tenant trusts, and what it asks of signatures."""
        response = await self._ask(self._signatures.ListTrustedKeys, signatures_pb2.ListTrustedKeysRequest())
        return typed(signatures_pb2.ListTrustedKeysResponse, response)

    async def distrust_key(self, key_id: str, *, request_id: str = "") -> signatures_pb2.TrustedKey:
        """Trusts a key or authority no longer: what only it signed is loaded nowhere any more, unless the policy is off."""
        request = signatures_pb2.RemoveTrustedKeyRequest(id=key_id, request_id=identified(request_id))
        response = await self._ask(self._signatures.RemoveTrustedKey, request)
        return typed(signatures_pb2.TrustedKey, response.key)

    async def set_signature_policy(self, policy: signatures_pb2.SignaturePolicy.ValueType, *, request_id: str = "") -> None:
        """Says what is asked of signatures, at publish and at each load."""
        request = signatures_pb2.SetSignaturePolicyRequest(policy=policy, request_id=identified(request_id))
        await self._ask(self._signatures.SetSignaturePolicy, request)

    async def attach_signature(
        self, adapter: str, version: str, signature: bytes, *, request_id: str = ""
    ) -> signatures_pb2.SignatureReport:
        """Adds a signature to a version that was published before; data planes judge it by this one from then on.

        Args:
            adapter: Adapter of the key's own tenant.
            version: Digest of the version.
            signature: The signature file (`model.sig`), at most 64 KiB; it must hold.
            request_id: Identifies this change.

        Raises:
            NotFoundError: There is no such version.
            FailedPreconditionError: It is by nobody whom the tenant trusts.
            InvalidArgumentError: It is malformed, or over other files.
        """
        request = signatures_pb2.AttachSignatureRequest(
            adapter=adapter, version=version, signature=signature, request_id=identified(request_id)
        )
        response = await self._ask(self._signatures.AttachSignature, request)
        return typed(signatures_pb2.SignatureReport, response.signature)
