"""Runs jailed checks under uvloop while others in the process open and close files; prints what they saw, as JSON.

A process of its own: an event loop that loses a descriptor ends the process. The others are a thread, and a process that shares
the table of descriptors as a thread does, with a lock of the interpreter of its own: it is running at any moment at which another
one may close a number twice.

    python -m tests.controlplane.checks_beside_others BASE_JSON ADAPTER_FOLDER NUM_CHECKS
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import uvloop

from controlplane import intake
from controlplane.intake import JailedChecks
from veneer.artifact import ArtifactError, BaseDescription, Limits

_NUM_REAL = 20
# A child that answers at once: as many checks as there is time for.
_ANSWER = r"""import os; os.write(1, b'{"jail": null}\n{"failed": "quick"}\n'); os._exit(0)"""
_QUICK = f"import sys; sys.path += sys.argv[1:3]; from controlplane.fork_server import serve; serve(lambda _: exec({_ANSWER!r}))"
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_FILES = 0x400


def _open_and_close(until: Callable[[], bool]) -> tuple[int, int]:
    """Opens and closes a device; returns how often, and how often its number was not the device's any more."""
    device = Path(os.devnull).stat().st_rdev
    num_opened = num_faults = 0
    while not until():
        descriptor = os.open(os.devnull, os.O_RDONLY)
        num_opened += 1
        try:
            num_faults += os.fstat(descriptor).st_rdev != device
            os.close(descriptor)
        except OSError:
            num_faults += 1
    return num_opened, num_faults


class _Process:
    """A process with this one's table of descriptors. It must be made while this one has one thread."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        number = _CLONE[os.uname().machine]
        ours = os.getpid()
        self._pid = ctypes.CDLL(None).syscall(number, _CLONE_FILES | signal.SIGCHLD, 0, 0, 0, 0)
        if self._pid == 0:
            struct.pack_into("qq", self._memory, 8, *_open_and_close(lambda: self._memory[0] == 1 or os.getppid() != ours))
            os._exit(0)

    def stop(self) -> tuple[int, int]:
        self._memory[0] = 1
        os.waitpid(self._pid, 0)
        num_opened, num_faults = struct.unpack_from("qq", self._memory, 8)
        return num_opened, num_faults


class _Thread:
    """A thread of this process."""

    def __init__(self) -> None:
        self._seen = (0, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> tuple[int, int]:
        self._stop.set()
        self._thread.join()
        return self._seen

    def _run(self) -> None:
        self._seen = _open_and_close(self._stop.is_set)


async def _check(base: BaseDescription, folder: Path, times: int) -> None:
    async with JailedChecks() as jail:
        for _ in range(times):
            try:
                await jail(folder / "adapter_config.json", folder / "adapter_model.safetensors", base, Limits(), timeout_s=60)
            except ArtifactError as error:
                if "check fail: quick" not in error.message:
                    raise


def main() -> None:
    """Entry point."""
    base, folder = BaseDescription.from_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    others = _Process(), _Thread()
    try:
        uvloop.run(_check(base, folder, _NUM_REAL))
        intake._BOOT = _QUICK
        uvloop.run(_check(base, folder, int(sys.argv[3])))
    finally:
        seen = [other.stop() for other in others]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
