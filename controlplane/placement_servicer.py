"""PlacementService: proto in, use case, proto out."""

from __future__ import annotations

from typing import Any

import grpc

from controlplane.locate import Locator
from veneer.access import current_identity
from veneer.controlplane.v1 import placement_pb2, placement_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class PlacementServicer(placement_pb2_grpc.PlacementServiceServicer):
    """Serves callers that choose a data plane."""

    def __init__(self, locator: Locator) -> None:
        self._locator = locator

    async def LocateAdapter(
        self, request: placement_pb2.LocateAdapterRequest, context: _Context
    ) -> placement_pb2.LocateAdapterResponse:
        """See the API."""
        found = await self._locator.locate(current_identity().tenant, request.adapter, owner=request.owner)
        return placement_pb2.LocateAdapterResponse(key=found.key, addresses=found.addresses)
