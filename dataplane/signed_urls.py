"""Reads files straight from the object store, where the control plane could sign an address for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta
from urllib.parse import urlsplit, urlunsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import HTTPStore

from veneer.errors import UnavailableError

_WINDOW_BYTES = 4 << 20
_CONNECT_S = 2.0


async def read_signed(url: str, *, offset: int, size_bytes: int, idle_s: float) -> AsyncGenerator[bytes]:
    """Reads a file from an offset to its end, in windows of at most 4 MiB, each by a request of its own.

    The store is called in threads, since its own async calls are not safe when the process ends. Redirects and bytes are not
    believed: whoever calls checks the digest. No error quotes the address, which is a credential for as long as it is valid.

    Args:
        url: The signed address.
        offset: Bytes to leave out.
        size_bytes: Size of the file.
        idle_s: How long one window may take.

    Raises:
        UnavailableError: The file cannot be read there (any more).
    """
    try:
        store, name = _open(url, idle_s)
        while offset < size_bytes:
            length = min(_WINDOW_BYTES, size_bytes - offset)
            data = bytes(await asyncio.to_thread(obstore.get_range, store, name, start=offset, length=length))
            if not data:
                raise UnavailableError("the object store sent nothing")
            offset += len(data)
            yield data
    except (BaseError, OSError, ValueError):
        raise UnavailableError("the file cannot be read at its signed address") from None


def _open(url: str, idle_s: float) -> tuple[HTTPStore, str]:
    """Returns a store of the folder that the file is in, and the file's name; the signature is part of every request."""
    parts = urlsplit(url)
    folder, _, name = parts.path.rpartition("/")
    options = {
        "allow_http": parts.scheme == "http",
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, idle_s)),
        "timeout": timedelta(seconds=idle_s),
    }
    retry = {"max_retries": 0, "retry_timeout": timedelta(seconds=idle_s)}
    folder_url = urlunsplit((parts.scheme, parts.netloc, folder, parts.query, ""))
    return HTTPStore.from_url(folder_url, client_options=options, retry_config=retry), name  # type: ignore[arg-type]
