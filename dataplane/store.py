"""From the object store to an image in host memory: the version's files, the same check as at publish, layout.

Nothing of the store is believed: every file must have the digest that the grant names, and the files together must have the
version's own digest, which came from the catalogue. Only a whole image ever gets its final name.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from dataplane.folding import image_pairs
from dataplane.load_room import Amount
from dataplane.lora.coding import ITEM_BYTES
from dataplane.lora.host_cache import HostCache
from dataplane.lora.image import ALIGN_BYTES, Image, ImageError, LossyAdapterError, build_image, check_loss
from dataplane.lora.image_file import write_image
from dataplane.signed_urls import SignedReads
from dataplane.transfer import (
    CorruptVersionError,
    Files,
    Pace,
    Room,
    Source,
    Transfer,
    TransferLimits,
    UnloadableVersionError,
    anywhere,
    at_once,
)
from veneer.artifact import Artifact, ArtifactError, BaseDescription, BaseWeights, Limits, check
from veneer.errors import UnavailableError, VeneerError
from veneer.threads import in_thread

_log = logging.getLogger(__name__)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MAX_SIGNED_READS = 128
_MIN_SIGNED_READS = 8
_SIGNED_WINDOW_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds of fetching.

    Attributes:
        max_fetches: Versions fetched at the same time.
        max_builds: Images built at the same time.
        window_bytes: What reads of the object store may have in hand together, also those that hang and nobody waits for.
        max_resumes: See `TransferLimits`.
        idle_s: See `TransferLimits`.
        patience_s: See `TransferLimits`.
        backoff_s: See `TransferLimits`.
    """

    max_fetches: int = 8
    max_builds: int = 2
    window_bytes: int = 256 << 20
    max_resumes: int = 5
    idle_s: float = 10.0
    patience_s: float = 30.0
    backoff_s: float = 0.1


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version's files as the store has them, checked. Closed by who asked for them.

    Attributes:
        artifact: What the check gave.
        files: The files.
        num_layers: Layers of the base.
    """

    artifact: Artifact
    files: Files
    num_layers: int

    @property
    def weights(self) -> BinaryIO:
        """The weights, open for reading."""
        return self.files.weights

    def __enter__(self) -> Self:
        """Returns the version."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the files."""
        self.files.__exit__(kind, error, trace)


