"""Receiving an upload: parts to temporary files, counted and hashed on the way."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import math
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
from typing import Final, Self

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


@dataclass(frozen=True, slots=True)
class MinRate:
    """The least rate of an upload, as a token bucket: time that its caller has left, which each byte adds to.

    Attributes:
        bytes_per_s: Bytes that come in a second, on average; 0: any.
        grace_s: For how long nothing need come; also the most time that bytes which came sooner are worth.
    """

    bytes_per_s: int
    grace_s: float

    def left_s(self, left_s: float, *, waited_s: float, num_bytes: int) -> float:
        """Time that a caller has left after it was waited for, and brought so many bytes."""
        if not self.bytes_per_s:
            return math.inf
        return min(left_s - waited_s + num_bytes / self.bytes_per_s, self.grace_s)


ANY_RATE: Final = MinRate(0, math.inf)
"""An upload may be as slow as it is."""


class Spool:
    """Temporary files of one upload, gone when the block ends. Owned by one call.

    The folder is locked for as long as the process lives; see `remove_abandoned`.

    Args:
        folder: Where the files lie; None: the system's temporary folder.
        limits: Largest size of each file by name.
        part_timeout_s: Longest wait for the next part.
        rate: Least rate at which parts come. A part counts as soon as all of it is there.
    """

    def __init__(
        self, folder: Path | None, limits: Mapping[str, int], *, part_timeout_s: float, rate: MinRate = ANY_RATE
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._part_timeout_s = part_timeout_s
        self._rate = rate
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
            DeadlineExceededError: The next part did not come in time, or parts came too slowly.
            UnavailableError: The disk is full.
        """
        left_s = self._rate.left_s(self._rate.grace_s, waited_s=0.0, num_bytes=0)
        while True:
            since_s = time.monotonic()
            try:
                async with asyncio.timeout(min(self._part_timeout_s, left_s)):
                    part = await anext(parts, None)
            except TimeoutError as error:
                raise DeadlineExceededError(self._too_slow(is_silent=self._part_timeout_s <= left_s)) from error
            if part is None:
                break
            waited_s = time.monotonic() - since_s
            try:
                await in_thread(partial(self._file(part).write, part.data))
            except OSError as error:
                raise UnavailableError("there is no room for uploads") from error
            left_s = self._rate.left_s(left_s, waited_s=waited_s, num_bytes=len(part.data))
            if left_s < 0:
                raise DeadlineExceededError(self._too_slow(is_silent=False))
        missing = [name for name in _ORDER if name not in self._files]
        if missing:
            raise InvalidArgumentError.of([Violation(name, "is missing") for name in missing])
        try:
            return {name: await in_thread(file.finish) for name, file in self._files.items()}
        except OSError as error:
            raise UnavailableError("there is no room for uploads") from error

    def _too_slow(self, *, is_silent: bool) -> str:
        if is_silent:
            return f"no part of the upload came for {self._part_timeout_s:g} s"
        rate = f"min_upload_bytes_per_s is {self._rate.bytes_per_s}, and upload_rate_grace_s {self._rate.grace_s:g}"
        return f"the upload came too slowly: {rate}"

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
