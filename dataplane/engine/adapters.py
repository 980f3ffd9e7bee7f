"""Moves adapter images from host memory to the arena beside the step loop, which never waits for it."""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dataplane.engine.config import EngineConfig
from dataplane.engine.image_opener import ImageFile, ImageOpener
from dataplane.engine.messages import Fail, Moved, Wanted
from dataplane.lora.arena import Arena
from dataplane.lora.eviction import Recency
from dataplane.lora.holdings import Budget, Evicted, Lease, LoadPlan
from dataplane.lora.host_image import HostImage
from dataplane.lora.image import CorruptImageError, Image, check_loss
from dataplane.lora.residency import Residency
from kernels.descriptors import Blocks
from veneer.errors import InvalidArgumentError, VeneerError, Violation

_log = logging.getLogger(__name__)
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""What the machine lacks for a while; the file is none the worse for it."""
_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class _Copied:
    plan: LoadPlan
    blocks: Blocks
    rank: int
    num_bytes: int
    seconds: float


Note = Moved | Wanted | Fail
"""What the step loop has to hear: events for the serving process, and versions whose waiting requests must end."""


class DeviceAdapters:
    """Residency, arena, the threads that open images and the one that copies them from host memory to the arena.

    The step loop calls everything that is public. Images are opened and checked once (`ImageOpener`). The copying thread copies
    their bytes into units that no step reads; the step loop itself makes a copied image visible (`settle`), in a slot that no
    step reads either. An image that cannot be opened for want of memory or descriptors is tried again after a while.

    Args:
        config: Settings.
        arena: Where images go.
        wake: Called, from the other threads, when `settle` has something to do.
    """

    def __init__(self, config: EngineConfig, arena: Arena, *, wake: threading.Event) -> None:
        self._config = config
        self._arena = arena
        self._wake = wake
        self.residency = Residency(
            config.max_slots,
            num_units=arena.num_units,
            unit_bytes=config.arena_unit_bytes,
            quantum_tokens=config.quantum_tokens,
            policy=Recency() if config.eviction == "lru" else None,
        )
        self._images: dict[str, HostImage] = {}
        self._mapped: set[str] = set()
        self._asked: set[str] = set()
        self._wanted: frozenset[str] = frozenset()
        self._staged: dict[str, int] = {}
        self._num_staged = 0
        self._lock = threading.Lock()
        self._fault: Exception | None = None
        self._done: queue.SimpleQueue[_Copied | Note] = queue.SimpleQueue()
        self._arrived: dict[str, int] = {}
        self._opened: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._look = threading.Event()
        self._blocked = False
        self._stopping = False
        self._opener = ImageOpener(
            dtype=config.arena_dtype,
            check=self._check,
            wanted=self.residency.wanted,
            on_opened=self._take,
            on_failed=self._refuse,
            on_fault=self._break,
        )
        self._thread = threading.Thread(target=self._run, name="adapter-loader", daemon=True)
        self._thread.start()

    def acquire(self, version: str, tenant: str = "", *, weight: int = 1, max_bytes: int = 0) -> Lease | None:
        """See `Residency.acquire`. A miss that is new wakes the step loop once more, for `settle` to act on it."""
        lease = self.residency.acquire(version, tenant, weight=weight, max_bytes=max_bytes)
        if max_bytes:
            for freed in self.residency.take_freed():
                self._clear(freed)
        if lease is None and version not in self._wanted:
            self._wake.set()
        return lease

    def want(self, version: str, tenant: str = "", *, weight: int = 1, max_bytes: int = 0) -> bool:
        """See `Residency.want`."""
        return self.residency.want(version, tenant, weight=weight, max_bytes=max_bytes)

    def budget(self, version: str, tenant: str, *, max_bytes: int) -> Budget | None:
        """See `Residency.budget`."""
        return self.residency.budget(version, tenant, max_bytes=max_bytes)

    def pin(self, version: str, owner: str) -> None:
        """See `Residency.pin`."""
        self.residency.pin(version, owner)
        self._wake.set()

    def unpin(self, version: str) -> None:
        """See `Residency.unpin`. What waits for room is tried again."""
        self.residency.unpin(version)
        if version not in self.residency.wanted():
            self._asked.discard(version)
        if self._wanted:
            self.poke()

    def is_pinned(self, version: str) -> bool:
        """See `Residency.is_pinned`."""
        return self.residency.is_pinned(version)

    def release(self, lease: Lease, *, served: int = 0) -> None:
        """See `Residency.release`. What waits for room is tried again."""
        self._clear(self.residency.release(lease, served=served))
        if self._wanted:
            self.poke()

    def withdraw(self, version: str) -> None:
        """See `Residency.withdraw`. What waits for room is tried again."""
        self.residency.withdraw(version)
        self._asked.discard(version)
        if self._wanted:
            self.poke()

    def reserve(self, version: str) -> None:
        """See `Residency.reserve`."""
        self.residency.reserve(version)

    def evict(self, version: str) -> None:
        """See `Residency.evict`; the copy is one that leases are held of."""
        freed = self.residency.evict(version)
        assert freed is None, "what nobody uses need not be told to go"

    def may_return(self, version: str) -> bool:
        """See `Residency.may_return`."""
        return self.residency.may_return(version)

    def excess_of(self, tenant: str) -> float:
        """See `Residency.excess_of`."""
        return self.residency.excess_of(tenant)

    def yields(self, holder: str, *, version: str, loader: str) -> bool:
        """See `Residency.yields`."""
        return self.residency.yields(holder, version=version, loader=loader)

    def arrived(self) -> dict[str, int]:
        """Returns the versions that may have come to the device since the last call, with the bytes that were copied."""
        arrived, self._arrived = self._arrived, {}
        while not self._opened.empty():
            arrived.setdefault(self._opened.get(), 0)
        return arrived

    def is_starved(self, version: str) -> bool:
        """Whether the version's image is in host memory and the last attempt to load found no room."""
        return self._blocked and version in self._images

    def stage(self, version: str, path: str) -> None:
        """Hears that a version's image lies at a path; it is opened beside the step loop."""
        self._asked.add(version)
        self._num_staged += 1
        self._staged[version] = self._num_staged
        self._opener.put(ImageFile(version, Path(path), self._num_staged))

    def unstage(self, version: str, *, drop_device: bool) -> int:
        """Hears that a version's image is gone from host memory; returns the bytes that were mapped of it."""
        with self._lock:
            self._staged.pop(version, None)
            opened = self._images.pop(version, None)
            freed = self.residency.unstage(version, drop_device=drop_device)
        self._clear(freed)
        self._asked.discard(version)
        self._mapped.discard(version)
        return 0 if opened is None else opened.num_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of all images that are mapped."""
        with self._lock:
            return sum(opened.num_bytes for opened in self._images.values())

    def is_in_host(self, version: str) -> bool:
        """Whether an image of the version is known in host memory."""
        return version in self._images

    def place_of(self, version: str) -> Literal["host", "disk", "store"]:
        """Returns where the image of a version is, whatever the device has: mapped, as `settle` told, or a file, or not here."""
        if version in self._mapped and version in self._images:
            return "host"
        return "disk" if version in self._staged else "store"

    def poke(self) -> None:
        """Lets the copying thread look for work: something is wanted, or room came free."""
        self._look.set()

    def settle(self) -> list[Note]:
        """Makes what was copied visible. Returns what happened since the last call.

        Raises:
            Exception: What ended one of the threads; the engine cannot go on without it.
        """
        if self._fault is not None:
            raise self._fault
        notes: list[Note] = []
        while not self._done.empty():
            done = self._done.get()
            if isinstance(done, _Copied):
                self._publish(done, notes)
            elif self._hear(done):
                notes.append(done)
        missing = self.residency.missing()
        for version in missing:
            if version not in self._asked and version not in self._images:
                self._asked.add(version)
                notes.append(Wanted(version))
        wanted = frozenset(self.residency.wanted())
        if wanted != self._wanted:
            self._wanted = wanted
            self._opener.poke()
        if wanted:
            self.poke()
        return notes

    def stop(self) -> None:
        """Ends the threads."""
        self._stopping = True
        self._look.set()
        self._opener.stop()
        self._thread.join(timeout=30)

    def _hear(self, note: Note) -> bool:
        """Notes what the other threads say of an image; returns whether it still holds."""
        if isinstance(note, Moved) and note.place == "opened":
            if note.version not in self._images:  # taken away meanwhile
                return False
            self._mapped.add(note.version)
        elif isinstance(note, Fail) or (isinstance(note, Moved) and note.place == "corrupt"):
            self._images.pop(note.version, None)
            self._mapped.discard(note.version)
            self._asked.discard(note.version)
        return True

    def _publish(self, done: _Copied, notes: list[Note]) -> None:
        plan = done.plan
        for evicted in plan.evicted:
            notes.append(Moved(evicted.version, "host", reason="room"))
            if evicted.slot != plan.slot:
                self._arena.clear(evicted.slot)
        self._arena.publish(plan.slot, done.blocks)
        epoch = self.residency.commit(plan)
        if epoch is None:
            self._arena.clear(plan.slot)
            return
        self._arrived[plan.version] = done.num_bytes
        notes.append(Moved(plan.version, "device", done.seconds, rank=done.rank, size_bytes=done.num_bytes, epoch=epoch))

    def _clear(self, freed: Evicted | None) -> None:
        """Makes a slot that came free nobody's, and says so unless the version was taken away; then `Unloaded` says it."""
        if freed is None:
            return
        self._arena.clear(freed.slot)
        if freed.reason != "unload":
            self._done.put(Moved(freed.version, "host", reason=freed.reason))

    def _run(self) -> None:
        """The copying thread."""
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - `settle` raises it in the step loop
            self._break(error)

    def _break(self, error: Exception) -> None:
        self._fault = error
        self._wake.set()

    def _serve(self) -> None:
        while True:
            self._look.wait()
            self._look.clear()
            while not self._stopping and (plan := self.residency.next_load()) is not None:
                self._blocked = False
                self._copy(plan)
            if self._stopping:
                return
            self._blocked = any(version in self._images for version in self.residency.wanted())

    def _take(self, file: ImageFile, opened: HostImage, seconds: float) -> None:
        """An image was opened; it is of use unless it was taken away, or another one was told of, meanwhile."""
        try:
            image = opened.image()
            with self._lock:
                if self._staged.get(file.version) == file.number:
                    self._keep(file.version, opened, image, seconds)
        except (OSError, VeneerError) as error:
            self._refuse(file, error)
            return
        self._opened.put(file.version)
        self._look.set()
        self._wake.set()

    def _keep(self, version: str, opened: HostImage, image: Image, seconds: float) -> None:
        """Has an image loaded from now on. That it was opened is said before, since a copy may be made at once."""
        self._images[version] = opened
        size_bytes = sum(image.block_bytes)
        self._done.put(Moved(version, "opened", seconds, rank=image.rank, size_bytes=size_bytes))
        try:
            self.residency.stage(version, rank=image.rank, blocks=image.block_bytes, loss=image.loss)
        except VeneerError:
            del self._images[version]  # what was said does not hold then, see `_hear`
            raise

    def _refuse(self, file: ImageFile, error: OSError | VeneerError) -> None:
        """An image cannot be opened: it is corrupt, beyond a limit, or the machine lacks something now."""
        if isinstance(error, OSError) and error.errno in _SCARCE:
            is_of_use = self._staged.get(file.version) == file.number
            if is_of_use and self._opener.put_off(file, pause_s=_AGAIN_S):
                _log.warning("images cannot be opened now", extra={"version": file.version, "errno": error.errno})
        elif isinstance(error, OSError | CorruptImageError):
            self._report(Moved(file.version, "corrupt"))
        else:
            self._report(Fail(file.version, error.status, error.message))

    def _check(self, image: Image) -> None:
        self._arena.check(image)
        if image.rank > self._config.max_rank:
            raise InvalidArgumentError.of([Violation("rank", f"must be at most {self._config.max_rank}, is {image.rank}")])
        check_loss(image, most=self._config.max_adapter_loss)

    def _copy(self, plan: LoadPlan) -> None:
        started = time.monotonic()
        opened, number = self._images.get(plan.version), self._staged.get(plan.version, 0)
        if opened is None:  # taken away meanwhile
            self._give_up(plan, opened)
            return
        file = ImageFile(plan.version, opened.path, number)
        if opened.has_changed:  # it is opened again beside other loads
            self._give_up(plan, opened)
            self._opener.put(file)
            return
        try:
            image = opened.image()
            self._arena.copy(image, plan.extents)
            blocks = self._arena.locate(image, plan.extents)
        except (OSError, VeneerError) as error:
            self._give_up(plan, opened)
            self._refuse(file, error)
            return
        self._done.put(_Copied(plan, blocks, opened.rank, image.num_bytes, time.monotonic() - started))
        self._wake.set()

    def _give_up(self, plan: LoadPlan, opened: HostImage | None) -> None:
        """Ends a load that cannot be made; an image that was opened meanwhile may be loaded."""
        with self._lock:
            if opened is not None and self._images.get(plan.version) is opened:
                del self._images[plan.version]
            self.residency.fail(plan, retry=plan.version in self._images)
        for evicted in plan.evicted:
            self._report(Moved(evicted.version, "host", reason="room"))

    def _report(self, note: Note) -> None:
        self._done.put(note)
        self._wake.set()
