"""Bounds of the look-ups of keys that were not seen before, so that unknown keys take little from the holders of known ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from veneer.errors import ResourceExhaustedError, UnauthenticatedError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupLimits:
    """Bounds of look-ups of keys that were not seen before. Look-ups that find a holder are given back.

    Attributes:
        per_s: Refused look-ups a second in all, in the long run.
        burst: As many at once.
        peer_per_s: Those of one peer.
        peer_burst: As many of one peer at once.
        max_running: Look-ups at a time in all.
        max_running_of_peer: Look-ups of one peer at a time.
        max_waiting: Keys that wait for their look-up in all.
        max_waiting_of_peer: Keys of one peer that wait.
        wait_s: How long a key waits, before its call ends RESOURCE_EXHAUSTED.
        refusal_s: How long a refused key is refused without another look-up.
        max_keys: Keys seen, and keys refused, that are remembered.
    """

    per_s: float = 100.0
    burst: float = 500.0
    peer_per_s: float = 10.0
    peer_burst: float = 50.0
    max_running: int = 64
    max_running_of_peer: int = 16
    max_waiting: int = 4096
    max_waiting_of_peer: int = 1024
    wait_s: float = 1.0
    refusal_s: float = 1.0
    max_keys: int = 100_000


class _Bucket:
    """A token bucket."""

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s, self._burst, self._level, self._seen_s = per_s, burst, burst, now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until there is a token."""
        self._level = min(self._burst, self._level + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        return max(0.0, (1.0 - self._level) / self._per_s)

    def take(self, tokens: float) -> None:
        """Takes tokens, or gives them back."""
        self._level = min(self._burst, self._level - tokens)


class KeyLookups:
    """Lets look-ups through. Owned by one event loop.

    Keys seen lately pass: whether they still hold, each look-up says. Others wait for a place, the peers by turns; a peer whose
    keys are refused again and again waits until it may have more refused.

    Args:
        limits: Bounds.
        clock: Monotonic seconds.
    """

    def __init__(self, limits: LookupLimits | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or LookupLimits()
        self._clock = clock
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._refused: OrderedDict[bytes, float] = OrderedDict()
        self._leaders: dict[bytes, asyncio.Future[None]] = {}
        """Keys whose first look-up runs or waits; others with the same key wait for its end."""
        self._bucket = _Bucket(self._limits.per_s, self._limits.burst, clock())
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._running = Counter[str]()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    async def look_up(self, key_digest: bytes, find: Callable[[], Awaitable[_T]], *, peer: str = "") -> _T:
        """Returns what a look-up finds.

        Args:
            key_digest: SHA-256 of the key.
            find: Looks the key up; UnauthenticatedError means that it has no holder.
            peer: Where the call comes from; empty is a peer that bounds its own callers.

        Raises:
            UnauthenticatedError: The key has no holder, or had none less than `refusal_s` ago.
            ResourceExhaustedError: Too many keys without a holder were looked up, and this one was not seen before.
        """
        while key_digest not in self._known:
            until_s = self._refused.get(key_digest)
            if until_s is not None and self._clock() < until_s:
                raise UnauthenticatedError("no valid credential")
            leader = self._leaders.get(key_digest)
            if leader is None:
                return await self._first(key_digest, find, peer)
            await asyncio.shield(leader)
        try:
            found = await find()
        except UnauthenticatedError:
            self._refuse(key_digest)
            raise
        self._see(key_digest)
        return found

    def forget_refusals(self) -> None:
        """Has refused keys looked up again: one may have been created meanwhile."""
        self._refused.clear()

    async def _first(self, key_digest: bytes, find: Callable[[], Awaitable[_T]], peer: str) -> _T:
        ended = self._leaders[key_digest] = asyncio.get_running_loop().create_future()
        try:
            async with self._place(peer):
                try:
                    found = await find()
                except UnauthenticatedError:
                    self._refuse(key_digest)
                    raise
                except BaseException:
                    self._take(peer, -1.0)
                    raise
                self._take(peer, -1.0)
                self._see(key_digest)
                return found
        except ResourceExhaustedError as error:
            ended.set_exception(error)
            ended.exception()  # perhaps nobody waits
            raise
        finally:
            del self._leaders[key_digest]
            if not ended.done():
                ended.set_result(None)

    @contextlib.asynccontextmanager
    async def _place(self, peer: str) -> AsyncIterator[None]:
        limits = self._limits
        queue = self._waiting.setdefault(peer, deque())
        if len(queue) >= limits.max_waiting_of_peer or sum(map(len, self._waiting.values())) >= limits.max_waiting:
            raise self._exhausted(peer)
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._let_in()
        try:
            async with asyncio.timeout(limits.wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._take(peer, -1.0)
                self._leave(peer)
            else:
                self._drop(peer, turn)
            if isinstance(error, TimeoutError):
                raise self._exhausted(peer) from error
            raise
        try:
            yield
        finally:
            self._leave(peer)

    def _let_in(self) -> None:
        """Gives places to those that wait, one of each peer by turns."""
        limits, next_s = self._limits, self._limits.wait_s
        is_moving = True
        while is_moving:
            is_moving = False
            for peer in tuple(self._waiting):
                if not self._waiting[peer]:
                    del self._waiting[peer]
                    continue
                if self._running.total() >= limits.max_running:
                    return  # the next that leaves lets in
                if peer and self._running[peer] >= limits.max_running_of_peer:
                    continue
                if (left_s := self._wait_s(peer)) > 0:
                    next_s = min(next_s, left_s)
                    continue
                turn = self._waiting[peer].popleft()
                self._waiting.move_to_end(peer)
                is_moving = True
                if turn.done():
                    continue  # its caller left a moment ago
                self._running[peer] += 1
                self._take(peer, 1.0)
                turn.set_result(None)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(next_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._let_in()

    def _leave(self, peer: str) -> None:
        self._running[peer] -= 1
        if not self._running[peer]:
            del self._running[peer]
        self._let_in()

    def _drop(self, peer: str, turn: asyncio.Future[None]) -> None:
        turn.cancel()
        if (queue := self._waiting.get(peer)) is not None:
            with contextlib.suppress(ValueError):
                queue.remove(turn)
            if not queue:
                del self._waiting[peer]

    def _wait_s(self, peer: str) -> float:
        now_s = self._clock()
        return max(self._bucket.wait_s(now_s), self._bucket_of(peer).wait_s(now_s) if peer else 0.0)

    def _take(self, peer: str, tokens: float) -> None:
        self._bucket.take(tokens)
        if peer:
            self._bucket_of(peer).take(tokens)

    def _bucket_of(self, peer: str) -> _Bucket:
        bucket = self._buckets.get(peer)
        if bucket is None:
            bucket = self._buckets[peer] = _Bucket(self._limits.peer_per_s, self._limits.peer_burst, self._clock())
            if len(self._buckets) > self._limits.max_keys:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(peer)
        return bucket

    def _exhausted(self, peer: str) -> ResourceExhaustedError:
        return ResourceExhaustedError(
            "too many keys that are not known were shown; this one was not looked up", retry_after_s=max(1.0, self._wait_s(peer))
        )

    def _see(self, key_digest: bytes) -> None:
        self._refused.pop(key_digest, None)
        _remember(self._known, key_digest, None, self._limits.max_keys)

    def _refuse(self, key_digest: bytes) -> None:
        self._known.pop(key_digest, None)
        _remember(self._refused, key_digest, self._clock() + self._limits.refusal_s, self._limits.max_keys)


def _remember(memory: OrderedDict[bytes, _T], key: bytes, value: _T, max_keys: int) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > max_keys:
        memory.popitem(last=False)
