"""NodeService: proto in, use case, proto out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from controlplane.blob_grants import BlobGrants
from controlplane.blobs import Blobs
from controlplane.changes import ChangeFeed
from controlplane.identities import Identities
from controlplane.nodes import Nodes
from controlplane.outcomes import ArmOutcomes, Outcomes
from controlplane.probes import Probes
from controlplane.quotas import QuotaLeases
from controlplane.resolve import Reference, Refusal, Resolver
from controlplane.usage import Records, UsageLedger
from controlplane.wire import (
    caller_message,
    change_message,
    demand_of,
    limits_message,
    measures_of,
    node_message,
    resolution_message,
    timestamp,
    usage_entry,
)
from veneer.access import current_identity
from veneer.controlplane.v1 import nodes_pb2, nodes_pb2_grpc
from veneer.errors import UnauthenticatedError
from veneer.signature.messages import trust_message

_Context = grpc.aio.ServicerContext[Any, Any]
_DEFAULT_CHANGES = 1000
_REFUSALS = {
    Refusal.NOT_FOUND: nodes_pb2.REFUSAL_REASON_NOT_FOUND,
    Refusal.ROLE: nodes_pb2.REFUSAL_REASON_ROLE,
    Refusal.BASE_MISMATCH: nodes_pb2.REFUSAL_REASON_BASE_MISMATCH,
    Refusal.RETIRED: nodes_pb2.REFUSAL_REASON_RETIRED,
    Refusal.QUARANTINED: nodes_pb2.REFUSAL_REASON_QUARANTINED,
}
_FAULTS = {
    nodes_pb2.VERSION_FAULT_NOT_FINITE: "NOT_FINITE",
    nodes_pb2.VERSION_FAULT_CORRUPT: "CORRUPT",
}


class NodeServicer(nodes_pb2_grpc.NodeServiceServicer):
    """Serves data planes, and operators who let them in."""

    def __init__(
        self,
        *,
        nodes: Nodes,
        resolver: Resolver,
        identities: Identities,
        feed: ChangeFeed,
        grants: BlobGrants,
        blobs: Blobs,
        quotas: QuotaLeases,
        outcomes: Outcomes,
        usage: UsageLedger,
        probes: Probes,
    ) -> None:
        self._nodes = nodes
        self._resolver = resolver
        self._identities = identities
        self._feed = feed
        self._grants = grants
        self._blobs = blobs
        self._quotas = quotas
        self._outcomes = outcomes
        self._usage = usage
        self._probes = probes

    async def CreateEnrollmentToken(
        self, request: nodes_pb2.CreateEnrollmentTokenRequest, context: _Context
    ) -> nodes_pb2.CreateEnrollmentTokenResponse:
        """See the API."""
        made = await self._nodes.create_token(request.node_name)
        return nodes_pb2.CreateEnrollmentTokenResponse(token=made.token, expire_time=timestamp(made.expire_time))

    async def EnrollNode(self, request: nodes_pb2.EnrollNodeRequest, context: _Context) -> nodes_pb2.EnrollNodeResponse:
        """See the API."""
        made = await self._nodes.enroll(current_identity().key_id, base_digest=request.base_digest)
        return nodes_pb2.EnrollNodeResponse(node=node_message(made.node), secret=made.secret)

    async def RotateNodeKey(self, request: nodes_pb2.RotateNodeKeyRequest, context: _Context) -> nodes_pb2.RotateNodeKeyResponse:
        """See the API."""
        return nodes_pb2.RotateNodeKeyResponse(secret=await self._nodes.rotate(current_identity().key_id))

    async def ListNodes(self, request: nodes_pb2.ListNodesRequest, context: _Context) -> nodes_pb2.ListNodesResponse:
        """See the API."""
        nodes, token = await self._nodes.page(page_size=request.page_size, token=request.page_token)
        return nodes_pb2.ListNodesResponse(nodes=map(node_message, nodes), next_page_token=token)

    async def RevokeNode(self, request: nodes_pb2.RevokeNodeRequest, context: _Context) -> nodes_pb2.RevokeNodeResponse:
        """See the API."""
        return nodes_pb2.RevokeNodeResponse(node=node_message(await self._nodes.revoke(request.id)))

    async def Resolve(self, request: nodes_pb2.ResolveRequest, context: _Context) -> nodes_pb2.ResolveResponse:
        """See the API."""
        target = request.target
        reference = Reference(adapter=target.adapter, owner=target.owner, alias=target.alias, version=target.version)
        node = current_identity().key_id
        resolved = await self._resolver.resolve(request.key_digest, reference, base_digest=request.base_digest, node=node)
        response = nodes_pb2.ResolveResponse(caller=caller_message(resolved.caller))
        if isinstance(resolved.outcome, Refusal):
            response.refusal = _REFUSALS[resolved.outcome]
        else:
            response.resolution.CopyFrom(resolution_message(resolved.outcome))
        return response

    async def Introspect(self, request: nodes_pb2.IntrospectRequest, context: _Context) -> nodes_pb2.IntrospectResponse:
        """See the API."""
        holder = await self._identities.find(request.key_digest)
        if holder is None or holder.identity.kind not in ("tenant", "operator", "node"):
            raise UnauthenticatedError("no valid credential")
        known = holder.identity
        return nodes_pb2.IntrospectResponse(kind=known.kind, tenant=known.tenant, roles=sorted(known.roles), key_id=known.key_id)

    async def GrantBlobs(self, request: nodes_pb2.GrantBlobsRequest, context: _Context) -> nodes_pb2.GrantBlobsResponse:
        """See the API."""
        node = current_identity().key_id
        grant = await self._grants.give(
            node,
            request.version,
            judges_signatures=request.judges_signatures,
            operator_key_digest=request.operator_key_digest,
        )
        trust = grant.trust
        blobs = [nodes_pb2.Blob(name=one.name, digest=one.digest, size_bytes=one.size_bytes, url=one.url) for one in grant.blobs]
        return nodes_pb2.GrantBlobsResponse(
            grant=grant.token,
            blobs=blobs,
            expire_time=timestamp(grant.expire_time),
            base_digest=grant.base_digest,
            owner=grant.owner,
            trust=trust_message(trust.policy, trust.keys, signature=trust.signature, publish_time=trust.time),
            adapter=grant.adapter,
            version_number=grant.version_number,
        )

    async def ReadBlob(self, request: nodes_pb2.ReadBlobRequest, context: _Context) -> AsyncIterator[nodes_pb2.ReadBlobResponse]:
        """See the API."""
        folder = self._grants.check(current_identity().key_id, request.grant, digest=request.digest)
        async for data in self._blobs.read(folder, request.digest, offset=request.offset):
            yield nodes_pb2.ReadBlobResponse(data=data)

    async def ListChanges(self, request: nodes_pb2.ListChangesRequest, context: _Context) -> nodes_pb2.ListChangesResponse:
        """See the API."""
        page = await self._feed.read(request.cursor, max_changes=request.max_changes or _DEFAULT_CHANGES)
        return nodes_pb2.ListChangesResponse(
            changes=map(change_message, page.changes), next_cursor=page.next_cursor, reset=page.reset
        )

    async def ReportVersion(self, request: nodes_pb2.ReportVersionRequest, context: _Context) -> nodes_pb2.ReportVersionResponse:
        """See the API."""
        quarantined = await self._nodes.report(current_identity().key_id, request.version, fault=_FAULTS[request.fault])
        return nodes_pb2.ReportVersionResponse(quarantined=quarantined)

    async def LeaseQuotas(self, request: nodes_pb2.LeaseQuotasRequest, context: _Context) -> nodes_pb2.LeaseQuotasResponse:
        """See the API."""
        shares = await self._quotas.lease(current_identity().key_id, [demand_of(one) for one in request.demands])
        response = nodes_pb2.LeaseQuotasResponse()
        response.lifetime.FromTimedelta(self._quotas.lifetime)
        for demand, share in zip(request.demands, shares, strict=True):
            amounts = nodes_pb2.QuotaAmounts(requests=share.requests, tokens=share.tokens, streams=share.streams)
            response.leases.add(tenant=demand.tenant, share=amounts)
        return response

    async def ReportOutcomes(
        self, request: nodes_pb2.ReportOutcomesRequest, context: _Context
    ) -> nodes_pb2.ReportOutcomesResponse:
        """See the API."""
        outcomes = [
            ArmOutcomes(
                owner=one.owner,
                adapter=one.adapter,
                alias=one.alias,
                generation=one.generation,
                version=one.version,
                ok=one.ok,
                failed=one.failed,
            )
            for one in request.outcomes
        ]
        counted = await self._outcomes.add(current_identity().key_id, request.epoch, request.sequence, outcomes)
        return nodes_pb2.ReportOutcomesResponse(counted=counted)

    async def ReportUsage(self, request: nodes_pb2.ReportUsageRequest, context: _Context) -> nodes_pb2.ReportUsageResponse:
        """See the API."""
        if request.is_over:
            return nodes_pb2.ReportUsageResponse(last_sequence=await self._usage.end(current_identity().key_id, request.journal))
        records = Records(request.journal, request.first_sequence, request.last_sequence)
        last = await self._usage.take(current_identity().key_id, records, [usage_entry(one) for one in request.entries])
        return nodes_pb2.ReportUsageResponse(last_sequence=last)

    async def TakeProbe(self, request: nodes_pb2.TakeProbeRequest, context: _Context) -> nodes_pb2.TakeProbeResponse:
        """See the API."""
        taken = await self._probes.take(current_identity().key_id, request.version)
        limits = limits_message(taken.limits)
        return nodes_pb2.TakeProbeResponse(owner=taken.owner, invocation_tokens=taken.invocation_tokens, limits=limits)

    async def ReportProbe(self, request: nodes_pb2.ReportProbeRequest, context: _Context) -> nodes_pb2.ReportProbeResponse:
        """See the API."""
        await self._probes.report(current_identity().key_id, request.version, measures_of(request.measures))
        return nodes_pb2.ReportProbeResponse()
