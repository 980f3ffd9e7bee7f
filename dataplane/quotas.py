"""What a tenant may use at most in all, kept by this node out of the shares that the control plane leases to it.

A share is asked for when a tenant's request comes and the share held does not do, and renewed while the tenant is active. While
the control plane is unreachable the last share goes on, up to a hard age. Tenants without quotas cost nothing here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal, TypedDict

from dataplane.resolution import Caller, TenantQuotas
from dataplane.windows import Window
from veneer.errors import PermissionDeniedError, ResourceExhaustedError, UnavailableError, VeneerError, Violation

_log = logging.getLogger(__name__)
_BATCH = 100
_ACTIVE_S = 60.0
_REFUSED_S = 10  # what was refused of late is still wanted
_PAUSE_S = 1.0  # between two questions that the control plane cannot meet
_MAX_ASKS = 3

Kind = Literal["requests", "tokens", "streams"]
KINDS: Final[tuple[Kind, ...]] = ("requests", "tokens", "streams")
_NAMES: Final[dict[Kind, str]] = {
    "requests": "max_requests_per_minute",
    "tokens": "max_tokens_per_minute",
    "streams": "max_streams",
}


class Amounts(TypedDict):
    """So much of each of what is leased."""

    requests: int
    tokens: int
    streams: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What the control plane is told of a tenant: what is held, used and wanted."""

    tenant: str
    ticket: bytes
    held: Amounts
    used: Amounts
    wanted: Amounts


@dataclass(frozen=True, slots=True)
class Leased:
    """Shares by tenant, and how long they last."""

    shares: dict[str, Amounts]
    lifetime_s: float


class QuotaExceededError(ResourceExhaustedError):
    """A quota of the tenant is used up, as far as this node may admit."""


def _none() -> Amounts:
    return Amounts(requests=0, tokens=0, streams=0)


class _Book:
    """What a tenant uses on this node, and what it may."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.quotas = TenantQuotas()
        self.ticket = b""
        self.share: Amounts | None = None
        self.leased_s = 0.0
        self.seen_s = clock()
        self.streams = 0
        self.reserved = 0  # tokens that running requests may still use
        self.requests, self.tokens = Window(clock=clock), Window(clock=clock)
        self.refused = {kind: Window(_REFUSED_S, clock=clock) for kind in KINDS}
        self.pending = _none()
        self.exhausted_s: dict[Kind, float] = {}
        self.answer: asyncio.Future[None] | None = None

    @property
    def used(self) -> Amounts:
        return Amounts(requests=self.requests.total, tokens=self.tokens.total + self.reserved, streams=self.streams)

    def demand(self, tenant: str) -> Demand:
        used = self.used
        wanted = _none()
        for kind in KINDS:
            wanted[kind] = used[kind] + self.pending[kind] + self.refused[kind].total
        return Demand(tenant, self.ticket, self.share or _none(), used, wanted)

    def lacks(self, needs: Amounts) -> Kind | None:
        """What the share does not allow of this, if anything."""
        used, share = self.used, self.share or _none()
        for kind in KINDS:
            limit = getattr(self.quotas, kind)
            if limit and needs[kind] and used[kind] + needs[kind] > min(share[kind], limit):
                return kind
        return None

    def is_idle(self) -> bool:
        return not self.streams and self.answer is None and self._clock() - self.seen_s > _ACTIVE_S


@dataclass(slots=True)
class Admission:
    """A request that was admitted; counts what it uses. Owned by the request's handler."""

    _quotas: Quotas | None = None
    _book: _Book | None = None
    _reserved: int = 0
    _prompt: int = 0
    _generated: int = 0
    _is_begun: bool = False

    async def reserve(self, *, prompt: int, output: int) -> None:
        """Takes the tokens that the request may use at most.

        Raises:
            QuotaExceededError: They are more than may be used now.
        """
        if self._quotas is None or self._book is None:
            return
        tokens = prompt + output
        await self._quotas.fit(self._book, Amounts(requests=0, tokens=tokens, streams=0))
        self._book.reserved += tokens
        self._reserved, self._prompt = tokens, prompt

    def began(self) -> None:
        """The engine has the request: its prompt is used from now on, also if nothing ever comes of it."""
        self._is_begun = True

    def turned_away(self) -> None:
        """The engine did not take it after all."""
        self._is_begun = False

    def saw(self, num_tokens: int) -> None:
        """Tokens were generated."""
        self._is_begun = True
        self._generated += num_tokens

    def close(self) -> None:
        """Gives back what was not used."""
        if self._book is not None:
            self._book.reserved -= self._reserved
            if self._is_begun:
                self._book.tokens.add(self._prompt + self._generated)


