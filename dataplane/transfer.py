"""The files of a version: a grant, bytes from where they lie, their digests; a transfer that was cut goes on where it stopped."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self, cast

from dataplane.blob_grants import Blob, Grant, LostFileError
from dataplane.enrollment import NotEnrolledError
from dataplane.load_room import Amount
from dataplane.signed_urls import SignedReads
from veneer.artifact import version_digest
from veneer.errors import (
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from veneer.threads import in_thread, to_the_end

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_IN_MEMORY_BYTES = 16 << 20
"""Up to here a file stays in this process's memory; a larger one lies in a file without a name."""
_LOST_READS = 3
"""So often a file is missing, with pauses between, before it is lost: a store may move or restore it just then."""
_WINDOW_BYTES = 4 << 20
"""So much is gathered before it is digested and kept, on another thread."""

Pace = Callable[[int], Awaitable[None]]
"""Told of bytes that came; more are read when it returns."""
Room = Callable[[Amount], Awaitable[None]]
"""Told of bytes that something will take; it begins when this returns. Whoever gave it knows when they are free again."""


async def at_once(num_bytes: int) -> None:
    """The pace of who waits for nothing."""


async def anywhere(amount: Amount) -> None:
    """The room of who is alone."""


class CorruptVersionError(FailedPreconditionError):
    """A version's bytes do not have its digest."""


class WithdrawnVersionError(FailedPreconditionError):
    """The control plane does not let a version be served (any more): nothing may take its place."""


class DeletedVersionError(NotFoundError):
    """There is no such version any more: it was deleted after a request was bound to it."""


class UnloadableVersionError(FailedPreconditionError):
    """A version's files are whole, but this node cannot load them."""


class Source(Protocol):
    """Where a version's bytes come from; the control plane's node service in `dataplane.catalog_client`."""

    async def grant_blobs(self, version: str, *, operator_key_digest: bytes = b"") -> Grant:
        """Asks for leave to read a version's files."""

    def read_blob(self, grant: Grant, blob: Blob, *, offset: int, idle_s: float) -> AsyncIterator[bytes]:
        """Streams a file from an offset on."""

    async def report_corrupt(self, version: str) -> None:
        """Reports a version whose bytes are corrupt after a repeated read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """Bounds of one version's transfer.

    Attributes:
        max_config_bytes: Size of the configuration.
        max_weights_bytes: Size of the weights.
        max_resumes: How often one file's transfer is taken up again.
        idle_s: How long one attempt may bring nothing.
        patience_s: How long all attempts together may.
        backoff_s: First pause before a transfer is taken up again; it doubles.
    """

    max_config_bytes: int
    max_weights_bytes: int
    max_resumes: int = 5
    idle_s: float = 10.0
    patience_s: float = 30.0
    backoff_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Files:
    """A version's files, each with its digest. Owned by who asked for them; they are gone when it closes them.

    Attributes:
        config: Bytes of the configuration.
        weights: The weights, open for reading.
    """

    config: bytes
    weights: BinaryIO

    def __enter__(self) -> Self:
        """Returns the files."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes them."""
        self.weights.close()


