"""Receiving an upload: parts to temporary files, counted and hashed on the way."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from veneer.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError, Violation

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_ORDER = (CONFIG, WEIGHTS)
_PREFIX = "veneer-publish-"
_FRESH_S = 60.0  # an upload's folder is made and then locked: leave it the time for that


@dataclass(frozen=True, slots=True)
class Part:
    """The next bytes of a file; `file` is its name."""

    file: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Received:
    """A file that came whole."""

    path: Path
    digest: str
    size_bytes: int


class Spool:
    """Temporary files of one upload, gone when the block ends. Owned by one call.

    The folder is locked for as long as the process lives; see `remove_abandoned`.

    Args:
        folder: Where the files lie; None: the system's temporary folder.
        limits: Largest size of each file by name.
        part_timeout_s: Longest wait for the next part.
    """

    def __init__(self, folder: Path | None, limits: Mapping[str, int], *, part_timeout_s: float) -> None:
        self._folder = folder
        self._limits = limits
        self._part_timeout_s = part_timeout_s
        self._files: dict[str, _File] = {}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._lock = -1

    async def __aenter__(self) -> Self:
        try:
            self._temporary = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=self._folder)
            self._lock = os.open(self._temporary.name, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UnavailableError("there is no room for uploads") from error
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files.values():
            file.handle.close()
        if self._temporary is not None:
            self._temporary.cleanup()  # unlinks two files: quick, and not to be cut short by a cancelled call
        if self._lock >= 0:
            os.close(self._lock)

    async def receive(self, parts: AsyncIterator[Part]) -> dict[str, Received]:
        """Takes all parts; the configuration's come before those of the weights.

        Raises:
            InvalidArgumentError: A file is missing, too large or out of order.
            DeadlineExceededError: The next part did not come in time.
            UnavailableError: The disk is full.
        """
        while True:
            try:
                async with asyncio.timeout(self._part_timeout_s):
                    part = await anext(parts, None)
            except TimeoutError as error:
                raise DeadlineExceededError(f"no part of the upload came for {self._part_timeout_s:g} s") from error
            if part is None:
                break
            file = self._file(part)
            try:
                await asyncio.to_thread(file.write, part.data)
            except OSError as error:
                raise UnavailableError("there is no room for uploads") from error
        missing = [name for name in _ORDER if name not in self._files]
        if missing:
            raise InvalidArgumentError.of([Violation(name, "is missing") for name in missing])
        return {name: await asyncio.to_thread(file.finish) for name, file in self._files.items()}

    def _file(self, part: Part) -> _File:
        assert self._temporary is not None
        file = self._files.get(part.file)
        if file is None:
            file = self._files[part.file] = _File(Path(self._temporary.name) / part.file)
        if part.file == CONFIG and WEIGHTS in self._files:
            raise InvalidArgumentError.of([Violation(CONFIG, "must come before the weights")])
        limit = self._limits[part.file]
        if file.size_bytes + len(part.data) > limit:
            raise InvalidArgumentError.of([Violation(part.file, f"is larger than {limit} bytes")])
        return file


def remove_abandoned(folder: Path | None) -> int:
    """Removes uploads that a process left when it was killed; says how many. Those of processes that live stay. Blocks.

    Args:
        folder: Where uploads lie; None: the system's temporary folder.
    """
    removed = 0
    for upload in Path(folder or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if time.time() - upload.lstat().st_mtime < _FRESH_S:
                continue
            lock = os.open(upload, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone in the meantime, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(upload, ignore_errors=True)
            removed += 1
        except OSError:
            continue  # somebody receives it
        finally:
            os.close(lock)
    return removed


class _File:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self.handle: IO[bytes] = path.open("xb")
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.handle.write(data)
        self._hash.update(data)
        self.size_bytes += len(data)

    def finish(self) -> Received:
        self.handle.close()
        return Received(self.path, self._hash.hexdigest(), self.size_bytes)