class AdapterStore:
    """Fetches versions and lays them out. Owned by the event loop; files are read and written on other threads.

    Args:
        source: Where the bytes come from.
        cache: Where images are kept; `fetch` makes room in it.
        on_evicted: Told, on the event loop, which versions' files made room.
        base: The base that this node serves.
        base_weights: Its weights, which DoRA and trained biases are folded with.
        folder: Work folder; what an earlier process left in it is removed.
        dtype: Type of the image: `bfloat16`, `float16`, `float32` or `fp8`.
        max_loss: Most that a pair may lose in fp8.
        artifact_limits: What the check allows.
        limits: Bounds of fetching.
        observe: Told, on the event loop, the seconds that a part of a fetch took: `grant`, `read` or `build`.
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
        max_loss: float,
        artifact_limits: Limits,
        limits: StoreLimits,
        observe: Callable[[str, float], None],
    ) -> None:
        self._source = source
        self._cache = cache
        self._on_evicted = on_evicted
        self._base = base
        self._base_weights = base_weights
        self.dtype = dtype
        self._max_loss = max_loss
        self._artifact_limits = artifact_limits
        self._observe = observe
        self._fetches = asyncio.Semaphore(limits.max_fetches)
        self._builds = asyncio.Semaphore(limits.max_builds)
        self._builders = ThreadPoolExecutor(limits.max_builds, thread_name_prefix="image-builds")
        num_windows = max(limits.window_bytes // _SIGNED_WINDOW_BYTES, _MIN_SIGNED_READS)
        self._signed = SignedReads(min(2 * limits.max_fetches, num_windows, _MAX_SIGNED_READS))  # a version has two files
        self._transfer = Transfer(
            source,
            self._signed,
            base_digest=base.digest,
            folder=folder,
            limits=TransferLimits(
                max_config_bytes=artifact_limits.max_config_bytes,
                max_weights_bytes=artifact_limits.max_weights_bytes,
                max_resumes=limits.max_resumes,
                idle_s=limits.idle_s,
                patience_s=limits.patience_s,
                backoff_s=limits.backoff_s,
            ),
            observe=observe,
        )
        self.num_corrupt = 0
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)

    def close(self) -> None:
        """Lets the threads end."""
        self._signed.close()
        self._builders.shutdown(wait=False, cancel_futures=True)

    async def fetch(
        self, version: str, *, pace: Pace = at_once, room: Room = anywhere, is_ahead: Callable[[], bool] = bool
    ) -> Path:
        """Brings the version's image into the cache, whole or not at all, and returns where it lies.

        Cancelled, it ends at once while bytes come; an image that is being built is finished first.

        Args:
            version: The version.
            pace: Told of bytes that came; more are read when it returns.
            room: Told of what files and image will take on their way; all of it is free again when this returns or raises.
            is_ahead: Whether nobody waits for it now; asked from any thread.

        Raises:
            CorruptVersionError: Its bytes were wrong twice; it was reported.
            UnloadableVersionError: It is for another base, or beyond what this node can load.
            WithdrawnVersionError: The control plane does not let it be served (any more).
            DeletedVersionError: There is no such version (any more).
            HostCacheFullError: Images in use leave no room, or nobody waits for it and none is free.
            UnavailableError: Control plane or store cannot be reached.
        """
        async with self._fetches:
            try:
                with await self._read_twice(version, pace, room) as files:
                    await room(self._image_amount(files))
                    async with self._builds:
                        await self._build(version, files, is_ahead)
            except OSError as error:
                _log.error("a version cannot be written down", extra={"version": version, "errno": error.errno})
                if error.errno in _FULL:  # the disk has less room than the budget; the next attempt finds some
                    self._on_evicted(await asyncio.to_thread(self._cache.give_way))
                raise UnavailableError("the node cannot keep the version now", retry_after_s=1.0) from error
        return self._cache.path(version)

    async def read(self, version: str) -> StoredVersion:
        """Reads a version's files from the store, whether or not the node holds its image, and checks them.

        Raises:
            VeneerError: They cannot be had, or are not what was published.
        """
        async with self._fetches:
            files = await self._read_twice(version, at_once, anywhere)
        try:
            artifact = await in_thread(partial(check, files.config, files.weights, self._base, self._artifact_limits))
        except BaseException:
            files.weights.close()
            raise
        return StoredVersion(artifact, files, self._base.num_layers)

    async def _read_twice(self, version: str, pace: Pace, room: Room) -> Files:
        try:
            return await self._transfer.read(version, by_url=True, pace=pace, room=room)
        except CorruptVersionError:
            self._count_corrupt(version, is_last=False)
        try:
            return await self._transfer.read(version, by_url=False, pace=pace, room=room)
        except CorruptVersionError:
            self._count_corrupt(version, is_last=True)
            try:
                await self._source.report_corrupt(version)
            except VeneerError as error:
                _log.warning("a corrupt version could not be reported", extra={"version": version, "status": error.status})
            raise

    def _count_corrupt(self, version: str, *, is_last: bool) -> None:
        self.num_corrupt += 1
        _log.error("bytes of a version are corrupt", extra={"version": version, "again": not is_last})

    async def _build(self, version: str, files: Files, is_ahead: Callable[[], bool]) -> None:
        started_s = time.monotonic()
        evicted: list[str] = []
        try:
            await in_thread(partial(self._lay_out, version, files, is_ahead, evicted), self._builders)
        except (ArtifactError, ImageError) as error:
            _log.error("a version that was published cannot be loaded", extra={"version": version, "cause": error.message})
            why = f": {error.message}" if isinstance(error, LossyAdapterError) else ""
            raise UnloadableVersionError(f"the version cannot be loaded by this node{why}") from error
        finally:
            self._on_evicted(tuple(evicted))
        self._observe("build", time.monotonic() - started_s)

    def _lay_out(self, version: str, files: Files, is_ahead: Callable[[], bool], evicted: list[str]) -> None:
        """Checks files and writes the image, all in one go; what makes room is added to a list."""
        artifact = check(files.config, files.weights, self._base, self._artifact_limits, compares_copies=False)
        try:
            evicted += self._cache.reserve(version, size_bytes=self._size_bytes(artifact), ahead=is_ahead())
            image = build_image(
                image_pairs(artifact, files.weights, base=self._base, base_weights=self._base_weights, dtype=self.dtype),
                version=version,
                base_digest=self._base.digest,
                dtype=self.dtype,
                num_layers=self._base.num_layers,
                num_slices=len(self._base.modules),
            )
            self._judge(image)
            size_bytes = write_image(self._cache.path(version), image)
            evicted += self._cache.add(version, size_bytes=size_bytes)
        finally:
            self._cache.cancel(version)

    def _image_amount(self, files: Files) -> Amount:
        """Returns what the image takes at most while it is made: matrices of two bytes may become four."""
        return Amount(image=files.weights.seek(0, os.SEEK_END) * (2 if ITEM_BYTES[self.dtype] > 2 else 1))

    def _judge(self, image: Image) -> None:
        """Tells what an image loses in fp8, and refuses it beyond the limit."""
        if (loss := image.loss) is not None:
            where = self._base.module_at(loss.layer, loss.slice).path.format(layer=loss.layer)
            _log.info("a version is kept in fp8", extra={"version": image.version, "loss": round(loss.error, 4), "at": where})
        check_loss(image, most=self._max_loss)

    def _size_bytes(self, artifact: Artifact) -> int:
        """Returns an upper bound of the image file's size."""
        item, factor = ITEM_BYTES[self.dtype], 4 if self.dtype == "fp8" else 0
        modules = [self._base.module_at(pair.layer, pair.slice) for pair in artifact.pairs]
        matrices = sum(
            pair.rank * ((module.in_features + module.out_features) * item + factor)
            for pair, module in zip(artifact.pairs, modules, strict=True)
        )
        # Gain and shift, a line of the header, and the padding of each.
        has_vectors = (bool(pair.magnitude or pair.lora_bias) for pair in artifact.pairs)
        widths = [module.out_features for module, has in zip(modules, has_vectors, strict=True) if has]
        widths += [self._base.modules[bias.slice].out_features for bias in artifact.biases]
        return matrices + 8 * sum(widths) + (5 * ALIGN_BYTES + 256) * (len(artifact.pairs) + len(artifact.biases)) + 8192
