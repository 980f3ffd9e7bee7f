"""BaseService and CatalogService: proto in, use case, proto out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from controlplane.aliases import Aliases
from controlplane.bases import Bases
from controlplane.canaries import Canaries
from controlplane.catalog import Arm, Catalog
from controlplane.deletion import Deletion
from controlplane.publish import Publisher
from controlplane.publish_order import PublishOrder
from controlplane.spool import CONFIG, WEIGHTS, Part
from controlplane.wire import (
    adapter_message,
    alias_message,
    base_description,
    base_message,
    canary_message,
    canary_step,
    version_message,
)
from veneer.access import current_identity
from veneer.controlplane.v1 import bases_pb2, bases_pb2_grpc, canaries_pb2, catalog_pb2, catalog_pb2_grpc
from veneer.errors import DeadlineExceededError, InvalidArgumentError, Violation

_Context = grpc.aio.ServicerContext[Any, Any]
_HEADER_TIMEOUT_S = 30.0  # a stream that never says what it is about would hold its place for ever
_FILES = {catalog_pb2.ADAPTER_FILE_CONFIG: CONFIG, catalog_pb2.ADAPTER_FILE_WEIGHTS: WEIGHTS}


class BaseServicer(bases_pb2_grpc.BaseServiceServicer):
    """Serves the list of bases."""

    def __init__(self, bases: Bases) -> None:
        self._bases = bases

    async def RegisterBase(self, request: bases_pb2.RegisterBaseRequest, context: _Context) -> bases_pb2.RegisterBaseResponse:
        """See the API."""
        base = await self._bases.register(base_description(request.base))
        return bases_pb2.RegisterBaseResponse(base=base_message(base))

    async def ListBases(self, request: bases_pb2.ListBasesRequest, context: _Context) -> bases_pb2.ListBasesResponse:
        """See the API."""
        bases, token = await self._bases.page(page_size=request.page_size, token=request.page_token)
        return bases_pb2.ListBasesResponse(bases=map(base_message, bases), next_page_token=token)


class CatalogServicer(catalog_pb2_grpc.CatalogServiceServicer):
    """Serves the caller's own part of the catalogue: the tenant is always that of the credential."""

    def __init__(self, catalog: Catalog, aliases: Aliases, canaries: Canaries, deletion: Deletion, publisher: Publisher) -> None:
        self._catalog = catalog
        self._aliases = aliases
        self._canaries = canaries
        self._deletion = deletion
        self._publisher = publisher

    async def Publish(
        self, requests: AsyncIterator[catalog_pb2.PublishRequest], context: _Context
    ) -> catalog_pb2.PublishResponse:
        """See the API."""
        try:
            async with asyncio.timeout(_HEADER_TIMEOUT_S):
                first = await anext(requests, None)
        except TimeoutError as error:
            raise DeadlineExceededError(f"no header came for {_HEADER_TIMEOUT_S:g} s") from error
        if first is None or not first.HasField("header"):
            raise InvalidArgumentError.of([Violation("header", "must be the first message of the stream")])
        header = first.header
        order = PublishOrder(
            adapter=header.adapter,
            base=header.base,
            request_id=header.request_id,
            label=header.label,
            labels=dict(header.labels),
            training_run=header.training_run,
            data_digest=header.data_digest,
            alias=header.alias,
            probe=header.probe,
            signature=header.signature,
        )
        published = await self._publisher.publish(current_identity().tenant, order, parts=_parts(requests))
        alias = None if published.alias is None else alias_message(published.alias)
        return catalog_pb2.PublishResponse(version=version_message(published.version), alias=alias)

    async def GetAdapter(self, request: catalog_pb2.GetAdapterRequest, context: _Context) -> catalog_pb2.GetAdapterResponse:
        """See the API."""
        adapter = await self._catalog.adapter(current_identity().tenant, request.adapter)
        return catalog_pb2.GetAdapterResponse(adapter=adapter_message(adapter))

    async def ListAdapters(self, request: catalog_pb2.ListAdaptersRequest, context: _Context) -> catalog_pb2.ListAdaptersResponse:
        """See the API."""
        owner = current_identity().tenant
        adapters, token = await self._catalog.adapters(owner, page_size=request.page_size, token=request.page_token)
        return catalog_pb2.ListAdaptersResponse(adapters=map(adapter_message, adapters), next_page_token=token)

    async def ListVersions(self, request: catalog_pb2.ListVersionsRequest, context: _Context) -> catalog_pb2.ListVersionsResponse:
        """See the API."""
        owner, adapter = current_identity().tenant, request.adapter
        versions, token = await self._catalog.versions(owner, adapter, page_size=request.page_size, token=request.page_token)
        return catalog_pb2.ListVersionsResponse(versions=map(version_message, versions), next_page_token=token)

    async def SetAlias(self, request: catalog_pb2.SetAliasRequest, context: _Context) -> catalog_pb2.SetAliasResponse:
        """See the API."""
        alias = await self._aliases.set(
            current_identity().tenant,
            request.adapter,
            request.alias,
            arms=[Arm(arm.version, arm.weight) for arm in request.arms],
            expected_generation=_expected(request),
            request_id=request.request_id,
            dry_run=request.dry_run,
        )
        return catalog_pb2.SetAliasResponse(alias=alias_message(alias))

    async def Rollback(self, request: catalog_pb2.RollbackRequest, context: _Context) -> catalog_pb2.RollbackResponse:
        """See the API."""
        alias = await self._aliases.rollback(
            current_identity().tenant,
            request.adapter,
            request.alias,
            version=request.version,
            expected_generation=_expected(request),
            request_id=request.request_id,
            dry_run=request.dry_run,
        )
        return catalog_pb2.RollbackResponse(alias=alias_message(alias))

    async def Promote(self, request: catalog_pb2.PromoteRequest, context: _Context) -> catalog_pb2.PromoteResponse:
        """See the API."""
        alias = await self._aliases.promote(
            current_identity().tenant,
            request.adapter,
            request.alias,
            source=request.source,
            version=request.version,
            expected_generation=_expected(request),
            request_id=request.request_id,
            dry_run=request.dry_run,
        )
        return catalog_pb2.PromoteResponse(alias=alias_message(alias))

    async def FreezeAlias(self, request: catalog_pb2.FreezeAliasRequest, context: _Context) -> catalog_pb2.FreezeAliasResponse:
        """See the API."""
        owner = current_identity().tenant
        alias = await self._aliases.freeze(
            owner, request.adapter, request.alias, frozen=request.frozen, request_id=request.request_id
        )
        return catalog_pb2.FreezeAliasResponse(alias=alias_message(alias))

    async def StartCanary(self, request: canaries_pb2.StartCanaryRequest, context: _Context) -> canaries_pb2.StartCanaryResponse:
        """See the API."""
        canary = await self._canaries.start(
            current_identity().tenant,
            request.adapter,
            request.alias,
            version=request.version,
            steps=list(map(canary_step, request.steps)),
            expected_generation=_expected(request),
            request_id=request.request_id,
            dry_run=request.dry_run,
        )
        return canaries_pb2.StartCanaryResponse(canary=canary_message(canary))

    async def GetCanary(self, request: canaries_pb2.GetCanaryRequest, context: _Context) -> canaries_pb2.GetCanaryResponse:
        """See the API."""
        canary = await self._canaries.get(current_identity().tenant, request.adapter, request.alias)
        return canaries_pb2.GetCanaryResponse(canary=canary_message(canary))

    async def StopCanary(self, request: canaries_pb2.StopCanaryRequest, context: _Context) -> canaries_pb2.StopCanaryResponse:
        """See the API."""
        canary = await self._canaries.stop(
            current_identity().tenant, request.adapter, request.alias, request_id=request.request_id, dry_run=request.dry_run
        )
        return canaries_pb2.StopCanaryResponse(canary=canary_message(canary))

    async def RetireVersion(
        self, request: catalog_pb2.RetireVersionRequest, context: _Context
    ) -> catalog_pb2.RetireVersionResponse:
        """See the API."""
        owner = current_identity().tenant
        version = await self._deletion.retire(
            owner, request.adapter, request.version, request_id=request.request_id, dry_run=request.dry_run
        )
        return catalog_pb2.RetireVersionResponse(version=version_message(version))

    async def DeleteVersion(
        self, request: catalog_pb2.DeleteVersionRequest, context: _Context
    ) -> catalog_pb2.DeleteVersionResponse:
        """See the API."""
        deleted = await self._deletion.version(
            current_identity().tenant,
            request.adapter,
            request.version,
            force=request.force,
            request_id=request.request_id,
            dry_run=request.dry_run,
        )
        return catalog_pb2.DeleteVersionResponse(
            version=version_message(deleted.versions[0]), aliases=map(alias_message, deleted.aliases)
        )

    async def DeleteAdapter(
        self, request: catalog_pb2.DeleteAdapterRequest, context: _Context
    ) -> catalog_pb2.DeleteAdapterResponse:
        """See the API."""
        deleted = await self._deletion.adapter(
            current_identity().tenant,
            request.adapter,
            force=request.force,
            request_id=request.request_id,
            dry_run=request.dry_run,
        )
        return catalog_pb2.DeleteAdapterResponse(num_versions=deleted.num_versions, aliases=map(alias_message, deleted.aliases))


def _expected(
    request: catalog_pb2.SetAliasRequest
    | catalog_pb2.RollbackRequest
    | catalog_pb2.PromoteRequest
    | canaries_pb2.StartCanaryRequest,
) -> int | None:
    return request.expected_generation if request.HasField("expected_generation") else None


async def _parts(requests: AsyncIterator[catalog_pb2.PublishRequest]) -> AsyncIterator[Part]:
    async for request in requests:
        if not request.HasField("part"):
            raise InvalidArgumentError.of([Violation("header", "is sent once, as the first message of the stream")])
        yield Part(_FILES[request.part.file], request.part.data)
