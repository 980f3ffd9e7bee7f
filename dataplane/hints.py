"""Listens to placement hints in Redis. A hint is advice: it makes the data plane look sooner at the truth, and nothing else.

Lost, late, doubled, forged or unreadable hints cost at most a bounded number of reads. The subscription is supervised: whenever
it is made anew, the change feed is read, since hints may have been missed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.exceptions
from google.protobuf.message import DecodeError

from veneer.controlplane.v1 import hints_pb2

_log = logging.getLogger(__name__)
_CHANNEL = "veneer:hints:v1"
_VERSION = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 1024
_MAX_TENANTS = 4096
_IGNORED_PAUSE_S = (
    0.001  # so a flood costs a bounded part of the event loop's time; what is not read waits in Redis, up to its limit
)


@dataclass(frozen=True, slots=True)
class Hint:
    """What a hint asks to look at.

    Attributes:
        version: Version to stage; empty when the hint names none.
        tenant: Who owns it, as the hint says.
        nodes: Identifiers of the nodes that are told to stage it; empty when all are, by a control plane of before.
    """

    version: str
    tenant: str = ""
    nodes: tuple[str, ...] = ()


class Allowance:
    """How many hints may be acted on: a bucket that fills with time. Owned by the event loop.

    Args:
        per_s: Hints a second in the long run.
        burst: Hints at once.
        clock: Monotonic seconds.
    """

    def __init__(self, *, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._level = float(burst)
        self._seen_s = clock()

    @property
    def level(self) -> float:
        """How many there are now."""
        now_s = self._clock()
        self._level = min(self._burst, self._level + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        return self._level

    def take(self) -> bool:
        """Takes one, if there is one."""
        if self.level < 1:
            return False
        self._level -= 1
        return True


class TenantAllowance:
    """An allowance half of which is kept for tenants that take little: each has a quarter of it. Owned by the event loop.

    So a tenant alone may have nearly all of it, and one whose hints come in a flood leaves some to each of the others.

    Args:
        per_s: Hints a second in the long run.
        burst: Hints at once.
        clock: Monotonic seconds.
    """

    def __init__(self, *, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._all = Allowance(per_s=per_s, burst=burst, clock=clock)
        self._half = burst / 2
        self._make_own = partial(Allowance, per_s=per_s / 4, burst=max(1, burst // 4), clock=clock)
        self._own: OrderedDict[str, Allowance] = OrderedDict()

    def take(self, tenant: str) -> bool:
        """Takes one for a tenant, if it may have one."""
        if self._all.level - 1 < self._half:
            own = self._own.pop(tenant, None) or self._make_own()
            self._own[tenant] = own
            if len(self._own) > _MAX_TENANTS:
                self._own.popitem(last=False)
            if not own.take():
                return False
        return self._all.take()


def read_hint(payload: Any) -> Hint | None:
    """Returns the hint in a message, or None for anything that is none."""
    if not isinstance(payload, bytes) or len(payload) > _MAX_BYTES:
        return None
    try:
        message = hints_pb2.Hint.FromString(payload)
    except DecodeError:
        return None
    if message.version and not _VERSION.fullmatch(message.version):
        return None
    return Hint(message.version, message.tenant, tuple(message.nodes))


class HintSubscriber:
    """Subscribes to hints for as long as `run` runs. Owned by the event loop.

    Args:
        url: Address of Redis.
        on_hint: Called with each hint that is acted on.
        on_connect: Called whenever the subscription was made anew.
        allowance: Bounds the hints that are acted on.
        heartbeat_s: Time without any message after which the connection is probed; after three it counts as dead.
    """

    def __init__(
        self,
        url: str,
        *,
        on_hint: Callable[[Hint], None],
        on_connect: Callable[[], None],
        allowance: TenantAllowance,
        heartbeat_s: float = 5.0,
    ) -> None:
        self._url = url
        self._on_hint = on_hint
        self._on_connect = on_connect
        self._allowance = allowance
        self._heartbeat_s = heartbeat_s
        self.connected = False
        self.num_ignored = 0

    async def run(self) -> None:
        """Subscribes, and again after every failure, until cancelled."""
        backoff_s = 0.1
        while True:
            try:
                await self._subscribe()
            except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError from error  # closing the connection failed and took the cancellation's place
                if self.connected:
                    backoff_s = 0.1
                _log.warning("hints are not available", extra={"cause": type(error).__name__})
            finally:
                self.connected = False
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
            backoff_s = min(backoff_s * 2, 2.0)

    async def _subscribe(self) -> None:
        client = redis.asyncio.from_url(
            self._url,
            socket_connect_timeout=2.0,
            socket_keepalive=True,
            retry=redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0),
        )
        try:
            async with client.pubsub() as subscription:
                await subscription.subscribe(_CHANNEL)
                await self._listen(subscription)
        finally:
            await client.aclose()

    async def _listen(self, subscription: Any) -> None:
        silent = 0
        while True:
            message = await subscription.get_message(timeout=self._heartbeat_s)
            if message is None:
                silent += 1
                if silent >= 3:
                    raise TimeoutError("Redis does not answer")
                await subscription.ping()
                continue
            silent = 0
            if message["type"] == "subscribe":
                self.connected = True
                self._on_connect()
            elif message["type"] == "message" and not self._handle(message["data"]):
                await asyncio.sleep(_IGNORED_PAUSE_S)

    def _handle(self, payload: Any) -> bool:
        """Acts on a hint; returns False when it is ignored."""
        hint = read_hint(payload)
        if hint is None or not self._allowance.take(hint.tenant):
            self.num_ignored += 1
            return False
        self._on_hint(hint)
        return True
