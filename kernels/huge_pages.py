"""Memory in huge pages, for what is read whole at every step."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_CHUNK_BYTES = 1 << 28
_ALIGNMENT = 64


class HugePages:
    """Hands out memory from large mappings that ask for huge pages, one piece behind the other.

    A processor fetches ahead within a page only. A matrix of a small model spans few huge pages, or none where it is a mapping of
    its own, and its first read after each page boundary waits for memory. Pieces share the pages of one mapping instead. What
    nobody wrote takes no memory; a mapping lives as long as one of its pieces. Where there are no huge pages it is plain memory.

    Args:
        chunk_bytes: Size of a mapping; a larger piece gets one of its own.
    """

    def __init__(self, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy of a tensor in this memory, aligned to a cache line."""
        num_bytes = source.numel() * source.element_size()
        if num_bytes > len(self._chunk):
            size = -(-max(num_bytes, self._chunk_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(AttributeError, OSError):  # the system, or its kernel, has none
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._chunk = torch.frombuffer(pages, dtype=torch.uint8)
        piece = self._chunk[:num_bytes].view(source.dtype).view(source.shape)
        self._chunk = self._chunk[math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT :]
        return piece.copy_(source)
