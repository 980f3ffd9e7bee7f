"""What a request may use and what it did: the tenant's quotas before it runs, the journal when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from dataplane.binding import Served
from dataplane.quotas import Admission, Quotas
from dataplane.resolution import Answer, Resolution
from dataplane.token_stream import Piece
from dataplane.usage import Use
from veneer.errors import ResourceExhaustedError, VeneerError

_TELL_TOKENS = 128


class Entry(Protocol):
    """What a request says of its use; see `dataplane.journal.Entry`."""

    def tell(self, use: Use, /) -> None:
        """Notes what it has used so far."""

    def end(self, use: Use, /) -> None:
        """Notes what it used in all."""


@dataclass(slots=True)
class Meter:
    """Counts one request. Owned by its handler."""

    _answer: Answer
    _admission: Admission
    _entry: Entry
    _open: int
    _prompt: int = 0
    _cached: int = 0
    _output: int = 0
    _told: int = 0
    _served: Served | None = None
    _is_noted: bool = False

    async def reserve(self, *, prompt: int, output: int) -> None:
        """See `Admission.reserve`."""
        self._prompt = prompt
        await self._admission.reserve(prompt=prompt, output=output)

    def began(self, served: Served) -> None:
        """The engine has the request, for this to answer: its prompt counts however it ends.

        Nobody knows here how much of a prompt was computed when its caller leaves before the first token; what would cost nothing
        then, could be had without end.
        """
        self._served = served
        self._admission.began()
        self._tell()

    def turned_away(self) -> None:
        """The engine refused the request before it did anything for it."""
        if not self._output:
            self._served = None
            self._admission.turned_away()

    def saw(self, served: Served | None, piece: Piece) -> None:
        """A piece is about to go out; with the last one of all choices the request is noted before its caller hears of it."""
        self._served = served or self._served
        self._output += len(piece.ids)
        self._admission.saw(len(piece.ids))
        if piece.end is not None:
            self._cached = max(self._cached, piece.end.cached_tokens)
            self._open -= 1
            if not self._open:
                self.note("OK")
        if self._output - self._told >= _TELL_TOKENS and not self._is_noted:
            self._tell()

    def note(self, status: str) -> None:
        """Notes what the request used, once."""
        if self._is_noted:
            return
        self._is_noted = True
        self._entry.end(self._use(status))

    def _tell(self) -> None:
        """Notes what would be known of the request if the process were killed now, as its caller would see it."""
        self._told = self._output
        self._entry.tell(self._use("UNAVAILABLE"))

    def _use(self, status: str) -> Use:
        served = self._served
        version = "" if served is None or served.version is None else served.version
        return Use(
            self._answer.caller.tenant,
            served.owner if served is not None and version else "",
            served.adapter if served is not None and version else "",
            version,
            _ticket(self._answer, version).hex(),
            status,
            int(time.time()),
            0 if served is None else self._prompt,
            self._cached,
            self._output,
        )


class Metering:
    """Owned by the event loop.

    Args:
        quotas: What tenants may use at most in all.
        entry: Returns what notes the use of one request.
    """

    def __init__(self, quotas: Quotas, entry: Callable[[], Entry]) -> None:
        self._quotas = quotas
        self._entry = entry

    @asynccontextmanager
    async def request(self, answer: Answer, streams: int) -> AsyncIterator[Meter]:
        """Counts a request for the length of the block; one that is refused here is not noted.

        Raises:
            QuotaExceededError: A quota does not allow it.
            UnavailableError: The quotas are not known.
        """
        async with self._quotas.admitted(answer.caller, streams) as admission:
            meter = Meter(answer, admission, self._entry(), streams)
            status = "OK"
            try:
                yield meter
            except VeneerError as error:
                status = error.status
                if _is_overload(error):
                    meter.turned_away()
                raise
            except (asyncio.CancelledError, GeneratorExit):
                status = "CANCELLED"
                raise
            except BaseException:
                status = "INTERNAL"
                raise
            finally:
                meter.note(status)


def _is_overload(error: VeneerError) -> bool:
    """Whether the engine's queue did not take a request.

    Only such an error of the engine says when to come again, and those of the loader have classes of their own.
    """
    return type(error) is ResourceExhaustedError and error.retry_after_s is not None


def _ticket(answer: Answer, version: str) -> bytes:
    if version and isinstance(answer.outcome, Resolution):
        for arm in answer.outcome.arms:
            for one in (arm, arm.previous):
                if one is not None and one.version == version:
                    return one.ticket
    return answer.caller.ticket
