"""Opens and checks adapter images on a few threads, so that a file which the disk is slow to give holds no other up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataplane.lora.host_image import HostImage
from dataplane.lora.image import Image
from veneer.errors import VeneerError

_NUM_THREADS = 3
"""As many files may hang before one that does not has to wait."""
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image to open.

    Attributes:
        version: Digest that it must carry.
        path: The file.
        number: Which of the files that were told of for the version.
    """

    version: str
    path: Path
    number: int


class ImageOpener:
    """Threads that open images. Any thread may call any method; what is given here is called on the opener's threads.

    Images that requests wait for are opened first, in their order, on all threads; of the others one at a time. Threads wait for
    the disk at the same time and compute in turns, so that steps lose one core to them at most, and never wait for Python's lock
    behind more than one.

    Args:
        dtype: Type that images must carry.
        check: Checks what else an image must be.
        wanted: Returns the versions that requests wait for, the first first.
        on_opened: Told of each image, and the seconds that it took.
        on_failed: Told of each that cannot be opened, and why.
        on_fault: Told of a mistake of ours, which ends a thread.
    """

    def __init__(
        self,
        *,
        dtype: str,
        check: Callable[[Image], None],
        wanted: Callable[[], Sequence[str]],
        on_opened: Callable[[ImageFile, HostImage, float], None],
        on_failed: Callable[[ImageFile, OSError | VeneerError], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._dtype = dtype
        self._check = check
        self._wanted = wanted
        self._on_opened, self._on_failed, self._on_fault = on_opened, on_failed, on_fault
        self._changed = threading.Condition()
        self._computing = threading.Lock()
        self._files: dict[str, ImageFile] = {}
        self._later: dict[str, ImageFile] = {}
        self._later_s = 0.0
        self._is_ahead = False
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"image-opener-{place}", daemon=True) for place in range(_NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, file: ImageFile) -> None:
        """Has an image opened; it takes the place of another one of its version that was not begun."""
        with self._changed:
            self._files[file.version] = file
            self._changed.notify()

    def put_off(self, file: ImageFile, *, pause_s: float) -> bool:
        """Has an image opened after a while, with all others that were put off; returns whether it is the only one."""
        with self._changed:
            self._later[file.version] = file
            self._later_s = time.monotonic() + pause_s
            self._changed.notify_all()
            return len(self._later) == 1

    def poke(self) -> None:
        """Lets idle threads look again: requests may wait for others than before."""
        if self._files:
            with self._changed:
                self._changed.notify_all()

    def stop(self) -> None:
        """Ends the threads; one whose file hangs ends with the process."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        end_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, end_s - time.monotonic()))

    def _run(self) -> None:
        try:
            while (chosen := self._next()) is not None:
                file, is_ahead = chosen
                try:
                    self._open(file)
                finally:
                    if is_ahead:
                        with self._changed:
                            self._is_ahead = False
                            self._changed.notify()
        except Exception as error:  # noqa: BLE001  the step loop raises it
            self._on_fault(error)

    def _next(self) -> tuple[ImageFile, bool] | None:
        """Waits for an image to open; returns it, and whether nobody waits for it; None when it is time to stop."""
        with self._changed:
            while not self._stopping:
                if self._later and time.monotonic() >= self._later_s:
                    self._files.update({**self._later, **self._files})
                    self._later.clear()
                version = next(filter(self._files.__contains__, self._wanted()), None) if self._files else None
                if version is not None:
                    return self._files.pop(version), False
                if self._files and not self._is_ahead:
                    self._is_ahead = True
                    return self._files.pop(next(iter(self._files))), True
                self._changed.wait(max(0.0, self._later_s - time.monotonic()) if self._later else None)
        return None

    def _open(self, file: ImageFile) -> None:
        started_s = time.monotonic()
        try:
            opened = HostImage(file.path, version=file.version, dtype=self._dtype, check=self._check, computing=self._computing)
        except (OSError, VeneerError) as error:
            self._on_failed(file, error)
        else:
            self._on_opened(file, opened, time.monotonic() - started_s)
