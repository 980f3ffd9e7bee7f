"""What a tenant's key can do about canaries: the part of `veneer.client.Client` that is about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from veneer.connection import Connection, identified, typed
from veneer.controlplane.v1 import canaries_pb2, catalog_pb2_grpc


@dataclass(frozen=True, slots=True)
class CanaryStep:
    """A step of a canary's schedule.

    Attributes:
        weight_percent: Share of the alias's traffic that the version gets.
        duration_s: How long the step takes at least.
        min_requests: Requests of the version that must have ended before the next step.
    """

    weight_percent: int
    duration_s: float
    min_requests: int = 0


class CanaryCalls(Connection):
    """Starts, reads and stops canaries. Owned by one event loop."""

    async def start_canary(
        self,
        adapter: str,
        version: str,
        steps: Sequence[CanaryStep],
        *,
        alias: str = "",
        expected_generation: int | None = None,
        request_id: str = "",
        dry_run: bool = False,
    ) -> canaries_pb2.Canary:
        """Gives a version a part of an alias's traffic, more by each step, and all in the end, unless it fails more often.

        Args:
            adapter: Name of the adapter.
            version: Digest of the version.
            steps: The schedule, each step with more weight than the one before.
            alias: Name of the alias; empty is the default one.
            expected_generation: Start only if the alias is still at this one; None starts in any case.
            request_id: The caller's own identifier: the same again gives the same answer; empty: one is made.
            dry_run: Does nothing but say what would be done.

        Raises:
            AbortedError: The alias has moved since.
            FailedPreconditionError: It serves a split or is frozen, or the version is not ready.
        """
        request = canaries_pb2.StartCanaryRequest(
            adapter=adapter,
            alias=alias,
            version=version,
            steps=[
                canaries_pb2.CanaryStep(
                    weight_percent=step.weight_percent, duration=_duration(step.duration_s), min_requests=step.min_requests
                )
                for step in steps
            ],
            expected_generation=expected_generation,
            request_id=identified(request_id),
            dry_run=dry_run,
        )
        response = await self._ask(self._canary_stub.StartCanary, request)
        return typed(canaries_pb2.Canary, response.canary)

    async def canary(self, adapter: str, *, alias: str = "") -> canaries_pb2.Canary:
        """The present or last canary of an alias.

        Raises:
            NotFoundError: There was none.
        """
        response = await self._ask(self._canary_stub.GetCanary, canaries_pb2.GetCanaryRequest(adapter=adapter, alias=alias))
        return typed(canaries_pb2.Canary, response.canary)

    async def stop_canary(
        self, adapter: str, *, alias: str = "", request_id: str = "", dry_run: bool = False
    ) -> canaries_pb2.Canary:
        """Ends the running canary of an alias; all traffic goes back to the version that had it before.

        Raises:
            FailedPreconditionError: None runs, or the alias is frozen.
        """
        request = canaries_pb2.StopCanaryRequest(adapter=adapter, alias=alias, request_id=identified(request_id), dry_run=dry_run)
        response = await self._ask(self._canary_stub.StopCanary, request)
        return typed(canaries_pb2.Canary, response.canary)

    @property
    def _canary_stub(self) -> catalog_pb2_grpc.CatalogServiceAsyncStub:
        return catalog_pb2_grpc.CatalogServiceStub(self._channel("control"))


def _duration(seconds: float) -> Duration:
    message = Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message
