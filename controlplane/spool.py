"""Receiving an upload: parts to temporary files, counted and hashed on the way."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from veneer.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError, Violation
from veneer.threads import in_thread

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_log = logging.getLogger(__name__)
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
        self._path: Path | None = None
        self._owned = ExitStack()

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            try:
                self._path = _make_folder(self._folder, stack)
            except OSError as error:
                raise UnavailableError("there is no room for uploads") from error
            self._owned = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._owned.close()

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
            try:
                await in_thread(partial(self._file(part).write, part.data))
            except OSError as error:
                raise UnavailableError("there is no room for uploads") from error
        missing = [name for name in _ORDER if name not in self._files]
        if missing:
            raise InvalidArgumentError.of([Violation(name, "is missing") for name in missing])
        try:
            return {name: await in_thread(file.finish) for name, file in self._files.items()}
        except OSError as error:
            raise UnavailableError("there is no room for uploads") from error

    def _file(self, part: Part) -> _File:
        assert self._path is not None
        file = self._files.get(part.file)
        if file is None:
            handle = self._owned.enter_context((self._path / part.file).open("xb", buffering=0))
            file = self._files[part.file] = _File(self._path / part.file, handle)
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


def _make_folder(parent: Path | None, stack: ExitStack) -> Path:
    """Makes the locked folder of an upload, which the stack removes."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        path.rmdir()
        raise
    stack.callback(os.close, lock)
    stack.callback(_remove, path)  # unlinks two files, quickly, and before the lock is given up
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return path


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:  # the publish has its answer already
        _log.warning("an upload's folder cannot be removed; the next start removes it", extra={"cause": error.strerror})


class _File:
    """A file on its way. Its owner closes the handle; no thread may write then any more."""

    def __init__(self, path: Path, handle: FileIO) -> None:
        self.path = path
        self.size_bytes = 0
        self._handle = handle
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._handle.write(left) :]
        self._hash.update(data)
        self.size_bytes += len(data)

    def finish(self) -> Received:
        self._handle.close()
        return Received(self.path, self._hash.hexdigest(), self.size_bytes)
