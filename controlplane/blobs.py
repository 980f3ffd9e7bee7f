"""Adapter files in an object store, under digests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import UUID

import obstore
from obstore.exceptions import AlreadyExistsError as ObjectExistsError
from obstore.exceptions import BaseError
from obstore.store import from_url

from controlplane.settings import PREFIX
from veneer.errors import DataLossError, UnavailableError
from veneer.settings import SettingError

_MAX_PART_BYTES = 1 << 20
_WINDOW_BYTES = 4 << 20
_ONE_PUT_BYTES = 64 << 20
"""Up to here a file is written by one request, which can refuse to replace; larger ones go up in parts."""
_SIGNING = frozenset({"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss"})


class Blobs:
    """Writes and reads files of versions.

    Any task may call it; the store is called in threads, since its own async calls are not safe when the process ends.

    A file lies at `<folder>/<file digest>`, and every upload has a folder of its own (`upload_folder`): no name that a caller
    chose is ever part of a path, equal files of two tenants are two objects, so that nobody gains time by another's upload, and
    a folder that was removed is never written again.
    """

    def __init__(self, url: str) -> None:
        """Opens the store.

        Raises:
            SettingError: The address is not one of an object store that can be opened.
        """
        parts = urlsplit(url)
        self._can_sign = parts.scheme in _SIGNING
        is_folder = parts.scheme == "file"
        self._root = Path(unquote(parts.path)) if is_folder else None
        try:
            self._store: Any = from_url(url, mkdir=True) if is_folder else from_url(url)
        except (BaseError, ValueError, OSError) as error:
            cause = str(error).strip().partition("\n")[0]  # the rest is what the library knows of itself
            raise SettingError.of_variable(f"{PREFIX}STORE_URL", cause) from error

    async def put(self, folder: str, digest: str, file: Path) -> None:
        """Writes a file into a folder; doing it again changes nothing.

        Raises:
            UnavailableError: The store is away.
        """
        await asyncio.to_thread(self._put, _path(folder, digest), file)

    async def read(self, folder: str, digest: str, *, offset: int) -> AsyncIterator[bytes]:
        """Reads a file from an offset to its end, in parts of at most 1 MiB.

        Raises:
            DataLossError: The store has no such object.
            UnavailableError: The store is away.
        """
        window, size_bytes = await asyncio.to_thread(self._read, _path(folder, digest), offset)
        while window:
            offset += len(window)
            for start in range(0, len(window), _MAX_PART_BYTES):
                yield window[start : start + _MAX_PART_BYTES]
            if offset >= size_bytes:
                return
            window, size_bytes = await asyncio.to_thread(self._read, _path(folder, digest), offset)

    async def sign(self, folder: str, digest: str, *, lifetime_s: float) -> str:
        """An address from which the file can be read for a while; empty when the store cannot sign."""
        if not self._can_sign:
            return ""
        lifetime = timedelta(seconds=lifetime_s)
        with _translated():
            return str(await asyncio.to_thread(obstore.sign, self._store, "GET", _path(folder, digest), lifetime))

    async def remove(self, folder: str) -> int:
        """Removes a folder and the files in it, not those of folders within; returns how many there were.

        Raises:
            UnavailableError: The store is away; some files may be gone.
        """
        return await asyncio.to_thread(self._remove, folder)

    def _remove(self, folder: str) -> int:
        with _translated():
            paths = [one["path"] for one in obstore.list_with_delimiter(self._store, folder)["objects"]]
            if paths:
                obstore.delete(self._store, paths)
        if self._root is not None:
            _remove_folder(self._root / folder)
        return len(paths)

    def _put(self, path: str, file: Path) -> None:
        size_bytes = file.stat().st_size
        with _translated():
            if size_bytes <= _ONE_PUT_BYTES:
                try:
                    obstore.put(self._store, path, file, mode="create", use_multipart=False)
                    return
                except ObjectExistsError:
                    pass
            if self._size(path) != size_bytes:
                obstore.put(self._store, path, file)  # the path is a digest: whatever is replaced should have been the same

    def _size(self, path: str) -> int | None:
        try:
            return int(obstore.head(self._store, path)["size"])
        except FileNotFoundError:
            return None

    def _read(self, path: str, offset: int) -> tuple[bytes, int]:
        """Reads a window of a file from an offset on; returns it with the size of the file, or nothing and 0 beyond its end.

        One call for each window: a stream's chunks come each from the store's own threads, and take three times as long.
        """
        with _translated():
            try:
                result = obstore.get(self._store, path, options={"range": (offset, offset + _WINDOW_BYTES)})
                return bytes(result.bytes()), int(result.meta["size"])
            except BaseError:
                size_bytes = self._size(path)
                if size_bytes is None or offset < size_bytes:
                    raise
                return b"", 0


def upload_folder(version: str, upload: UUID | None) -> str:
    """Folder of an upload of a version; None names that of the layout in which a version had one folder for ever."""
    folder = f"{version[:2]}/{version}"
    return folder if upload is None else f"{folder}/{upload.hex}"


def _path(folder: str, digest: str) -> str:
    return f"{folder}/{digest}"


def _remove_folder(path: Path) -> None:
    """Removes a folder on disk with what a writer that was killed left in it, which no listing shows; a folder within stays."""
    with suppress(OSError):
        for left in path.iterdir():
            if left.is_file():
                left.unlink(missing_ok=True)
        path.rmdir()
        path.parent.rmdir()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataLossError("the object store has no such file") from error
    except (BaseError, OSError) as error:
        raise UnavailableError("the object store is away", retry_after_s=1.0) from error
