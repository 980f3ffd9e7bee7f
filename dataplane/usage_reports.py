"""Sends what the journals say to the control plane, each record once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from dataplane import journal as journals
from dataplane.journal import Journal, Line
from dataplane.usage import Use, UseCounts, UseKey, key_of, summed
from veneer.errors import PermissionDeniedError, VeneerError

_log = logging.getLogger(__name__)
_BATCH = 1000
_MAX_BYTES = 16 << 20
_LAST_S = 5.0
_NEVER = 10**12
"""A number to which no journal comes: of a report that begins there only the tickets are looked at."""


class Report(Protocol):
    """Tells the control plane of records; see `dataplane.catalog_client`."""

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


class UsageReporter:
    """Owns this process's journal, and sends it and those that earlier processes left. Owned by the event loop.

    A report says which records it sums up; the control plane takes it only when it begins right after the last one that it took,
    and answers with that. So what is sent twice, or whose answer is lost, counts once, and the next report goes on from there.
    Records whose tickets are refused, and lines that do not read, are left out of reports and set aside; their numbers are
    passed over. What was sent to its end stays, under another name, until the control plane knows
    that nothing more will come of it.

    Args:
        folder: Where journals lie.
        report: Tells the control plane.
        on_lost: Hears of records that the disk did not take.
        interval_s: Time between two looks.
    """

    def __init__(
        self, folder: Path, report: Report, *, on_lost: Callable[[], None] = lambda: None, interval_s: float = 1.0
    ) -> None:
        self._folder = folder
        self._report = report
        self._on_lost = on_lost
        self._interval_s = interval_s
        self._journal = Journal(folder)
        self._place = _Place()

    def add(self, use: Use) -> None:
        """Notes what a request used."""
        try:
            self._journal.add(use)
        except OSError as error:
            self._on_lost()
            _log.error("what a request used could not be noted", extra={"tenant": use.tenant, "cause": error.strerror})

    async def run(self) -> None:
        """Sends until cancelled; what cannot be sent now waits."""
        while True:
            try:
                await self.send()
            except (VeneerError, OSError) as error:
                _log.warning("usage cannot be reported; it waits on disk", extra={"cause": type(error).__name__})
            await asyncio.sleep(self._interval_s)

    async def send(self) -> None:
        """Sends all that is there.

        Raises:
            VeneerError: The control plane does not take it now.
            OSError: A journal cannot be read.
        """
        for path in await asyncio.to_thread(journals.left_behind, self._folder):
            await self._send_left(path)
        await asyncio.to_thread(self._journal.sync)
        self._place = await self._send(self._journal.path, self._place)
        if self._journal.size_bytes > _MAX_BYTES and self._place.offset == self._journal.size_bytes:
            self._begin_anew()
        for path in await asyncio.to_thread(journals.sent, self._folder):
            await self._report(journals.name_of(path), _NEVER, _NEVER, {}, is_over=True)
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def close(self) -> None:
        """Ends the journal, after a last try to send it; what could not be sent the next process sends."""
        try:
            async with asyncio.timeout(_LAST_S):
                await self.send()
        except (VeneerError, OSError, TimeoutError) as error:
            _log.warning("usage waits on disk for the next start", extra={"cause": type(error).__name__})
        finally:
            self._journal.close()

    def _begin_anew(self) -> None:
        self._journal.close()
        self._journal = Journal(self._folder)
        self._place = _Place()

    async def _send_left(self, path: Path) -> None:
        """Sends a journal to which nobody writes any more; it is not read again then."""
        place = await self._send(path, _Place())
        torn = await asyncio.to_thread(journals.rest, path, place.offset)
        if b"\n" in torn:  # a line that was torn has no end
            await self._set_aside(path, place.sequence + 1, [torn])
        elif torn:
            facts = {"journal": journals.name_of(path), "size_bytes": len(torn)}
            _log.warning("a torn line was cut off a journal", extra=facts)
        await asyncio.to_thread(journals.mark_sent, path)

    async def _send(self, path: Path, place: _Place) -> _Place:
        """Sends a journal's records from there on; returns how far it came."""
        while True:
            num_known = place.taken - place.sequence
            batch = _BATCH if num_known <= 0 else min(_BATCH, num_known)
            lines, end = await asyncio.to_thread(journals.read, path, place.offset, max_records=batch)
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
        if unwanted := [line.raw for line in lines if line.use is None or key_of(line.use) not in wanted]:
            await self._set_aside(path, place.sequence + 1, unwanted)
        if not wanted:
            return _Place(end, last, place.taken)  # the next report begins where the one before ended
        if taken >= last:
            return _Place(end, last, taken)
        if taken <= place.taken:
            raise OSError(f"the control plane knows {taken} records of a journal that was sent to {place.taken}")
        return replace(place, taken=taken)

    async def _tell(self, journal: str, first: int, last: int, lines: Sequence[Line]) -> tuple[int, AbstractSet[UseKey]]:
        """Reports what the control plane takes of these lines; returns what it took last, and which of them it wants."""
        sums = summed(line.use for line in lines if line.use is not None)
        try:
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
