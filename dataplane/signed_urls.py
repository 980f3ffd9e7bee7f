"""Reads files straight from the object store, where the control plane could sign an address for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from urllib.parse import urlsplit, urlunsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import HTTPStore

from veneer.errors import UnavailableError

_WINDOW_BYTES = 4 << 20
_CONNECT_S = 2.0


class SignedReads:
    """Reads files at signed addresses, each window on a thread. Owned by the event loop.

    The store is called in threads, since its own async calls are not safe when the process ends. A read that hangs cannot be
    broken off: it keeps its thread until its time is up, also when nobody waits for it any more. So these threads do nothing
    else, and where all of them are taken a read is refused at once rather than kept waiting: whoever asks has another way.

    Args:
        max_reads: Reads at the same time.
    """

    def __init__(self, max_reads: int) -> None:
        self._threads = ThreadPoolExecutor(max_reads, thread_name_prefix="signed-reads")
        self._free = threading.Semaphore(max_reads)

    def close(self) -> None:
        """Lets the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, url: str, *, offset: int, size_bytes: int, idle_s: float) -> AsyncGenerator[bytes]:
        """Reads a file from an offset to its end, in windows of at most 4 MiB, each by a request of its own.

        Redirects and bytes are not believed: whoever calls checks the digest. No error quotes the address, which is a credential
        for as long as it is valid.

        Args:
            url: The signed address.
            offset: Bytes to leave out.
            size_bytes: Size of the file.
            idle_s: How long one window may take.

        Raises:
            UnavailableError: The file cannot be read there (any more), or all threads are taken.
        """
        try:
            store, name = _open(url, idle_s)
            while offset < size_bytes:
                length = min(_WINDOW_BYTES, size_bytes - offset)
                data = await self._call(partial(_read_window, store, name, offset=offset, length=length))
                if not data:
                    raise UnavailableError("the object store sent nothing")
                offset += len(data)
                yield data
        except (BaseError, OSError, ValueError):
            raise UnavailableError("the file cannot be read at its signed address") from None

    async def _call(self, read: Callable[[], bytes]) -> bytes:
        if not self._free.acquire(blocking=False):
            raise UnavailableError("all threads that read from the object store are taken")
        call = self._threads.submit(read)
        call.add_done_callback(lambda _: self._free.release())
        return await asyncio.wrap_future(call)


def _read_window(store: HTTPStore, name: str, *, offset: int, length: int) -> bytes:
    return bytes(obstore.get_range(store, name, start=offset, length=length))


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
