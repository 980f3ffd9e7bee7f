"""The C library's heap in a process that must not grow."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_NUM_ARENAS = 2
_LARGE_BYTES = 256 << 10
_TRIM_S = 30.0


def bound_heap() -> None:
    """Keeps free memory from being scattered over many arenas; called before the process has threads.

    glibc gives threads arenas of their own, up to eight a core, and keeps buffers of the size that was freed last. Both planes
    have some twenty threads for files, children and gRPC, and after 400 uploads 24 of the control plane's 55 MB were free and
    not given back. Two arenas are enough for processes that compute in Python, and large buffers go back at once. Nothing
    happens where the C library is another one.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


async def keep_trimmed(*, interval_s: float = _TRIM_S) -> None:
    """Collects cycles and gives free memory back from time to time, until cancelled; whoever runs it owns the process.

    What lives after the first interval is exempt from then on. It is some 150,000 objects, and Python looks at all only once a
    quarter as many have come: two megabytes of cycles, which every call leaves, and the pages about them stayed meanwhile. A look
    at what came since takes milliseconds. What lies free between what is held stays with the process otherwise, too: the control
    plane grew by half a megabyte in a hundred publishes, of which a single trim gave all back. A trim of such a heap takes a few
    milliseconds, on another thread.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    await asyncio.sleep(interval_s)
    gc.collect()
    gc.freeze()
    while True:
        if trim is not None:
            await asyncio.to_thread(trim, 0)
        await asyncio.sleep(interval_s)
        gc.collect()
