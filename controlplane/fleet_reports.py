"""What data planes say of themselves in Redis, read with bounds; the keys are those of docs/adr/0041-residency-feed.md.

Reports are advice, and may be forged: nodes that the catalogue does not have are never looked for, a report above a bound is
none, and figures are clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from veneer.controlplane.v1 import reports_pb2

MAX_HOLDINGS: Final = 20_000
"""Versions that a node may report."""

MAX_REPORT_BYTES: Final = 4096
"""Size of what a node says of itself."""

_BATCH = 100
_MAX_HOLDING_BYTES = 128
_MAX_BYTES = 1 << 46
_MAX_COUNT = 1 << 16

_READ: Final = """
local head = redis.call('HMGET', KEYS[1], 'epoch', 'sequence', 'report')
local epoch, sequence, report = head[1], head[2], head[3]
if not (epoch and sequence and report) or #epoch > 20 or #sequence > 20 or #report > tonumber(ARGV[4]) then return {} end
if epoch == ARGV[1] and sequence == ARGV[2] then return {epoch, sequence, report} end
local holdings = 'veneer:holdings:v1:' .. ARGV[6] .. ':' .. epoch
if redis.call('HLEN', holdings) > tonumber(ARGV[3]) then return {} end
local held = redis.call('HGETALL', holdings)
for place = 1, #held do if #held[place] > tonumber(ARGV[5]) then return {} end end
return {epoch, sequence, report, held}
"""


@dataclass(frozen=True, slots=True)
class Holding:
    """A version on a node.

    Attributes:
        on_device: Whether it is on the device; else in host memory, on disk, or on its way.
        max_rank: Largest rank; 0 where it is not known.
        size_bytes: Bytes of its image.
        uses: Leases given since the node came to hold it.
    """

    on_device: bool
    max_rank: int
    size_bytes: int
    uses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node as it reported last.

    Attributes:
        node: Its identifier.
        base_digest: Base that it serves.
        epoch: Start of its engine.
        serving: Whether it takes requests.
        address: Where callers reach it, as it says.
        max_running: Requests that run at the same time at most.
        slots: Adapters that its device holds at most.
        device_bytes: Memory for them.
        holdings: What it holds, by version.
    """

    node: str
    base_digest: str
    epoch: int
    serving: bool
    address: str
    max_running: int
    slots: int
    device_bytes: int
    holdings: Mapping[str, Holding]


class FleetReports:
    """Reads reports; holdings that have not changed are not read again. Owned by one task.

    Args:
        redis: Where they are.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._read = redis.register_script(_READ)
        self._known: dict[str, tuple[bytes, bytes, Mapping[str, Holding]]] = {}

    async def read(self, nodes: Sequence[str]) -> dict[str, NodeState]:
        """Returns the state of those of these nodes that report.

        Raises:
            RedisError: Redis is away.
        """
        states = dict[str, NodeState]()
        for start in range(0, len(nodes), _BATCH):
            part = nodes[start : start + _BATCH]
            async with self._redis.pipeline(transaction=False) as pipeline:
                for node in part:
                    epoch, sequence, _ = self._known.get(node, (b"", b"", {}))
                    limits = (MAX_HOLDINGS, MAX_REPORT_BYTES, _MAX_HOLDING_BYTES)
                    await self._read(keys=[head_key(node)], args=[epoch, sequence, *limits, f"{{{node}}}"], client=pipeline)
                answers = await pipeline.execute()
            for node, answer in zip(part, answers, strict=True):
                if (state := self._state(node, answer)) is not None:
                    states[node] = state
        self._known = {node: known for node, known in self._known.items() if node in states}
        return states

    def _state(self, node: str, answer: Sequence[Any]) -> NodeState | None:
        if not answer:
            return None
        report = reports_pb2.NodeReport()
        try:
            report.ParseFromString(answer[2])
            holdings = self._known[node][2] if len(answer) == 3 else _holdings(answer[3])
        except (DecodeError, UnicodeDecodeError, KeyError):
            return None
        if report.node != node or str(report.epoch).encode() != answer[0]:
            return None
        self._known[node] = (answer[0], answer[1], holdings)
        return NodeState(
            node=node,
            base_digest=report.base_digest,
            epoch=report.epoch,
            serving=report.serving,
            address=report.address,
            max_running=min(max(report.max_running, 1), _MAX_COUNT),
            slots=min(report.slots, _MAX_COUNT),
            device_bytes=min(report.device_bytes_total, _MAX_BYTES),
            holdings=holdings,
        )


def head_key(node: str) -> str:
    """Returns the key under which a node reports."""
    return f"veneer:node:v1:{{{node}}}"


def _holdings(pairs: Sequence[bytes]) -> dict[str, Holding]:
    found = dict[str, Holding]()
    for version, value in zip(pairs[::2], pairs[1::2], strict=True):
        holding = reports_pb2.NodeHolding.FromString(value)
        found[version.decode("ascii")] = Holding(
            holding.tier == reports_pb2.HOLDING_TIER_DEVICE,
            min(holding.max_rank, _MAX_COUNT),
            min(holding.size_bytes, _MAX_BYTES),
            holding.uses,
        )
    return found
