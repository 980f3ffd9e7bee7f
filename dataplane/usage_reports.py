"""Sends what the journals say to the control plane, each record once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from dataplane import journal as journals
from dataplane.journal import Entry, Journal, Line
from dataplane.usage import Use, UseCounts, UseKey, key_of, summed
from veneer.errors import (
    AbortedError,
    DeadlineExceededError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    VeneerError,
)

_log = logging.getLogger(__name__)
_BATCH = 1000
_MAX_BYTES = 16 << 20
_LAST_S = 5.0
_HOLD_S = 60.0
_NEVER = 10**12
"""A number to which no journal comes: of a report that begins there only the tickets are looked at."""


class Report(Protocol):
    """Tells the control plane of records; see `dataplane.report_client`."""

    async def __call__(  # noqa: D102
        self, journal: str, first: int, last: int, uses: Mapping[UseKey, UseCounts], /, *, is_over: bool = False
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a journal was sent.

    Attributes:
        offset: Where the next line begins.
        sequence: Number of the line before it.
        taken: Number up to which reports were taken; smaller where nothing was wanted of the lines since, larger where an earlier
            report came through whose answer did not.
    """

    offset: int = 0
    sequence: int = 0
    taken: int = 0


class _SetBackError(OSError):
    """The control plane took records that it does not know any more: its database is a copy from before."""


_FOR_NOW = (
    AbortedError,
    DeadlineExceededError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    _SetBackError,
)
"""Failures that say nothing of the journal that was sent: it is sent again at the next look."""


class _Read(Protocol):
    """Reads the next lines from an offset on; see `dataplane.journal.read`."""

    def __call__(self, offset: int, *, max_records: int) -> tuple[list[Line], int]: ...


@dataclass(slots=True)
class _Live:
    """A journal of this process, and how far it was sent."""

    journal: Journal
    place: _Place = field(default_factory=_Place)


