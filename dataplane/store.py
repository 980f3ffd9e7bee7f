"""From the object store to an image in host memory: grant, bytes, digests, the same check as at publish, layout.

Nothing of the store is believed: every file must have the digest that the grant names, and the files together must have the
version's own digest, which came from the catalogue. Only a whole image ever gets its final name.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import random
import shutil
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from dataplane.catalog_client import Blob, Grant
from dataplane.folding import image_pairs
from dataplane.lora.host_cache import HostCache
from dataplane.lora.image import ALIGN_BYTES, ImageError, build_image, write_image
from dataplane.signed_urls import read_signed
from veneer.artifact import Artifact, ArtifactError, BaseDescription, BaseWeights, Limits, check, version_digest
from veneer.errors import FailedPreconditionError, NotFoundError, PermissionDeniedError, UnavailableError, VeneerError

_log = logging.getLogger(__name__)
_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class CorruptVersionError(FailedPreconditionError):
    """A version's bytes do not have its digest."""


class UnloadableVersionError(FailedPreconditionError):
    """A version's files are whole, but this node cannot load them."""


class Source(Protocol):
    """Where a version's bytes come from; the control plane's node service in `dataplane.catalog_client`."""

    async def grant_blobs(self, version: str) -> Grant:
        """Asks for leave to read a version's files."""

    def read_blob(self, grant: Grant, blob: Blob, *, offset: int, idle_s: float) -> AsyncIterator[bytes]:
        """Streams a file from an offset on."""

    async def report_corrupt(self, version: str) -> None:
        """Reports a version whose bytes are corrupt after a repeated read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds of fetching.

    Attributes:
        max_fetches: Versions fetched at the same time.
        max_builds: Images built at the same time.
        max_resumes: How often one file's transfer is taken up again.
        idle_s: How long a transfer may bring nothing.
        backoff_s: First pause before a transfer is taken up again; it doubles.
    """

    max_fetches: int = 8
    max_builds: int = 2
    max_resumes: int = 5
    idle_s: float = 10.0
    backoff_s: float = 0.1


