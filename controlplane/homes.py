"""The plan in Redis: written by the leader of a term, read by every control plane.

A script refuses what comes from an older term than the last writer's, so a leader that was paused and replaced writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from controlplane.advice import Staging
from controlplane.fleet_reports import MAX_REPORT_BYTES, head_key
from veneer.controlplane.v1 import hints_pb2, reports_pb2
from veneer.errors import AbortedError

TTL_S: Final = 60.0
"""How long the plan stays that nobody writes again."""

_T = TypeVar("_T")
_BATCH = 500
_MAX_NODES = 64  # of one adapter, that are read
_MAX_HOMES_BYTES = 64 * _MAX_NODES
_MAX_HOMES = 1_000_000
_TERM = "term"  # no adapter's key, which has a slash

_WRITE: Final = """
local term, ttl, whole, num_set = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local known = redis.call('HGET', KEYS[1], 'term')
if known and tonumber(known) > tonumber(term) then return 0 end
if whole == '1' then redis.call('UNLINK', KEYS[1]) elseif not known and whole == '0' then return -1 end
redis.call('HSET', KEYS[1], 'term', term)
local last = 4 + 2 * num_set
for place = 5, last, 2 do redis.call('HSET', KEYS[1], ARGV[place], ARGV[place + 1]) end
for place = last + 1, #ARGV do redis.call('HDEL', KEYS[1], ARGV[place]) end
redis.call('PEXPIRE', KEYS[1], ttl)
return 1
"""

_GET: Final = """
local value = redis.call('HGET', KEYS[1], ARGV[1])
if value and #value > tonumber(ARGV[2]) then return false end
return value
"""


class Homes:
    """Writes and reads the plan. Any task may read; one task writes."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._write = redis.register_script(_WRITE)
        self._get = redis.register_script(_GET)

    async def publish(
        self, base: str, homes: Mapping[str, Sequence[str]], *, gone: Sequence[str] = (), whole: bool, term: int
    ) -> bool:
        """Writes homes of adapters of a base, and takes away those that are gone.

        Returns False, and has written nothing, where Redis has forgotten what these are changes of.

        Args:
            base: Digest of the base.
            homes: Nodes by adapter; those that changed, or all.
            gone: Adapters that have no homes any more.
            whole: Whether these are all, and what else is there goes.
            term: The writer's term.

        Raises:
            AbortedError: A later term has begun.
            RedisError: Redis is away.
        """
        first = "1" if whole else "0"
        items = [(key, hints_pb2.AdapterHomes(nodes=nodes).SerializeToString()) for key, nodes in homes.items()]
        for part in [*_batches(items), ()]:
            fields = [element for item in part for element in item]
            leaving = () if part else gone
            arguments: list[str | bytes | int] = [term, round(TTL_S * 1000), first, len(part), *fields, *leaving]
            answer = await self._write(keys=[_homes_key(base)], args=arguments)
            _all_taken([answer])
            if answer < 0:
                return False
            first = "2"
        return True

    async def publish_staging(self, told: Mapping[str, Staging], *, term: int) -> None:
        """Writes what each node should bring and let go.

        Raises:
            AbortedError: A later term has begun.
            RedisError: Redis is away.
        """
        for part in _batches(list(told.items())):
            async with self._redis.pipeline(transaction=False) as pipeline:
                for node, staging in part:
                    hint = hints_pb2.StagingHint(stage=staging.stage, release=staging.release).SerializeToString()
                    arguments: list[str | bytes | int] = [term, round(TTL_S * 1000), "2", 1, "hint", hint]
                    await self._write(keys=[_staging_key(node)], args=arguments, client=pipeline)
                _all_taken(await pipeline.execute())

    async def read_all(self, base: str) -> dict[str, tuple[str, ...]]:
        """Returns the homes of a base's adapters as they were written last; none of more than a bound.

        Raises:
            RedisError: Redis is away.
        """
        if await self._redis.hlen(_homes_key(base)) > _MAX_HOMES:
            return {}
        found = dict[str, tuple[str, ...]]()
        async for field, value in self._redis.hscan_iter(_homes_key(base), count=_BATCH):
            key = field.decode(errors="replace")
            if key != _TERM and len(value) <= _MAX_HOMES_BYTES:
                found[key] = _nodes(value)
        return found

    async def addresses(self, base: str, key: str) -> tuple[str, ...]:
        """Returns where callers reach an adapter's homes that serve; what is larger than it can be was forged, and is not read.

        Raises:
            RedisError: Redis is away.
        """
        value = await self._get(keys=[_homes_key(base)], args=[key, _MAX_HOMES_BYTES])
        if value is None:
            return ()
        async with self._redis.pipeline(transaction=False) as pipeline:
            for node in _nodes(value):
                await self._get(keys=[head_key(node)], args=["report", MAX_REPORT_BYTES], client=pipeline)
            heads = await pipeline.execute()
        return tuple(address for head in heads if head is not None and (address := _address(head)))


def _all_taken(answers: Sequence[int]) -> None:
    if not all(answers):
        raise AbortedError("another process plans now")


def _nodes(value: bytes | str) -> tuple[str, ...]:
    assert isinstance(value, bytes), "the connection decodes nothing"
    try:
        return tuple(hints_pb2.AdapterHomes.FromString(value).nodes[:_MAX_NODES])
    except DecodeError:
        return ()


def _address(head: bytes) -> str:
    try:
        report = reports_pb2.NodeReport.FromString(head)
    except DecodeError:
        return ""
    return report.address if report.serving else ""


def _homes_key(base: str) -> str:
    return f"veneer:homes:v1:{{{base}}}"


def _staging_key(node: str) -> str:
    return f"veneer:staging:v1:{{{node}}}"


def _batches(items: Sequence[_T]) -> list[Sequence[_T]]:
    return [items[start : start + _BATCH] for start in range(0, len(items), _BATCH)]
