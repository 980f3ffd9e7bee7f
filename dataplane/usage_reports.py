"""Sends what the journals say to the control plane, each record once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from dataplane import journal as journals
from dataplane.journal import Journal
from dataplane.usage import Use, UseCounts, UseKey, summed
from veneer.errors import PermissionDeniedError, VeneerError

_log = logging.getLogger(__name__)
_BATCH = 1000
_MAX_BYTES = 16 << 20
_LAST_S = 5.0


class Report(Protocol):
    """Tells the control plane of records; see `dataplane.catalog_client`."""

    async def __call__(  # noqa: D102
        self, journal: str, first: int, last: int, uses: Mapping[UseKey, UseCounts], /
    ) -> int: ...


class UsageReporter:
    """Owns this process's journal, and sends it and those that earlier processes left. Owned by the event loop.

    A report says which records it sums up; the control plane takes it only when it begins right after the last one that it took,
    and answers with that. So what is sent twice, or whose answer is lost, counts once, and the next report goes on from there.

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
        self._offset = self._sequence = 0

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
        try:
            self._offset, self._sequence = await self._send(self._journal.path, self._offset, self._sequence)
        except PermissionDeniedError:
            self._begin_anew()
            raise
        if self._journal.size_bytes > _MAX_BYTES and self._offset == self._journal.size_bytes:
            self._begin_anew()

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
        self._offset = self._sequence = 0

    async def _send_left(self, path: Path) -> None:
        """Sends a journal to which nobody writes any more, and removes it."""
        try:
            end, _ = await self._send(path, 0, 0)
        except PermissionDeniedError:
            await asyncio.to_thread(journals.set_aside, path)
            _log.error("a journal of usage was refused, and set aside", extra={"journal": journals.name_of(path)})
            return
        torn = await asyncio.to_thread(journals.cut_tail, path, end)
        if torn:
            _log.warning("a torn line was cut off a journal", extra={"journal": journals.name_of(path), "size_bytes": torn})
        await asyncio.to_thread(path.unlink)

    async def _send(self, path: Path, offset: int, sequence: int) -> tuple[int, int]:
        """Sends a journal's records after the one with this number, which ends there; returns how far it came."""
        while True:
            uses, end = await asyncio.to_thread(journals.read, path, offset, max_records=_BATCH)
            if not uses:
                return offset, sequence
            last = sequence + len(uses)
            taken = await self._report(journals.name_of(path), sequence + 1, last, summed(uses))
            if taken != last and taken > sequence:  # an earlier report came through whose answer did not
                uses, end = await asyncio.to_thread(journals.read, path, offset, max_records=taken - sequence)
                last = sequence + len(uses)
            elif taken != last:
                raise OSError(f"the control plane knows {taken} records of a journal that was sent to {sequence}")
            offset, sequence = end, last
