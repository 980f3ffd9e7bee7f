"""Image files in a folder under a byte budget: the tier between the object store and the device."""

from __future__ import annotations

import re
import shutil
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from veneer.errors import InvalidArgumentError, ResourceExhaustedError

_SUFFIX = ".image"
_VERSION = re.compile(r"[0-9a-z:_-]{1,160}")


class HostCacheFullError(ResourceExhaustedError):
    """There is no room for an image: all that could make room is in use, or the image is larger than the budget."""


@dataclass(frozen=True, slots=True)
class HostCounters:
    """What happened since the start: files found, files not found, files deleted to make room."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class HostCache:
    """Which versions have an image file in the folder, and which file goes first: the one least recently used.

    A file is known from `add` on, or from the start when it lay there already, and every file counts in full. `reserve` makes
    room before a file is written, so that the folder never exceeds the budget. It knows sizes and paths only; what is inside is
    checked by `dataplane.lora.image.open_image` each time it is opened. A mapped file stays readable after it was deleted here.

    Any thread may call any method. Files are deleted under the lock, so that a file written anew is never the one deleted.

    Args:
        folder: Created if missing. It belongs to this cache alone: unfinished files of an earlier process, folders and links
            are deleted.
        max_bytes: Budget.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()
        self._reserved: dict[str, int] = {}
        self._in_use: dict[str, int] = {}
        self._hits = self._misses = self._evictions = 0
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
        for path in found:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):  # a folder or link would stand in an image's way for ever
                _remove(path)
            elif path.suffix == _SUFFIX and _VERSION.fullmatch(path.stem):
                self._files[path.stem] = status.st_size
            elif path.suffix == ".tmp":
                path.unlink()
        self._delete(self._make_room(0) or [])

    def path(self, version: str) -> Path:
        """Returns where a version's image lies or would lie.

        Raises:
            InvalidArgumentError: The version is no digest, so it must not become a path.
        """
        if not _VERSION.fullmatch(version):
            raise InvalidArgumentError("a version is a digest of lower-case letters, digits, ':', '_' and '-'")
        return self._folder / f"{version}{_SUFFIX}"

    def find(self, version: str) -> Path | None:
        """Returns the version's image file and notes its use, or None."""
        with self._lock:
            if version not in self._files:
                self._misses += 1
                return None
            self._hits += 1
            self._files.move_to_end(version)
        return self.path(version)

    def reserve(self, version: str, *, size_bytes: int) -> tuple[str, ...]:
        """Makes room for a file that is about to be written; `add` or `cancel` ends the reservation.

        Returns:
            The versions whose files were deleted.

        Raises:
            HostCacheFullError: There is no such room; nothing was deleted.
            InvalidArgumentError: The version is no digest.
        """
        self.path(version)
        with self._lock:
            self._reserved.pop(version, None)
            evicted = self._make_room(size_bytes)
            if evicted is None:
                raise HostCacheFullError(f"no room for an image of {size_bytes} bytes in {self._max_bytes}", retry_after_s=1.0)
            self._reserved[version] = size_bytes
            self._delete(evicted)
        return tuple(evicted)

    def add(self, version: str, *, size_bytes: int) -> tuple[str, ...]:
        """Notes that a version's file was written, of at most the reserved size.

        Returns:
            The versions whose files had to go since this one is larger than was reserved.
        """
        with self._lock:
            self._reserved.pop(version, None)
            self._files[version] = size_bytes
            self._files.move_to_end(version)
            evicted = self._make_room(0, keep=version) or []
            self._delete(evicted)
        return tuple(evicted)

    def give_way(self) -> tuple[str, ...]:
        """Deletes files, least recently used first, that hold an eighth of the bytes: the disk is full below the budget.

        Returns:
            The versions whose files were deleted; none when all are in use.
        """
        with self._lock:
            evicted: list[str] = []
            excess = sum(self._files.values()) / 8
            for version, size in self._files.items():
                if excess <= 0:
                    break
                if version not in self._in_use:
                    evicted.append(version)
                    excess -= size
            for version in evicted:
                del self._files[version]
            self._evictions += len(evicted)
            self._delete(evicted)
        return tuple(evicted)

    def cancel(self, version: str) -> None:
        """Ends a reservation whose file was not written."""
        with self._lock:
            self._reserved.pop(version, None)

    def hold(self, version: str) -> None:
        """Keeps a version's file from making room until as many calls of `let_go`."""
        with self._lock:
            self._in_use[version] = self._in_use.get(version, 0) + 1

    def let_go(self, version: str) -> None:
        """Takes back one `hold`."""
        with self._lock:
            count = self._in_use.pop(version) - 1
            if count:
                self._in_use[version] = count

    def remove(self, version: str) -> bool:
        """Deletes a version's file (retired, quarantined, corrupt), held or not. Returns whether there was one."""
        with self._lock:
            known = self._files.pop(version, None) is not None
            self._delete([version])
        return known

    def versions(self) -> tuple[str, ...]:
        """Returns the versions with a file, least recently used first."""
        with self._lock:
            return tuple(self._files)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files and reservations."""
        with self._lock:
            return self._used()

    @property
    def max_bytes(self) -> int:
        """The budget."""
        return self._max_bytes

    @property
    def counters(self) -> HostCounters:
        """What happened since the start."""
        with self._lock:
            return HostCounters(self._hits, self._misses, self._evictions)

    def _used(self) -> int:
        return sum(self._files.values()) + sum(self._reserved.values())

    def _make_room(self, size_bytes: int, *, keep: str | None = None) -> list[str] | None:
        """Takes the least recently used files out of the books until `size_bytes` fit; None, and no change, if they cannot."""
        excess = self._used() + size_bytes - self._max_bytes
        evicted: list[str] = []
        for version, size in self._files.items():
            if excess <= 0:
                break
            if version not in self._in_use and version != keep:
                evicted.append(version)
                excess -= size
        if excess > 0:
            return None
        for version in evicted:
            del self._files[version]
        self._evictions += len(evicted)
        return evicted

    def _delete(self, versions: list[str]) -> None:
        for version in versions:
            self.path(version).unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
