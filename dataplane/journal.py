"""The journal of what requests used: files on disk to which every request adds a line when it ends.

A line holds a checksum and the record. It is handed to the kernel before the caller learns of the end, so a process that is
killed loses nothing that was told; the disk is waited for in groups. A request that runs tells in lines of its own what it has
used so far. These count only where its end is missing, which is known once nobody writes to the journal any more.

Every process begins a journal of its own, under a name that it draws, so that nothing is ever written after a torn line at the
end of an older one. A line that does not read though others follow has its number as they have: what is behind it keeps its own.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from dataplane.usage import Use
from veneer.private_files import open_private

_log = logging.getLogger(__name__)
_SUFFIX = ".journal"
_SENT = ".sent"
_MADE = ".made"


class Line(NamedTuple):
    """A line of a journal.

    Attributes:
        raw: As it lies there.
        use: What it says; None where it does not read.
        request: Number of the request in this journal; 0 of one that told nothing before its end.
        is_end: Whether the request ended so, rather than told what it had used so far.
    """

    raw: bytes
    use: Use | None
    request: int = 0
    is_end: bool = True

    @property
    def counted(self) -> Use | None:
        """What it adds to the ledger by itself."""
        return self.use if self.is_end else None


class Journal:
    """The journal of this process. Owned by the event loop; `sync` may be called from another thread.

    Args:
        folder: Where journals lie; made when it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(folder)
        self.path, self._file = _made(folder)
        self._closing = threading.Lock()  # a descriptor is not closed while another thread uses its number
        self.size_bytes = 0
        self._last_request = 0
        self._running: set[int] = set()

    @property
    def is_awaited(self) -> bool:
        """Whether a request that told what it used so far has not ended."""
        return bool(self._running)

    def begin(self) -> int:
        """Returns a number for a request that is to tell what it uses; its end is added to this journal too."""
        self._last_request += 1
        self._running.add(self._last_request)
        return self._last_request

    def tell(self, use: Use, request: int) -> None:
        """Adds what a request has used so far.

        Raises:
            OSError: See `add`.
        """
        self._write(_line(use, -request))

    def add(self, use: Use, request: int = 0) -> None:
        """Adds a record of a request that ended.

        Raises:
            OSError: The disk does not take it; what was written of it is cut off.
        """
        self._running.discard(request)
        self._write(_line(use, request))

    def _write(self, line: bytes) -> None:
        if self._file.closed:
            raise OSError(errno.EBADF, "the journal is closed")
        if self._file.write(line) != len(line):
            self._file.truncate(self.size_bytes)
            raise OSError("the journal's disk is full")
        self.size_bytes += len(line)

    def sync(self) -> None:
        """Waits until all that was added is on disk; does nothing once the journal is closed."""
        with self._closing:
            if not self._file.closed:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Ends the journal, after a `sync` that runs; again does nothing."""
        with self._closing:
            self._file.close()


class Entry:
    """What one request says of its use: so far, and at its end. Owned by its handler.

    Args:
        open_journal: Returns where requests are noted now. It is asked with the first word, since the journal of a moment before
            may be closed by then; what follows is noted in the same one.
        on_lost: Hears that the disk did not take the end.
    """

    def __init__(self, open_journal: Callable[[], Journal], on_lost: Callable[[Use, OSError], None]) -> None:
        self._open_journal = open_journal
        self._journal: Journal | None = None
        self._on_lost = on_lost
        self._request = 0

    def tell(self, use: Use) -> None:
        """Notes what the request has used so far, which counts as its end if the process is killed."""
        if self._journal is None:
            self._journal = self._open_journal()
            self._request = self._journal.begin()
        try:
            self._journal.tell(use, self._request)
        except OSError as error:
            _log.error("what a running request used could not be noted", extra={"tenant": use.tenant, "cause": error.strerror})

    def end(self, use: Use) -> None:
        """Notes what the request used in all."""
        try:
            (self._journal or self._open_journal()).add(use, self._request)
        except OSError as error:
            self._on_lost(use, error)


def left_behind(folder: Path) -> list[Path]:
    """Returns the journals to which no process writes any more, oldest first."""
    return [
        path for path in sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns) if not _is_written(path)
    ]


def name_of(path: Path) -> str:
    """Returns the name that a journal's process drew."""
    return path.stem


def mark_sent(path: Path) -> None:
    """Makes a journal one that is never read again, whatever happens to the machine afterwards."""
    path.rename(path.with_suffix(_SENT))
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sent(folder: Path) -> list[Path]:
    """Returns what is left of the journals that were sent to their end."""
    return list(folder.glob(f"*{_SENT}"))


def set_aside(path: Path, number: int, lines: Iterable[bytes]) -> None:
    """Keeps lines of a journal, from around the record with this number, where nobody reads them; again changes nothing."""
    with open_private(path.with_name(f"{name_of(path)}-{number}.refused"), "wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, offset: int, *, max_records: int) -> tuple[list[Line], int]:
    """Returns the next lines of a journal and where the one after them begins; none of those behind the last that reads."""
    lines: list[Line] = []
    num_read, end = 0, offset
    with path.open("rb") as file:
        file.seek(offset)
        while num_read < max_records and (raw := file.readline()):
            offset += len(raw)
            lines.append(Line(raw, *_parsed(raw)))
            if lines[-1].use is not None:
                num_read, end = len(lines), offset
    return lines[:num_read], end


def unended(path: Path) -> list[Line]:
    """Returns ends of the requests that have none in a journal to which nobody writes any more, always the same."""
    running: dict[int, Line] = {}
    with path.open("rb") as file:
        for raw in file:
            use, request, is_end = _parsed(raw)
            if use is None:
                continue
            if is_end:
                running.pop(request, None)
            else:
                running[request] = Line(raw, use)
    return list(running.values())


def rest(path: Path, offset: int) -> bytes:
    """Returns what lies in a journal from here on."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()


def _made(folder: Path) -> tuple[Path, FileIO]:
    """Makes a journal; returns where it lies, and the file, locked until the process ends."""
    while True:
        path = folder / f"{secrets.token_hex(16)}{_SUFFIX}"
        made = path.with_suffix(_MADE)
        with ExitStack() as stack:
            file = stack.enter_context(FileIO(made, "x", opener=_open_to_append))
            fcntl.flock(file, fcntl.LOCK_EX)
            try:  # not before it is locked: to another process on the folder it would be one that was left behind
                made.rename(path)
            except FileNotFoundError:  # another process swept it away before it was locked
                continue
            stack.pop_all()
            return path, file


def _open_to_append(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_APPEND, 0o600)


def _sweep(folder: Path) -> None:
    """Removes what processes left that ended while they made a journal; nothing was written to it."""
    for path in folder.glob(f"*{_MADE}"):
        try:
            if not _is_written(path):
                path.unlink()
        except FileNotFoundError:  # it is made by now, or another process swept too
            continue


def _is_written(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _line(use: Use, request: int) -> bytes:
    """A line; the number is negative where the request has not ended, and left out where it is 0."""
    record = json.dumps((*use, request) if request else use, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(record), record)


def _parsed(line: bytes) -> tuple[Use | None, int, bool]:
    checksum, _, record = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(record):
        return None, 0, True
    try:
        fields = json.loads(record)
        if len(fields) == len(Use._fields):
            return Use(*fields), 0, True
        request = fields.pop()
        return Use(*fields), abs(request), request > 0
    except (TypeError, ValueError, AttributeError, IndexError):  # of another version
        return None, 0, True