class Transfer:
    """Reads versions' files. Owned by the event loop; bytes are digested and kept on other threads.

    Args:
        source: Where the bytes come from.
        signed: Reads what has a signed address.
        base_digest: The base that this node serves.
        folder: Where large files lie without a name.
        limits: Bounds.
        observe: Told, on the event loop, the seconds that a part of a transfer took: `grant` or `read`.
    """

    def __init__(
        self,
        source: Source,
        signed: SignedReads,
        *,
        base_digest: str,
        folder: Path,
        limits: TransferLimits,
        observe: Callable[[str, float], None],
    ) -> None:
        self._source = source
        self._signed = signed
        self._base_digest = base_digest
        self._folder = folder
        self._limits = limits
        self._observe = observe

    async def read(self, version: str, *, by_url: bool, pace: Pace = at_once, room: Room = anywhere) -> Files:
        """Reads both files of a version, at the same time.

        Args:
            version: The version.
            by_url: Reads from the object store where there is a signed address, and through the control plane where that fails.
            pace: Told of bytes that came.
            room: Told of what the files take, before the first byte is read.

        Raises:
            CorruptVersionError: Its bytes are wrong.
            UnloadableVersionError: It is for another base, or too large.
            WithdrawnVersionError: The control plane does not let it be served (any more).
            DeletedVersionError: There is no such version (any more).
            LostFileError: The store has no such file, also when it was asked again after pauses, each time under a new grant.
            UnavailableError: Control plane or store cannot be reached.
            OSError: The bytes cannot be kept.
        """
        started_s = time.monotonic()
        grant = await self._grant(version)
        granted_s = time.monotonic()
        await room(_amount_of(grant))
        with ExitStack() as stack:
            files = {blob.name: await self._buffer(blob, stack) for blob in grant.blobs}
            await _all(
                partial(self._read_file, version, grant, blob, files[blob.name], by_url=by_url, pace=pace) for blob in grant.blobs
            )
            with files[_CONFIG] as file:
                file.seek(0)
                config = file.read()
            stack.pop_all()
        self._observe("grant", granted_s - started_s)
        self._observe("read", time.monotonic() - granted_s)
        return Files(config, files[_WEIGHTS])

    async def _grant(self, version: str) -> Grant:
        try:
            grant = await self._source.grant_blobs(version)
        except WithdrawnVersionError:  # it says why
            raise
        except NotFoundError as error:
            raise DeletedVersionError("no such adapter, alias or version") from error
        except FailedPreconditionError as error:
            raise WithdrawnVersionError("the version cannot be served any more") from error
        except PermissionDeniedError as error:  # about the node, not a caller: the next Resolve asks it to serve the version anew
            raise UnavailableError("this node may not load the version now", retry_after_s=1.0) from error
        if grant.base_digest != self._base_digest:
            raise UnloadableVersionError("the version is for another base than this node serves")
        digests = {blob.name: blob.digest for blob in grant.blobs}
        if set(digests) != {_CONFIG, _WEIGHTS} or len(grant.blobs) != 2:
            raise CorruptVersionError("the version does not consist of the files that it must")
        try:
            is_right = version_digest(grant.owner, grant.base_digest, digests) == version
        except ValueError:
            is_right = False
        if not is_right:
            raise CorruptVersionError("the files that the store names are not those of the version")
        sizes = {blob.name: blob.size_bytes for blob in grant.blobs}
        if sizes[_CONFIG] > self._limits.max_config_bytes or sizes[_WEIGHTS] > self._limits.max_weights_bytes:
            raise UnloadableVersionError("the version is larger than this node loads")
        return grant

    async def _buffer(self, blob: Blob, stack: ExitStack) -> BinaryIO:
        """Returns a place for a file's bytes, which the stack closes."""
        if blob.size_bytes <= _IN_MEMORY_BYTES:
            return stack.enter_context(io.BytesIO())
        # The stack owns it before the thread is done: a caller that is cancelled meanwhile leaves nothing open.
        return await in_thread(lambda: stack.enter_context(cast("BinaryIO", tempfile.TemporaryFile(dir=self._folder))))

    async def _read_file(self, version: str, grant: Grant, blob: Blob, file: BinaryIO, *, by_url: bool, pace: Pace) -> None:
        digest = hashlib.sha256()
        size_bytes = kept_bytes = 0
        parts: list[bytes] = []

        def keep() -> None:
            for part in parts:
                digest.update(part)
                file.write(part)
            parts.clear()

        pause_s, came_s = self._limits.backoff_s, time.monotonic()
        for attempt in range(self._limits.max_resumes + 1):
            try:
                transfer: AsyncIterator[bytes]
                if by_url and blob.url and attempt == 0:
                    transfer = self._signed.read(
                        blob.url, offset=size_bytes, size_bytes=blob.size_bytes, idle_s=self._limits.idle_s
                    )
                else:
                    transfer = self._source.read_blob(grant, blob, offset=size_bytes, idle_s=self._limits.idle_s)
                async with aclosing(transfer):  # type: ignore[type-var]
                    async for data in transfer:
                        parts.append(data)
                        size_bytes += len(data)
                        if size_bytes > blob.size_bytes:
                            raise CorruptVersionError("a file of the version is longer than it must be")
                        if size_bytes - kept_bytes >= _WINDOW_BYTES:
                            await in_thread(keep)
                            kept_bytes = size_bytes
                        await pace(len(data))
                        came_s = time.monotonic()
                break
            except NotEnrolledError:
                raise
            except (UnavailableError, PermissionDeniedError, LostFileError) as error:
                is_last = attempt == self._limits.max_resumes or time.monotonic() - came_s >= self._limits.patience_s
                if isinstance(error, LostFileError) and (is_last or attempt + 1 >= _LOST_READS):
                    raise
                if is_last:
                    raise UnavailableError("the store cannot be read", retry_after_s=1.0) from error
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(pause_s * 2, 2.0)
                # The grant has ended; or the file was moved just now, or its version was deleted, which the next grant says.
                if isinstance(error, PermissionDeniedError | LostFileError):
                    grant = await self._grant(version)
        await in_thread(keep)
        if size_bytes != blob.size_bytes or digest.hexdigest() != blob.digest:
            raise CorruptVersionError("a file of the version does not have its digest")


def _amount_of(grant: Grant) -> Amount:
    """Returns what a version's files take at most: kept, and a window that comes while the one before it is kept."""
    kept = sum(blob.size_bytes for blob in grant.blobs if blob.size_bytes <= _IN_MEMORY_BYTES)
    windows = sum(min(blob.size_bytes, 2 * _WINDOW_BYTES) for blob in grant.blobs)
    return Amount(memory=kept + windows, disk=sum(blob.size_bytes for blob in grant.blobs) - kept)


async def _all(transfers: Iterable[Callable[[], Coroutine[None, None, None]]]) -> None:
    """Runs transfers at the same time; the first that fails ends the others."""
    tasks = [asyncio.create_task(transfer()) for transfer in transfers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await to_the_end(tasks)