class Quotas:
    """Owned by the event loop; `run` is its one task.

    Args:
        lease: Asks the control plane for shares.
        hard_age_s: How long a share goes on while the control plane is unreachable.
        on_refused: Hears which quota refused a request.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        lease: Callable[[Sequence[Demand]], Awaitable[Leased]],
        *,
        hard_age_s: float = 60.0,
        on_refused: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease = lease
        self._hard_age_s = hard_age_s
        self._on_refused = on_refused
        self._clock = clock
        self._books: dict[str, _Book] = {}
        self._poked = asyncio.Event()
        self._interval_s = 2.0

    def share(self, tenant: str) -> Amounts:
        """What this node may admit of a tenant in a minute, as it was told last."""
        book = self._books.get(tenant)
        return _none() if book is None or book.share is None else book.share

    async def renew(self, tenant: str) -> None:
        """Has the share of a tenant that is active here asked for now rather than in time before it ends."""
        if (book := self._books.get(tenant)) is not None:
            await self._ask(book, _none())

    @asynccontextmanager
    async def admitted(self, caller: Caller, streams: int) -> AsyncIterator[Admission]:
        """Counts a request of the caller's tenant for the length of the block.

        Raises:
            QuotaExceededError: A quota does not allow it.
            UnavailableError: The control plane is unreachable, and there is no share that is young enough.
        """
        if not caller.quotas:
            yield Admission()
            return
        book = self._books.get(caller.tenant)
        if book is None:
            book = self._books[caller.tenant] = _Book(self._clock)
        book.quotas, book.ticket, book.seen_s = caller.quotas, caller.ticket, self._clock()
        await self.fit(book, Amounts(requests=1, tokens=1, streams=streams))
        book.requests.add(1)
        book.streams += streams
        admission = Admission(self, book)
        try:
            yield admission
        finally:
            admission.close()
            book.streams -= streams

    async def fit(self, book: _Book, needs: Amounts) -> None:
        """Returns when this may be used; there is no wait between that and the caller's next step.

        Raises:
            QuotaExceededError: It may not.
            UnavailableError: The control plane is unreachable, and there is no share that is young enough.
        """
        for _ in range(_MAX_ASKS):
            if self._is_stale(book):
                await self._ask(book, needs)
                if self._is_stale(book):
                    raise UnavailableError("no share of the tenant's quotas: the control plane is unreachable", retry_after_s=1.0)
            lacking = book.lacks(needs)
            if lacking is None:
                return
            if needs[lacking] > getattr(book.quotas, lacking) or book.exhausted_s.get(lacking, 0.0) > self._clock():
                break
            await self._ask(book, needs)
        lacking = book.lacks(needs)
        if lacking is not None:
            book.refused[lacking].add(needs[lacking])
            self._on_refused(_NAMES[lacking])
            raise _refusal(book, lacking, needs[lacking])

    async def run(self) -> None:
        """Asks for shares until cancelled: at once where a request waits, and for all in time before they end.

        When all are due does not hang on who asks meanwhile: a tenant that asks all the time must not keep others' leases from
        being renewed, which would end and be given to other replicas while this one goes on by them.
        """
        now_s = asyncio.get_running_loop().time
        renewed_s = now_s()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(renewed_s + self._interval_s if self._books else None):
                    await self._poked.wait()
            if now_s() < renewed_s + self._interval_s:
                await self._renew([tenant for tenant, book in self._books.items() if book.answer is not None])
                continue
            renewed_s = now_s()
            self._books = {tenant: book for tenant, book in self._books.items() if not book.is_idle()}
            await self._renew(list(self._books))

    def _is_stale(self, book: _Book) -> bool:
        return book.share is None or self._clock() - book.leased_s > self._hard_age_s

    async def _ask(self, book: _Book, needs: Amounts) -> None:
        """Has the share asked for, with these needs among what is wanted, and waits for the answer or its failure."""
        if book.answer is None:
            book.answer = asyncio.get_running_loop().create_future()
        for kind in KINDS:
            book.pending[kind] += needs[kind]
        self._poked.set()
        try:
            await asyncio.shield(book.answer)
        finally:
            for kind in KINDS:
                book.pending[kind] -= needs[kind]

    async def _renew(self, tenants: Sequence[str]) -> None:
        self._poked.clear()
        for start in range(0, len(tenants), _BATCH):
            await self._renew_batch(tenants[start : start + _BATCH])

    async def _renew_batch(self, tenants: Sequence[str]) -> None:
        books = {tenant: self._books[tenant] for tenant in tenants}
        waiting = [book.answer for book in books.values() if book.answer is not None]
        for book in books.values():
            book.answer = None  # who comes from now on is not among what is asked for
        try:
            await self._lease_for(books)
        finally:
            for answer in waiting:
                answer.set_result(None)

    async def _lease_for(self, books: Mapping[str, _Book]) -> None:
        demands = [book.demand(tenant) for tenant, book in books.items()]
        started_s = self._clock()
        try:
            leased = await self._lease(demands)
        except PermissionDeniedError:
            if len(books) > 1:  # one ticket is old; it must not cost the others their shares
                for tenant, book in books.items():
                    await self._lease_for({tenant: book})
        except VeneerError as error:
            _log.warning("quotas cannot be leased; the last shares go on", extra={"status": error.status})
        else:
            self._interval_s = leased.lifetime_s / 3
            for demand in demands:
                self._take(books[demand.tenant], demand, leased.shares.get(demand.tenant, _none()), started_s)

    def _take(self, book: _Book, demand: Demand, share: Amounts, started_s: float) -> None:
        book.share, book.leased_s = share, started_s
        for kind in KINDS:
            if share[kind] < demand.wanted[kind]:
                book.exhausted_s[kind] = self._clock() + _PAUSE_S
            else:
                book.exhausted_s.pop(kind, None)


def _refusal(book: _Book, kind: Kind, need: int) -> QuotaExceededError:
    limit, used, share = getattr(book.quotas, kind), book.used[kind], (book.share or _none())[kind]
    name = _NAMES[kind]
    if need > limit:
        text = f"{need} {kind} are asked for, the quota allows {limit} in all"
        retry_after_s = None
    else:
        text = f"{limit} {kind} in all, of which this data plane may admit {share} now; {used} are used and {need} more asked for"
        window = {"requests": book.requests, "tokens": book.tokens}.get(kind)
        free = max(min(used + need - share, used), 0)
        retry_after_s = 1.0 if window is None or not free else max(window.wait_s(free), 1.0)
    return QuotaExceededError(
        f"quota {name}: {text}", violations=[Violation(f"quotas.{name}", text)], retry_after_s=retry_after_s
    )
