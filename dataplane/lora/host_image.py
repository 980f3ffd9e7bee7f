"""An image in host memory: a file that was checked once and stays mapped, so that a load is a copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from dataplane.lora.image import Image
from dataplane.lora.image_file import open_image

_Stamp = tuple[int, int, int, int]
_RACY_NS = 100_000_000
"""Writes that follow each other this closely may bear the same time."""


class HostImage:
    """A mapped image file. Owned by the thread that opens it, then by the copying thread.

    Reading an image through for its checksum takes several times as long as copying it, so it is done once. Whoever writes into
    the file afterwards changes what is mapped: before each use the file's status is compared with that before the check, and a
    file that is another one now is checked again. One that is gone cannot be written to any more. A file whose time is that of
    its check cannot be told from one that was written to just after it, and is checked again too; `write_image` makes none.

    Args:
        path: The file.
        version: Digest that it must carry.
        dtype: Type that it must carry.
        check: Checks what else the image must be.
        computing: Held by whoever opens images while it computes and does not wait for the disk; None where one does alone.

    Raises:
        CorruptImageError: The file is cut, changed, or another one than expected; also from `check`.
        OSError: The file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        *,
        version: str,
        dtype: str,
        check: Callable[[Image], None],
        computing: AbstractContextManager[object] | None = None,
    ) -> None:
        self._path = path
        self._version = version
        self._dtype = dtype
        self._check = check
        self._computing: AbstractContextManager[object] = nullcontext() if computing is None else computing
        self._stamp: _Stamp | None = None
        self._image = self._open()

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def rank(self) -> int:
        """Largest rank of the image, which each load asks for."""
        return self._rank

    @property
    def num_bytes(self) -> int:
        """Bytes that are mapped."""
        return self._image.num_bytes

    @property
    def has_changed(self) -> bool:
        """Whether the file is another one than that which was checked, so that `image` reads it again."""
        try:
            return self._stamp is not None and _stamp(self._path) != self._stamp
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def image(self) -> Image:
        """Returns the image.

        Raises:
            CorruptImageError: The file was changed since it was checked, and is not what it must be.
            OSError: The same, and it cannot be read.
        """
        try:
            stamp = _stamp(self._path)
        except FileNotFoundError:
            return self._image
        if stamp != self._stamp:
            self._image = self._open()
        return self._image

    def _open(self) -> Image:
        stamp = _stamp(self._path)
        image = open_image(self._path, version=self._version, dtype=self._dtype, computing=self._computing)
        with self._computing:
            self._check(image)
            _ = image.grid  # each load asks for it, and for the rank
            self._rank = image.rank
        is_old = time.time_ns() - stamp[0] > _RACY_NS
        self._stamp = stamp if is_old else None
        return image


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
