"""Adapter files in an object store, under digests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError as ObjectExistsError
from obstore.exceptions import BaseError
from obstore.store import from_url

from veneer.errors import DataLossError, UnavailableError

_MAX_PART_BYTES = 1 << 20
_MIN_CHUNK_BYTES = 256 << 10
_ONE_PUT_BYTES = 64 << 20
"""Up to here a file is written by one request, which can refuse to replace; larger ones go up in parts."""
_SIGNING = frozenset({"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss"})


class Blobs:
    """Writes and reads files of versions.

    Any task may call it; the store is called in threads, since its own async calls are not safe when the process ends.

    A file lies at `<first two digits of the version>/<version digest>/<file digest>`: no name that a caller chose is ever part
    of a path, and since a version's digest covers its owner, equal files of two tenants are two objects. Nobody gains time by
    another's upload.
    """

    def __init__(self, url: str) -> None:
        """Opens the store.

        Raises:
            ValueError: The address is not one of an object store.
        """
        self._can_sign = urlsplit(url).scheme in _SIGNING
        is_folder = urlsplit(url).scheme == "file"
        try:
            self._store: Any = from_url(url, mkdir=True) if is_folder else from_url(url)
        except (BaseError, ValueError) as error:
            raise ValueError(f"VENEER_CONTROLPLANE_STORE_URL: {error}") from error

    async def put(self, version: str, digest: str, file: Path) -> None:
        """Writes a file of a version; doing it again changes nothing.

        Raises:
            UnavailableError: The store is away.
        """
        await asyncio.to_thread(self._put, _path(version, digest), file)

    async def read(self, version: str, digest: str, *, offset: int) -> AsyncIterator[bytes]:
        """Reads a file from an offset to its end, in parts of at most 1 MiB.

        Raises:
            DataLossError: The store has no such object.
            UnavailableError: The store is away.
        """
        chunks = await asyncio.to_thread(self._open, _path(version, digest), offset)
        while True:
            chunk = await asyncio.to_thread(_next, chunks)
            if chunk is None:
                return
            for start in range(0, len(chunk), _MAX_PART_BYTES):
                yield chunk[start : start + _MAX_PART_BYTES]

    async def sign(self, version: str, digest: str, *, lifetime_s: float) -> str:
        """An address from which the file can be read for a while; empty when the store cannot sign."""
        if not self._can_sign:
            return ""
        lifetime = timedelta(seconds=lifetime_s)
        with _translated():
            return str(await asyncio.to_thread(obstore.sign, self._store, "GET", _path(version, digest), lifetime))

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

    def _open(self, path: str, offset: int) -> Iterator[bytes]:
        with _translated():
            if offset and offset >= (self._size(path) or 0):
                return iter(())
            result = obstore.get(self._store, path, options={"range": {"offset": offset}} if offset else None)
            return iter(result.stream(min_chunk_size=_MIN_CHUNK_BYTES))


def _path(version: str, digest: str) -> str:
    return f"{version[:2]}/{version}/{digest}"


def _next(chunks: Iterator[bytes]) -> bytes | None:
    with _translated():
        chunk = next(chunks, None)
    return None if chunk is None else bytes(chunk)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataLossError("the object store has no such file") from error
    except (BaseError, OSError) as error:
        raise UnavailableError("the object store is away", retry_after_s=1.0) from error
