"""Keeps in Redis what this node holds, for as long as it lives; docs/adr/0041-residency-feed.md has the keys."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.exceptions

from dataplane.metrics import Metrics
from dataplane.residency_feed import Held, Position, ResidencyFeed
from veneer.controlplane.v1 import reports_pb2
from veneer.errors import VeneerError

_log = logging.getLogger(__name__)
_MAX_PAUSE_S = 5.0
_TIERS = {
    "disk": reports_pb2.HOLDING_TIER_DISK,
    "host": reports_pb2.HOLDING_TIER_HOST,
    "loading": reports_pb2.HOLDING_TIER_LOADING,
    "device": reports_pb2.HOLDING_TIER_DEVICE,
}
_TOLD, _START_AGAIN, _REPLACED = 1, 0, -1

_WRITE = """
local head, holdings = KEYS[1], KEYS[2]
local epoch, sequence, before, count, ttl, report, num_held = unpack(ARGV, 1, 7)
local known = redis.call('HMGET', head, 'epoch', 'sequence')
if known[1] and tonumber(known[1]) > tonumber(epoch) then return -1 end
if before == '' then
  if known[1] and known[1] ~= epoch then redis.call('UNLINK', string.sub(holdings, 1, -1 - #epoch) .. known[1]) end
  redis.call('UNLINK', holdings)
elseif known[1] ~= epoch or known[2] ~= before then
  return 0
end
local last = 7 + 2 * num_held
for place = 8, last, 2 do redis.call('HSET', holdings, ARGV[place], ARGV[place + 1]) end
for place = last + 1, #ARGV do redis.call('HDEL', holdings, ARGV[place]) end
if redis.call('HLEN', holdings) ~= tonumber(count) then
  redis.call('HSET', head, 'sequence', '')
  return 0
end
redis.call('HSET', head, 'epoch', epoch, 'sequence', sequence, 'report', report)
redis.call('PEXPIRE', head, ttl)
redis.call('PEXPIRE', holdings, ttl)
return 1
"""
_REMOVE = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
return redis.call('UNLINK', KEYS[1], KEYS[2])
"""


def head_key(node: str) -> str:
    """Returns the key of a node's head."""
    return f"veneer:node:v1:{{{node}}}"


def holdings_key(node: str, epoch: int) -> str:
    """Returns the key of what a node holds in an epoch."""
    return f"veneer:holdings:v1:{{{node}}}:{epoch}"


class ResidencyReporter:
    """Writes the feed to Redis for as long as `run` runs. Owned by the event loop.

    After any failure, and when Redis knows another state than was told last, everything is told anew.

    Args:
        url: Address of Redis.
        feed: What this node holds.
        identify: Returns the node's identifier in the catalogue.
        describe: Returns the node's load; the reporter adds identifier, epoch and sequence.
        metrics: Counts reports.
        interval_s: Time between reports.
        ttl_s: How long a report is kept that no other one follows.
    """

    def __init__(
        self,
        url: str,
        *,
        feed: ResidencyFeed,
        identify: Callable[[], Awaitable[str]],
        describe: Callable[[], reports_pb2.NodeReport],
        metrics: Metrics,
        interval_s: float = 1.0,
        ttl_s: float = 15.0,
    ) -> None:
        self._feed = feed
        self._identify = identify
        self._describe = describe
        self._metrics = metrics
        self._interval_s = interval_s
        self._ttl_ms = round(ttl_s * 1000)
        self._node = ""
        self._told: Position | None = None
        self._redis = redis.asyncio.from_url(
            url,
            socket_connect_timeout=2.0,
            socket_timeout=2.0,
            socket_keepalive=True,
            retry=redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0),
        )
        self._write = self._redis.register_script(_WRITE)
        self._remove = self._redis.register_script(_REMOVE)

    async def run(self) -> None:
        """Reports until cancelled."""
        pause_s = self._interval_s
        while True:
            try:
                pause_s = self._interval_s if await self.report() else _MAX_PAUSE_S
            except (VeneerError, redis.exceptions.RedisError, OSError, TimeoutError) as error:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError from error  # closing the connection failed and took the cancellation's place
                self._told = None
                pause_s = min(pause_s * 2, _MAX_PAUSE_S)
                self._metrics.reported("failed")
                _log.warning("what the node holds cannot be reported", extra={"cause": type(error).__name__})
            await asyncio.sleep(pause_s * random.uniform(0.9, 1.1))

    async def report(self) -> bool:
        """Tells what changed since the last report, or everything; returns False when a newer process reports for this node.

        Raises:
            VeneerError: The control plane does not say who this node is.
            RedisError: Redis is away.
        """
        if not self._node:
            self._node = await self._identify()
        told = await self._tell()
        if told == _START_AGAIN:
            self._told = None
            told = await self._tell()
        self._metrics.reported({_TOLD: "told", _REPLACED: "replaced"}.get(told, "failed"))
        if told == _REPLACED:
            _log.warning("a newer process reports for this node", extra={"node": self._node})
        return told == _TOLD

    async def close(self) -> None:
        """Takes the node's keys away and closes the connection; where that fails, they end by themselves."""
        try:
            if self._node and self._told is not None:
                epoch = self._told.epoch
                await self._remove(keys=[head_key(self._node), holdings_key(self._node, epoch)], args=[epoch])
        except (redis.exceptions.RedisError, OSError, TimeoutError):
            pass
        finally:
            await self._redis.aclose()

    async def _tell(self) -> int:
        update = self._feed.read(self._told)
        position, before = update.position, self._told
        report = self._describe()
        report.node, report.epoch, report.sequence = self._node, position.epoch, position.sequence
        arguments: list[Any] = [
            position.epoch,
            position.sequence,
            "" if update.is_snapshot or before is None else before.sequence,
            len(self._feed),
            self._ttl_ms,
            report.SerializeToString(),
            len(update.held),
        ]
        for held in update.held:
            arguments += (held.version, _message(held).SerializeToString())
        arguments += update.gone
        self._told = None  # unless Redis takes it
        told = int(await self._write(keys=[head_key(self._node), holdings_key(self._node, position.epoch)], args=arguments))
        if told == _TOLD:
            self._told = position
        return told


def _message(held: Held) -> reports_pb2.NodeHolding:
    return reports_pb2.NodeHolding(
        tier=_TIERS[held.tier],
        max_rank=held.rank,
        size_bytes=held.size_bytes,
        leases=held.leases,
        epoch=held.epoch,
        uses=held.uses,
    )
