"""Image files in a folder under a byte budget: the tier between the object store and the device."""

from __future__ import annotations

import itertools
import re
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dataplane.lora.eviction import Policy, Usage, Victims
from dataplane.lora.holdings import TenantLimitError
from veneer.errors import InvalidArgumentError, ResourceExhaustedError

_ENDING = ".image"
_VERSION = re.compile(r"[0-9a-z:_-]{1,160}")
_HALF_LIFE = 16_384
"""Requests after which one counts half: a few for each of some thousand files."""


class HostCacheFullError(ResourceExhaustedError):
    """There is no room for an image: all that could make room is in use, or the image is larger than the budget."""


class TenantHostFullError(HostCacheFullError):
    """There is no room for an image within what its tenant may have: all of the tenant's that could make room is in use.

    Attributes:
        tenant: Whose limit it is; nobody else may read the message.
    """

    def __init__(self, message: str, *, tenant: str) -> None:
        super().__init__(message, retry_after_s=1.0)
        self.tenant = tenant


class TenantHostLimitError(TenantLimitError):
    """An image is larger than what its tenant may have in host memory.

    Attributes:
        tenant: Whose limit it is; nobody else may read the message.
    """

    def __init__(self, message: str, *, tenant: str) -> None:
        super().__init__(message)
        self.tenant = tenant


