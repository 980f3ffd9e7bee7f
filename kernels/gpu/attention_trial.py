"""The trial at start that lets a library attend to chunks: what it gives, and in what time."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from kernels.gpu.attention import Heads, PagedAttention
from kernels.gpu.attention_items import AttentionRows, ChunkRows
from kernels.gpu.device import Gpu
from kernels.gpu.library_attention import Library, NoLibraryError, find_library
from kernels.gpu.trial import Clock

_PAGE_SIZE = 16
_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_ROUNDINGS = 8  # of weights and sums, in either of both
_log = logging.getLogger(__name__)

Find = Callable[..., Library]


def choose_library(
    heads: Heads,
    *,
    gpu: Gpu,
    dtype: torch.dtype,
    device: torch.device,
    clock: Clock,
    num_rows: int = 2048,
    find: Find = find_library,
) -> Library | None:
    """Returns the library that attends to chunks without a context, or None where our kernels do; the choice is logged.

    A library is taken where it can be called, gives within the roundings of the dtype what the kernels give, and is faster, for
    two prompts of together `num_rows` rows.
    """
    try:
        library = find(dtype=dtype, scale=heads.scale, group=heads.num_heads // heads.num_kv_heads, softcap=heads.softcap)
        ours_us, library_us = _compared(library, heads, gpu=gpu, dtype=dtype, device=device, clock=clock, num_rows=num_rows)
    except NoLibraryError as error:
        _log.info("our kernels attend to chunks", extra={"reason": str(error)})
        return None
    facts = {"library": library.name, "library_us": round(library_us), "ours_us": round(ours_us)}
    if library_us >= ours_us:
        _log.info("our kernels attend to chunks", extra=facts)
        return None
    _log.info("a library attends to chunks without context", extra=facts)
    return library


def _compared(
    library: Library, heads: Heads, *, gpu: Gpu, dtype: torch.dtype, device: torch.device, clock: Clock, num_rows: int
) -> tuple[float, float]:
    """Returns the microseconds of our kernels and of the library.

    Raises:
        NoLibraryError: It cannot be called, or gives something else.
    """
    num_pages = -(-num_rows // _PAGE_SIZE) + 1
    generator = torch.Generator(device).manual_seed(0)
    shape = (num_rows, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
    fused = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    qk, v = fused[:, : -heads.num_kv_heads], fused[:, -heads.num_kv_heads :]
    cache = torch.zeros(num_pages + 1, 1, 2, _PAGE_SIZE, heads.num_kv_heads, heads.head_dim, dtype=dtype, device=device)
    attention = PagedAttention(cache, heads, gpu=gpu, max_rows=num_rows, max_sequences=2, max_context=num_rows)
    step = _two_prompts(num_rows)

    def run() -> None:
        attention(qk, v, layer=0, window=None)

    attention.begin_step(step)
    ours, ours_us = attention(qk, v, layer=0, window=None).float(), clock(run)
    attention.use(library)
    attention.begin_step(step)
    try:
        theirs, library_us = attention(qk, v, layer=0, window=None).float(), clock(run)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise NoLibraryError(f"{library.name} cannot be called: {error}") from error
    far = float((theirs - ours).abs().max()) / (_ROUNDINGS * _ROUNDOFF[dtype] * float(v.abs().max()))
    if not far <= 1:
        raise NoLibraryError(f"{library.name} gives something else, {far:.1f} times what roundings make")
    return ours_us, library_us


def _two_prompts(num_rows: int) -> AttentionRows:
    counts = [num_rows - num_rows // 4, num_rows // 4]
    num_pages = [-(-count // _PAGE_SIZE) for count in counts]
    pages = np.split(np.arange(1, sum(num_pages) + 1), [num_pages[0]])
    kv_rows = np.concatenate(
        [
            own[np.arange(n) // _PAGE_SIZE] * 2 * _PAGE_SIZE + np.arange(n) % _PAGE_SIZE
            for own, n in zip(pages, counts, strict=True)
        ]
    )
    chunks = [ChunkRows(first, count, 0, own) for first, count, own in zip((0, counts[0]), counts, pages, strict=True)]
    return AttentionRows(kv_rows, np.empty(0, np.int64), np.empty((0, 0), np.int64), chunks)