class AdapterStore:
    """Fetches versions and lays them out. Owned by the event loop; files are read and written on other threads.

    Args:
        source: Where the bytes come from.
        cache: Where images are kept; `fetch` makes room in it.
        on_evicted: Told, on the event loop, which versions' files made room.
        base: The base that this node serves.
        base_weights: Its weights, which DoRA and trained biases are folded with.
        folder: Work folder; what an earlier process left in it is removed.
        dtype: Type of the image: `bfloat16`, `float16` or `float32`.
        artifact_limits: What the check allows.
        limits: Bounds of fetching.
    """

    def __init__(
        self,
        source: Source,
        *,
        cache: HostCache,
        on_evicted: Callable[[tuple[str, ...]], None],
        base: BaseDescription,
        base_weights: BaseWeights,
        folder: Path,
        dtype: str,
        artifact_limits: Limits,
        limits: StoreLimits,
    ) -> None:
        self._source = source
        self._cache = cache
        self._on_evicted = on_evicted
        self._base = base
        self._base_weights = base_weights
        self._folder = folder
        self._dtype = dtype
        self._artifact_limits = artifact_limits
        self._limits = limits
        self._fetches = asyncio.Semaphore(limits.max_fetches)
        self._builds = asyncio.Semaphore(limits.max_builds)
        self.num_corrupt = 0
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)

    async def fetch(self, version: str) -> Path:
        """Brings the version's image into the cache, whole or not at all, and returns where it lies.

        Raises:
            CorruptVersionError: Its bytes were wrong twice; it was reported.
            UnloadableVersionError: It is for another base, or beyond what this node can load.
            FailedPreconditionError: The control plane does not let it be served (any more).
            HostCacheFullError: Images in use leave no room.
            UnavailableError: Control plane or store cannot be reached.
        """
        async with self._fetches:
            work = self._folder / f"{version[:16]}.{uuid.uuid4().hex}"
            await asyncio.to_thread(work.mkdir, mode=0o700)
            try:
                await self._download_twice(version, work)
                async with self._builds:
                    await self._build(version, work)
            except OSError as error:
                _log.error("a version cannot be written down", extra={"version": version, "errno": error.errno})
                if error.errno in _FULL:  # the disk has less room than the budget; the next attempt finds some
                    self._on_evicted(await asyncio.to_thread(self._cache.give_way))
                raise UnavailableError("the node cannot keep the version now", retry_after_s=1.0) from error
            finally:
                await asyncio.shield(asyncio.to_thread(shutil.rmtree, work, ignore_errors=True))
        return self._cache.path(version)

    async def _download_twice(self, version: str, work: Path) -> None:
        for is_last in (False, True):
            try:
                await self._download(version, work, by_url=not is_last)
                return
            except CorruptVersionError:
                self.num_corrupt += 1
                _log.error("bytes of a version are corrupt", extra={"version": version, "again": not is_last})
                if not is_last:
                    continue
                try:
                    await self._source.report_corrupt(version)
                except VeneerError as error:
                    _log.warning("a corrupt version could not be reported", extra={"version": version, "status": error.status})
                raise

    async def _download(self, version: str, work: Path, *, by_url: bool) -> None:
        try:
            grant = await self._source.grant_blobs(version)
        except NotFoundError as error:
            raise FailedPreconditionError("the version cannot be served any more") from error
        if grant.base_digest != self._base.digest:
            raise UnloadableVersionError("the version is for another base than this node serves")
        self._check_grant(version, grant)
        for blob in grant.blobs:
            await self._download_file(version, grant, blob, work / blob.name, by_url=by_url)

    def _check_grant(self, version: str, grant: Grant) -> None:
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
        if sizes[_CONFIG] > self._artifact_limits.max_config_bytes or sizes[_WEIGHTS] > self._artifact_limits.max_weights_bytes:
            raise UnloadableVersionError("the version is larger than this node loads")

    async def _download_file(self, version: str, grant: Grant, blob: Blob, path: Path, *, by_url: bool) -> None:
        """Reads a file from the object store where there is a signed address, and through the control plane where that fails."""
        digest = hashlib.sha256()
        size_bytes = 0

        def take(data: bytes) -> None:
            digest.update(data)
            file.write(data)

        with await asyncio.to_thread(_create, path) as file:
            pause_s = self._limits.backoff_s
            for attempt in range(self._limits.max_resumes + 1):
                try:
                    transfer: AsyncIterator[bytes]
                    if by_url and blob.url and attempt == 0:
                        transfer = read_signed(
                            blob.url, offset=size_bytes, size_bytes=blob.size_bytes, idle_s=self._limits.idle_s
                        )
                    else:
                        transfer = self._source.read_blob(grant, blob, offset=size_bytes, idle_s=self._limits.idle_s)
                    async with aclosing(transfer):  # type: ignore[type-var]
                        async for data in transfer:
                            size_bytes += len(data)
                            if size_bytes > blob.size_bytes:
                                raise CorruptVersionError("a file of the version is longer than it must be")
                            await asyncio.to_thread(take, data)
                    break
                except (UnavailableError, PermissionDeniedError) as error:
                    if attempt == self._limits.max_resumes:
                        raise UnavailableError("the store cannot be read", retry_after_s=1.0) from error
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                    pause_s = min(pause_s * 2, 2.0)
                    if isinstance(error, PermissionDeniedError):  # the grant has ended
                        grant = await self._source.grant_blobs(version)
                        self._check_grant(version, grant)
        if size_bytes != blob.size_bytes or digest.hexdigest() != blob.digest:
            raise CorruptVersionError("a file of the version does not have its digest")

    async def _build(self, version: str, work: Path) -> None:
        artifact = await asyncio.to_thread(self._check, version, work)
        try:
            self._on_evicted(await asyncio.to_thread(self._cache.reserve, version, size_bytes=self._size_bytes(artifact)))
            size_bytes = await asyncio.to_thread(self._write, version, artifact, work / _WEIGHTS)
            self._on_evicted(await asyncio.to_thread(self._cache.add, version, size_bytes=size_bytes))
        except ImageError as error:
            _log.error("a version that was published cannot be loaded", extra={"version": version, "cause": error.message})
            raise UnloadableVersionError("the version cannot be loaded by this node") from error
        finally:
            self._cache.cancel(version)

    def _check(self, version: str, work: Path) -> Artifact:
        try:
            return check((work / _CONFIG).read_bytes(), work / _WEIGHTS, self._base, self._artifact_limits)
        except ArtifactError as error:
            _log.error("a version that was published cannot be loaded", extra={"version": version, "cause": error.message})
            raise UnloadableVersionError("the version cannot be loaded by this node") from error

    def _size_bytes(self, artifact: Artifact) -> int:
        """Returns an upper bound of the image file's size."""
        item = 4 if self._dtype == "float32" else 2
        modules = [self._base.module_at(pair.layer, pair.slice) for pair in artifact.pairs]
        matrices = sum(
            pair.rank * (module.in_features + module.out_features) * item
            for pair, module in zip(artifact.pairs, modules, strict=True)
        )
        # Gain and shift, a line of the header, and the padding of each.
        has_vectors = (bool(pair.magnitude or pair.lora_bias) for pair in artifact.pairs)
        widths = [module.out_features for module, has in zip(modules, has_vectors, strict=True) if has]
        widths += [self._base.modules[bias.slice].out_features for bias in artifact.biases]
        return matrices + 8 * sum(widths) + (4 * ALIGN_BYTES + 256) * (len(artifact.pairs) + len(artifact.biases)) + 8192

    def _write(self, version: str, artifact: Artifact, weights: Path) -> int:
        image = build_image(
            image_pairs(artifact, weights, base=self._base, base_weights=self._base_weights),
            version=version,
            base_digest=self._base.digest,
            dtype=self._dtype,
            num_layers=self._base.num_layers,
            num_slices=len(self._base.modules),
        )
        return write_image(self._cache.path(version), image)


def _create(path: Path) -> IO[bytes]:
    path.unlink(missing_ok=True)
    return path.open("xb")