@dataclass(frozen=True, slots=True)
class Payer:
    """Whose limit a file counts against.

    Attributes:
        tenant: Name of the tenant.
        max_bytes: What its files may take together; 0 for no limit.
    """

    tenant: str
    max_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostCounters:
    """What happened since the start: files found, files not found, files deleted to make room."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class HostCache:
    """Which versions have an image file in the folder, and which file goes first: the one worth least (see `Usage`).

    A file is known from `add` on, or from the start when it lay there already, and every file counts in full. `reserve` makes
    room before a file is written, so that the folder never exceeds the budget, nor the files of a tenant its limit: those make
    room for one another first. A file belongs to the tenant that held it first, also when that one does not wait for it any more,
    and to nobody as long as none did. One that comes ahead of requests takes nobody's room but its tenant's, and as long as none
    held it, it makes room before all others; so does one that whoever holds it may not have within its limit.

    It knows sizes and paths only; what is inside is checked by `dataplane.lora.image.open_image` each time it is opened. A mapped
    file stays readable after it was deleted here. A file is named after version and dtype: images of another dtype are of no use
    here, and go at the start.

    Any thread may call any method. Files are deleted under the lock, so that a file written anew is never the one deleted.

    Args:
        folder: Created if missing. It belongs to this cache alone: unfinished files of an earlier process, folders and links
            are deleted.
        dtype: Of the images.
        max_bytes: Budget.
        policy: Says what a file is worth; None is `Usage`.
    """

    def __init__(self, folder: Path, *, dtype: str, max_bytes: int, policy: Policy | None = None) -> None:
        self._folder = folder
        self._suffix = f".{dtype}{_ENDING}"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}
        self._victims = Victims(policy or Usage(half_life=_HALF_LIFE))
        self._num_bytes = 0
        self._reserved: dict[str, int] = {}
        self._in_use: dict[str, int] = {}
        self._ahead: dict[str, None] = {}
        self._coming: set[str] = set()
        self._payers: dict[str, Payer] = {}
        self._booked: Counter[str] = Counter()
        self._hits = self._misses = self._evictions = 0
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
        for path in found:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):  # a folder or link would stand in an image's way for ever
                _remove(path)
            elif path.name.endswith(self._suffix) and _VERSION.fullmatch(version := path.name.removesuffix(self._suffix)):
                self._keep(version, status.st_size)
            elif path.suffix in (_ENDING, ".tmp"):
                path.unlink()
        self._delete(self._make_room(0) or [])

    def __contains__(self, version: str) -> bool:
        """Whether there is an image file of a version; asking is no use of it."""
        with self._lock:
            return version in self._files

    def path(self, version: str) -> Path:
        """Returns where a version's image lies or would lie.

        Raises:
            InvalidArgumentError: The version is no digest, so it must not become a path.
        """
        if not _VERSION.fullmatch(version):
            raise InvalidArgumentError("a version is a digest of lower-case letters, digits, ':', '_' and '-'")
        return self._folder / f"{version}{self._suffix}"

    def find(self, version: str) -> Path | None:
        """Returns the version's image file, or None."""
        with self._lock:
            if version not in self._files:
                self._misses += 1
                return None
            self._hits += 1
        return self.path(version)

    def reserve(self, version: str, *, size_bytes: int, ahead: bool = False) -> tuple[str, ...]:
        """Makes room for a file that is about to be written; `add` or `cancel` ends the reservation.

        Args:
            version: The version.
            size_bytes: Size of its file at most.
            ahead: Whether nobody waits for it: nothing is deleted for it, unless of its own tenant's for the tenant's limit.

        Returns:
            The versions whose files were deleted.

        Raises:
            HostCacheFullError: There is no such room, in all or (TenantHostFullError) for the tenant; nothing was deleted.
            TenantHostLimitError: It is larger than what its tenant may have.
            InvalidArgumentError: The version is no digest.
        """
        self.path(version)
        with self._lock:
            self._unreserve(version)
            mine = self._make_room_of_tenant(version, size_bytes)
            others_bytes = size_bytes - sum(self._files[one] for one in mine)
            if ahead and self._used() + others_bytes > self._max_bytes:
                raise HostCacheFullError("there is no free room for an image that nobody waits for", retry_after_s=1.0)
            others = self._make_room(others_bytes, besides=mine)
            if others is None:
                raise HostCacheFullError(f"no room for an image of {size_bytes} bytes in {self._max_bytes}", retry_after_s=1.0)
            self._drop(mine)
            self._reserved[version] = size_bytes
            if ahead and version not in self._in_use:
                self._ahead[version] = None
            self._book(version, size_bytes)
            self._delete([*mine, *others])
        return (*mine, *others)

    def add(self, version: str, *, size_bytes: int) -> tuple[str, ...]:
        """Notes that a version's file was written, of at most the reserved size.

        Returns:
            The versions whose files had to go since this one is larger than was reserved.
        """
        with self._lock:
            self._unreserve(version)
            self._keep(version, size_bytes)
            evicted = self._make_room(0, besides=[version]) or []
            self._delete(evicted)
        return tuple(evicted)

    def give_way(self) -> tuple[str, ...]:
        """Deletes files, worth least first, that hold an eighth of the bytes: the disk is full below the budget.

        Returns:
            The versions whose files were deleted; none when all are in use.
        """
        with self._lock:
            evicted, _ = self._choose(self._num_bytes // 8)
            self._drop(evicted)
            self._delete(evicted)
        return tuple(evicted)

    def cancel(self, version: str) -> None:
        """Notes that a file was not written and does not come; ends its reservation, if there was one."""
        with self._lock:
            self._unreserve(version)
            self._coming.discard(version)
            self._forget_traces(version)

    def hold(self, version: str, payer: Payer | None = None) -> None:
        """Notes a use of a version and keeps its file from making room until as many calls of `let_go`.

        Args:
            version: The version.
            payer: Who uses it. A file that belongs to nobody becomes its, unless that would exceed its limit; then it goes first
                when it is let go.
        """
        with self._lock:
            self._victims.note(version)
            self._in_use[version] = self._in_use.get(version, 0) + 1
            self._ahead.pop(version, None)
            if payer is not None:
                self._charge(version, payer)
                if version in self._files and version not in self._payers:
                    self._ahead[version] = None

    def let_go(self, version: str, *, is_coming: bool = False) -> None:
        """Takes back one `hold`. For a file that is still coming whoever held it pays, until `cancel` if it does not come."""
        with self._lock:
            (self._coming.add if is_coming else self._coming.discard)(version)
            count = self._in_use.pop(version) - 1
            if count:
                self._in_use[version] = count
            else:
                self._forget_traces(version)

    def remove(self, version: str) -> int:
        """Deletes a version's file (retired, quarantined, corrupt), held or not. Returns its bytes; 0 when there was none."""
        with self._lock:
            size_bytes = self._files.get(version, 0)
            self._forget(version)
            self._delete([version])
        return size_bytes

    def versions(self) -> tuple[str, ...]:
        """Returns the versions with a file, worth least first."""
        with self._lock:
            return tuple(self._victims.in_order())

    def sizes(self) -> dict[str, int]:
        """Returns the versions with a file, and its bytes."""
        with self._lock:
            return dict(self._files)

    def size_of(self, version: str) -> int | None:
        """Returns the bytes of a version's file, or None."""
        with self._lock:
            return self._files.get(version)

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
        return self._num_bytes + sum(self._reserved.values())

    def _make_room_of_tenant(self, version: str, size_bytes: int) -> list[str]:
        """Returns which files of a version's tenant go so that it fits into the tenant's limit."""
        payer = self._payers.get(version)
        if payer is None or not payer.max_bytes:
            return []
        used = self._booked[payer.tenant] - self._files.get(version, 0)
        why = f"the adapter takes {size_bytes} bytes of host memory; its tenant may have {payer.max_bytes} and uses {used}"
        if size_bytes > payer.max_bytes:
            raise TenantHostLimitError(why, tenant=payer.tenant)
        mine, rest = self._choose(used + size_bytes - payer.max_bytes, keep=[version], of=payer.tenant)
        if rest > 0:
            raise TenantHostFullError(why, tenant=payer.tenant)
        return mine

    def _make_room(self, size_bytes: int, *, besides: Sequence[str] = ()) -> list[str] | None:
        """Takes files out of the books until `size_bytes` fit; None, and no change, if they cannot."""
        evicted, rest = self._choose(self._used() + size_bytes - self._max_bytes, keep=besides)
        if rest > 0:
            return None
        self._drop(evicted)
        return evicted

    def _choose(self, excess: int, *, keep: Sequence[str] = (), of: str | None = None) -> tuple[list[str], int]:
        """Returns the files that go, and how much of the excess is left when all have gone that may.

        Those that came ahead and were not held since go first, in the order in which they came, then those worth least.

        Args:
            excess: Bytes to free.
            keep: Files that stay.
            of: Tenant whose files alone may go; None for anybody's.
        """
        chosen: list[str] = []
        if excess <= 0:
            return chosen, excess
        with closing(self._victims.in_order()) as victims:
            for version in itertools.chain(filter(self._files.__contains__, self._ahead), victims):
                if version in chosen:
                    continue
                payer = self._payers.get(version)
                if version not in self._in_use and version not in keep and (of is None or (payer and payer.tenant == of)):
                    chosen.append(version)
                    excess -= self._files[version]
                    if excess <= 0:
                        break
        return chosen, excess

    def _keep(self, version: str, size_bytes: int) -> None:
        payer, is_ahead = self._payers.get(version), version in self._ahead
        self._forget(version)
        self._coming.discard(version)
        if payer is not None:
            self._payers[version] = payer
        if is_ahead:
            self._ahead[version] = None
        self._files[version] = size_bytes
        self._num_bytes += size_bytes
        self._book(version, size_bytes)
        self._victims.note(version, uses=0)
        self._victims.add(version, size=size_bytes)

    def _forget(self, version: str) -> None:
        size_bytes = self._files.pop(version, 0)
        self._num_bytes -= size_bytes
        self._book(version, -size_bytes)
        self._victims.discard(version)
        if version not in self._reserved:
            self._ahead.pop(version, None)
        self._forget_traces(version)

    def _unreserve(self, version: str) -> None:
        self._book(version, -self._reserved.pop(version, 0))

    def _charge(self, version: str, payer: Payer) -> None:
        """Makes a version a tenant's: one that is nobody's, or that is not here yet and whose tenant may have less."""
        size_bytes = self._files.get(version, 0) + self._reserved.get(version, 0)
        old = self._payers.get(version)
        if old is not None and old.tenant == payer.tenant:
            self._payers[version] = payer
            return
        is_more = old is not None and old.max_bytes and (not payer.max_bytes or payer.max_bytes > old.max_bytes)
        fits = not size_bytes or not payer.max_bytes or self._booked[payer.tenant] + size_bytes <= payer.max_bytes
        if fits and (old is None or (is_more and not size_bytes)):
            self._payers[version] = payer
            self._book(version, size_bytes)

    def _book(self, version: str, size_bytes: int) -> None:
        payer = self._payers.get(version)
        if payer is not None and size_bytes:
            self._booked[payer.tenant] += size_bytes
            if not self._booked[payer.tenant]:
                del self._booked[payer.tenant]

    def _forget_traces(self, version: str) -> None:
        """Forgets whose a version was, and that it came ahead, when it is neither here, nor on its way, nor used."""
        if not any(version in those for those in (self._files, self._reserved, self._in_use, self._coming)):
            self._payers.pop(version, None)
            self._ahead.pop(version, None)

    def _drop(self, versions: list[str]) -> None:
        for version in versions:
            self._forget(version)
        self._evictions += len(versions)

    def _delete(self, versions: list[str]) -> None:
        for version in versions:
            self.path(version).unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
