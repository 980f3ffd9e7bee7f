"""Pieces of large mappings."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from kernels.huge_pages import HugePages


def test_pieces_are_equal_to_their_sources_lie_side_by_side_and_outlive_their_owner() -> None:
    pages = HugePages(chunk_bytes=1 << 16)
    sources = [torch.randn(3, 5), torch.randn(7, 33).bfloat16().t(), torch.randn(1 << 15), torch.randn(2)]
    pieces = [pages.copy(source) for source in sources]
    del pages
    gc.collect()
    for source, piece in zip(sources, pieces, strict=True):
        assert torch.equal(piece, source)
        assert piece.is_contiguous()
        assert piece.dtype is source.dtype
        assert piece.data_ptr() % 64 == 0
    assert pieces[1].data_ptr() == pieces[0].data_ptr() + 64


def test_a_kernel_without_huge_pages_gives_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    source = torch.randn(3, 5)
    assert torch.equal(HugePages(chunk_bytes=1 << 16).copy(source), source)
