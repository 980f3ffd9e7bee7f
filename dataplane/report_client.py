"""What a node tells the control plane of itself: what requests used, how they ended, and what a probe gave.

Proto messages stop here, as in `dataplane.catalog_client`, which makes the calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dataplane.resolution import TenantLimits
from dataplane.usage import UseCounts, UseKey
from veneer.controlplane.v1 import nodes_pb2, nodes_pb2_grpc, tenants_pb2

Ask = Callable[[Any, Any], Awaitable[Any]]
"""Calls a method with a request, as the node, and returns the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOutcomes:
    """How requests for an arm of a split ended since that was last told; see `veneer.controlplane.v1.ArmOutcomes`."""

    owner: str
    adapter: str
    alias: str
    generation: int
    version: str
    ok: int
    failed: int


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """A probe that this node took on: of which version, whose it is, which tokens activate it, and the owner's limits."""

    version: str
    owner: str
    invocation_tokens: tuple[int, ...]
    limits: TenantLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeMeasures:
    """What a probe gave; mirrors the message of this name."""

    fault: str = ""
    finite: bool = False
    num_prompts: int = 0
    num_tokens: int = 0
    max_difference: float = 0.0
    num_samples: int = 0
    max_error: float = 0.0
    tolerance: float = 0.0


class ReportClient:
    """Owned by the event loop.

    Args:
        nodes: The service.
        ask: Calls one of its methods.
    """

    def __init__(self, nodes: nodes_pb2_grpc.NodeServiceStub, ask: Ask) -> None:
        self._nodes = nodes
        self._ask = ask

    async def usage(self, journal: str, first: int, last: int, uses: Mapping[UseKey, UseCounts], *, is_over: bool = False) -> int:
        """Reports what the records of a journal say together; returns the last record of it that was taken, now or before.

        With `is_over` nothing is taken any more, now or later.

        Raises:
            PermissionDeniedError: One of the tickets is not good; nothing was taken.
        """
        request = nodes_pb2.ReportUsageRequest(journal=journal, first_sequence=first, last_sequence=last, is_over=is_over)
        for key, counts in uses.items():
            entry = request.entries.add(**key._asdict() | counts._asdict() | {"hour": None, "ticket": bytes.fromhex(key.ticket)})
            entry.hour.seconds = key.hour
        response = await self._ask(self._nodes.ReportUsage, request)
        return int(response.last_sequence)

    async def outcomes(self, epoch: str, sequence: int, outcomes: Sequence[ArmOutcomes]) -> None:
        """Tells how requests ended; the same epoch and sequence again are counted once."""
        told = [nodes_pb2.ArmOutcomes(**asdict(one)) for one in outcomes]
        request = nodes_pb2.ReportOutcomesRequest(epoch=epoch, sequence=sequence, outcomes=told)
        await self._ask(self._nodes.ReportOutcomes, request)

    async def take_probe(self, version: str) -> ProbeOrder:
        """Takes on the probe of a version; NotFoundError when there is none to take."""
        response = await self._ask(self._nodes.TakeProbe, nodes_pb2.TakeProbeRequest(version=version))
        return ProbeOrder(version, response.owner, tuple(response.invocation_tokens), limits_of(response.limits))

    async def report_probe(self, version: str, measures: ProbeMeasures) -> None:
        """Says what the probe that this node took on gave."""
        message = nodes_pb2.ProbeMeasures(**asdict(measures))
        request = nodes_pb2.ReportProbeRequest(version=version, measures=message)
        await self._ask(self._nodes.ReportProbe, request)


def limits_of(limits: tenants_pb2.TenantLimits) -> TenantLimits:
    """Reads a tenant's limits."""
    return TenantLimits(
        max_rank_rows=limits.max_rank_rows, max_arena_bytes=limits.max_arena_bytes, max_host_bytes=limits.max_host_bytes
    )
