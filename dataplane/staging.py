"""Reads from Redis what the control plane would have this node hold; docs/adr/0042-placement.md has the key.

Advice: it is acted on at a bounded rate, and a version that is brought is checked as any other. What may be let go is let go only
where there is no room for what should come, and never while it is in use.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Iterable

import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.exceptions
from google.protobuf.message import DecodeError

from dataplane.hints import Allowance
from veneer.controlplane.v1 import hints_pb2
from veneer.errors import VeneerError

_log = logging.getLogger(__name__)
_VERSION = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 64 << 10
_MAX_PAUSE_S = 30.0


def staging_key(node: str) -> str:
    """Returns the key of what a node should hold."""
    return f"veneer:staging:v1:{{{node}}}"


class StagingReader:
    """Acts on the advice for as long as `run` runs. Owned by the event loop.

    Args:
        url: Address of Redis.
        identify: Returns the node's identifier in the catalogue.
        stage: Has a version brought, if there is room.
        release: Lets a version go.
        is_in_use: Whether a version stays whatever the advice says.
        is_full: Whether there is no room for more.
        staged: Bounds the versions that are brought.
        released: Bounds those that are let go.
        interval_s: Time between looks.
    """

    def __init__(
        self,
        url: str,
        *,
        identify: Callable[[], Awaitable[str]],
        stage: Callable[[str], None],
        release: Callable[[str], None],
        is_in_use: Callable[[str], bool],
        is_full: Callable[[], bool],
        staged: Allowance,
        released: Allowance,
        interval_s: float = 2.0,
    ) -> None:
        self._identify = identify
        self._stage = stage
        self._release = release
        self._is_in_use = is_in_use
        self._is_full = is_full
        self._staged = staged
        self._released = released
        self._interval_s = interval_s
        self._node = ""
        self._redis = redis.asyncio.from_url(
            url,
            socket_connect_timeout=2.0,
            socket_timeout=2.0,
            retry=redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0),
        )

    async def run(self) -> None:
        """Looks until cancelled."""
        pause_s = self._interval_s
        try:
            while True:
                await asyncio.sleep(pause_s * random.uniform(0.9, 1.1))
                try:
                    await self.look()
                    pause_s = self._interval_s
                except (VeneerError, redis.exceptions.RedisError, OSError, TimeoutError) as error:
                    if (task := asyncio.current_task()) is not None and task.cancelling():
                        raise asyncio.CancelledError from error  # closing the connection failed and took its place
                    pause_s = min(pause_s * 2, _MAX_PAUSE_S)
                    _log.warning("what the node should hold cannot be read", extra={"cause": type(error).__name__})
        finally:
            await self._redis.aclose()

    async def look(self) -> None:
        """Reads the advice once and acts on it.

        Raises:
            VeneerError: The control plane does not say who this node is.
            RedisError: Redis is away.
        """
        if not self._node:
            self._node = await self._identify()
        key = staging_key(self._node)
        if await self._redis.hstrlen(key, "hint") > _MAX_BYTES:
            return
        raw = await self._redis.hget(key, "hint")
        if not isinstance(raw, bytes) or len(raw) > _MAX_BYTES:
            return
        try:
            hint = hints_pb2.StagingHint.FromString(raw)
        except DecodeError:
            return
        if hint.stage:
            self._make_room(hint.release)
        for version in _digests(hint.stage):
            if not self._staged.take():
                return
            self._stage(version)

    def _make_room(self, versions: Iterable[str]) -> None:
        for version in _digests(versions):
            if not self._is_full():
                return
            if self._is_in_use(version):
                continue
            if not self._released.take():
                return
            self._release(version)


def _digests(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if _VERSION.fullmatch(text)]