class UsageReporter:
    """Owns this process's journals, and sends them and those that earlier processes left. Owned by the event loop.

    The last journal takes new requests; one that has grown large only the ends of those that it has, so that each request is
    in one journal. What requests had used that have no end when nobody writes to their journal any more is sent after its
    lines, numbered on from them.

    A report says which records it sums up; the control plane takes it only when it begins right after the last one that it took,
    and answers with that. So what is sent twice, or whose answer is lost, counts once, and the next report goes on from there.
    Records whose tickets are refused, and lines that do not read, are left out of reports and set aside; their numbers are
    passed over. What was sent to its end stays, under another name, until the control plane knows
    that nothing more will come of it.

    Every journal is sent by itself. One that is refused as a whole, or cannot be read, is held: it stays as it is, is tried again
    once a minute, and holds no other up.

    Args:
        folder: Where journals lie.
        report: Tells the control plane.
        on_lost: Hears of records that the disk did not take.
        on_held: Hears after each look how many journals are held.
        interval_s: Time between two looks.
    """

    def __init__(
        self,
        folder: Path,
        report: Report,
        *,
        on_lost: Callable[[], None] = lambda: None,
        on_held: Callable[[int], None] = lambda _: None,
        interval_s: float = 1.0,
    ) -> None:
        self._folder = folder
        self._report = report
        self._on_lost = on_lost
        self._on_held = on_held
        self._held: dict[Path, float] = {}  # with the time of the next try
        self._interval_s = interval_s
        self._live = [_Live(Journal(folder))]

    @property
    def journal(self) -> Journal:
        """The journal that takes new requests."""
        return self._live[-1].journal

    def entry(self) -> Entry:
        """Returns what notes the use of a request that begins."""
        return Entry(lambda: self.journal, self._lost)

    def add(self, use: Use) -> None:
        """Notes what a request used that told nothing before its end."""
        self.entry().end(use)

    async def run(self) -> None:
        """Sends until cancelled; what cannot be sent now waits."""
        while True:
            try:
                await self.send()
            except (VeneerError, OSError) as error:
                _log.warning("usage cannot be reported; it waits on disk", extra={"cause": type(error).__name__})
            await asyncio.sleep(self._interval_s)

    async def send(self) -> None:
        """Sends all that is there, what is written now first.

        Raises:
            VeneerError: The control plane did not take one of the journals; the others had their turn.
            OSError: One of them cannot be read, or the control plane says what cannot be.
        """
        failed = [await self._try(live.journal.path, partial(self._send_live, live)) for live in list(self._live)]
        self._turn_over()
        left = await asyncio.to_thread(journals.left_behind, self._folder)
        failed += [await self._try(path, partial(self._send_left, path)) for path in left]
        over = await asyncio.to_thread(journals.sent, self._folder)
        failed += [await self._try(path, partial(self._end, path)) for path in over]
        self._on_held(len(self._held))
        for error in filter(None, failed):
            raise error

    async def close(self) -> None:
        """Ends the journal, after a last try to send it; what could not be sent the next process sends."""
        try:
            async with asyncio.timeout(_LAST_S):
                await self.send()
        except (VeneerError, OSError, TimeoutError) as error:
            _log.warning("usage waits on disk for the next start", extra={"cause": type(error).__name__})
        finally:
            for live in self._live:
                live.journal.close()

    async def _try(self, path: Path, send: Callable[[], Awaitable[None]]) -> VeneerError | OSError | None:
        """Sends a journal unless it is held; returns what was in the way."""
        if self._held.get(path, 0.0) > time.monotonic():
            return None
        try:
            await send()
        except (VeneerError, OSError) as error:
            if not isinstance(error, _FOR_NOW):
                self._held[path] = time.monotonic() + _HOLD_S
                facts = {"journal": journals.name_of(path), "cause": type(error).__name__, "detail": str(error)}
                _log.error("a journal of usage is not taken or cannot be read; it is held and tried again", extra=facts)
            return error
        self._held.pop(path, None)
        return None

    def _lost(self, use: Use, error: OSError) -> None:
        self._on_lost()
        _log.error("what a request used could not be noted", extra={"tenant": use.tenant, "cause": error.strerror})

    def _turn_over(self) -> None:
        """Begins a journal after one that has grown large, and ends those for whose requests nobody waits any more."""
        if self.journal.size_bytes > _MAX_BYTES:
            self._live.append(_Live(Journal(self._folder)))
        for live in self._live[:-1]:
            if not live.journal.is_awaited:
                live.journal.close()  # it is left behind then
                self._live.remove(live)

    async def _send_live(self, live: _Live) -> None:
        await asyncio.to_thread(live.journal.sync)
        try:
            live.place = await self._send(live.journal.path, live.place, partial(journals.read, live.journal.path))
        except _SetBackError:
            live.place = _Place()  # the next look tells of all of it again, as a new process would
            raise

    async def _end(self, path: Path) -> None:
        """Tells the control plane that nothing more comes of a journal, and removes what is left of it."""
        await self._report(journals.name_of(path), _NEVER, _NEVER, {}, is_over=True)
        await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _send_left(self, path: Path) -> None:
        """Sends a journal to which nobody writes any more; it is not read again then."""
        place = await self._send(path, _Place(), partial(journals.read, path))
        ends = await asyncio.to_thread(journals.unended, path)
        await self._send(path, replace(place, offset=0), partial(_part, ends))
        torn = await asyncio.to_thread(journals.rest, path, place.offset)
        if b"\n" in torn:  # a line that was torn has no end
            await self._set_aside(path, place.sequence + len(ends) + 1, [torn])
        elif torn:
            facts = {"journal": journals.name_of(path), "size_bytes": len(torn)}
            _log.warning("a torn line was cut off a journal", extra=facts)
        await asyncio.to_thread(journals.mark_sent, path)

    async def _send(self, path: Path, place: _Place, read: _Read) -> _Place:
        """Sends a journal's records from there on; returns how far it came."""
        while True:
            num_known = place.taken - place.sequence
            batch = _BATCH if num_known <= 0 else min(_BATCH, num_known)
            lines, end = await asyncio.to_thread(read, place.offset, max_records=batch)
            if not lines:
                return place
            if num_known > 0:  # an earlier report told of these
                place = _Place(end, place.sequence + len(lines), place.taken)
            else:
                place = await self._send_lines(path, place, lines, end)

    async def _send_lines(self, path: Path, place: _Place, lines: Sequence[Line], end: int) -> _Place:
        """Sends these lines, which begin there, but for those that are not wanted; returns how far it came."""
        last = place.sequence + len(lines)
        taken, wanted = await self._tell(journals.name_of(path), place.taken + 1, last, lines)
        if unwanted := [line.raw for line in lines if _is_unwanted(line, wanted)]:
            await self._set_aside(path, place.sequence + 1, unwanted)
        if not wanted:
            return _Place(end, last, place.taken)  # the next report begins where the one before ended
        if taken >= last:
            return _Place(end, last, taken)
        if taken <= place.taken:
            kind = _SetBackError if taken < place.taken else OSError
            raise kind(f"the control plane knows {taken} records of a journal that was sent to {place.taken}")
        return replace(place, taken=taken)

    async def _tell(self, journal: str, first: int, last: int, lines: Sequence[Line]) -> tuple[int, AbstractSet[UseKey]]:
        """Reports what the control plane takes of these lines; returns what it took last, and which of them it wants."""
        sums = summed(line.counted for line in lines if line.counted is not None)
        try:
            if not sums:
                return 0, sums.keys()
            return await self._report(journal, first, last, sums), sums.keys()
        except PermissionDeniedError:
            refused = await self._refused(journal, sums)
        rest = {key: counts for key, counts in sums.items() if key not in refused}
        return (await self._report(journal, first, last, rest) if rest else 0), rest.keys()

    async def _refused(self, journal: str, sums: Mapping[UseKey, UseCounts]) -> set[UseKey]:
        """Returns whose tickets the control plane refuses: one tenant's must not cost the others theirs."""
        try:
            await self._report(journal, _NEVER, _NEVER, sums)
        except PermissionDeniedError:
            keys = list(sums)
            if len(keys) == 1:
                return set(keys)
            halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
            first, second = [await self._refused(journal, {key: sums[key] for key in half}) for half in halves]
            return first | second
        return set()

    async def _set_aside(self, path: Path, number: int, lines: Sequence[bytes]) -> None:
        await asyncio.to_thread(journals.set_aside, path, number, lines)
        facts = {"journal": journals.name_of(path), "number": number, "num_lines": len(lines)}
        _log.error("records of usage were refused or cannot be read, and are set aside", extra=facts)


def _part(lines: Sequence[Line], offset: int, *, max_records: int) -> tuple[list[Line], int]:
    part = list(lines[offset : offset + max_records])
    return part, offset + len(part)


def _is_unwanted(line: Line, wanted: AbstractSet[UseKey]) -> bool:
    return line.use is None or (line.is_end and key_of(line.use) not in wanted)
