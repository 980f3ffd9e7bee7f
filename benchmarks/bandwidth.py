"""How fast this machine reads memory, with as many threads as the engine has."""

from __future__ import annotations

import mmap
import time

import torch


class Memory:
    """Huge pages of numbers, more than any cache holds.

    Args:
        size_bytes: Their size.
    """

    def __init__(self, size_bytes: int = 1 << 29) -> None:
        self._pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._numbers = torch.frombuffer(self._pages, dtype=torch.int32)
        torch.arange(len(self._numbers), out=self._numbers)  # pages that nobody wrote are all the same one

    def bytes_per_s(self, *, repeats: int = 30) -> float:
        """Returns the best speed of many passes, each of which finds the largest number: a slow one would flatter adapters."""
        taken = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._numbers.amax()
            taken.append(time.perf_counter() - start)
        return self._numbers.nbytes / min(taken)
