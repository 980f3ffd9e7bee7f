"""What `benchmarks.gpu_check` asks of attention over pages; `right` runs in Triton's interpreter too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_check import Figure
from benchmarks.gpu_timing import captured, median_ms, read_bandwidth
from benchmarks.gpu_world import DTYPE
from kernels.attention_reference import attend, read_tokens
from kernels.gpu.attention import Heads, PagedAttention
from kernels.gpu.attention_items import AttentionRows, ChunkRows
from kernels.gpu.device import probe
from kernels.gpu.library_attention import NoLibraryError, find_library

CONTEXTS = (256, 1024)
_DEVICE = "cuda"
_ROUNDOFF = 2.0**-8
_PAGE_SIZE = 16
LLAMA_7B_HEADS = Heads(num_heads=32, num_kv_heads=32, head_dim=128, scale=128**-0.5)
LLAMA_8B_HEADS = Heads(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
GEMMA_HEADS = Heads(num_heads=8, num_kv_heads=4, head_dim=256, scale=256**-0.5, softcap=50.0)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one sequence of a step: one row decodes, several are a chunk.

    Attributes:
        context: Tokens before them.
        count: Rows.
    """

    context: int
    count: int = 1


class World:
    """A cache of random pages and a step over it.

    Attributes:
        step: The step.
        qk: [T, heads + kv_heads, head_dim].
        v: [T, kv_heads, head_dim].
        attention: The form, its step begun.
    """

    def __init__(self, heads: Heads, parts: list[Part], *, device: str, num_layers: int = 1, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        torch.manual_seed(seed)
        counts = [-(-(part.context + part.count) // _PAGE_SIZE) for part in parts]
        free = generator.permutation(sum(counts)) + 1
        self.heads, self.parts = heads, parts
        self.tables = np.split(free, np.cumsum(counts)[:-1])
        shape = (sum(counts) + 1, num_layers, 2, _PAGE_SIZE, heads.num_kv_heads, heads.head_dim)
        self.cache = torch.empty(shape, dtype=DTYPE, device=device).normal_()
        num_rows = sum(part.count for part in parts)
        fused = torch.empty(num_rows, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, dtype=DTYPE, device=device)
        fused.normal_()
        self.qk, self.v = fused[:, : -heads.num_kv_heads], fused[:, -heads.num_kv_heads :]
        self.attention = PagedAttention(
            self.cache,
            heads,
            gpu=probe(device),
            max_rows=num_rows,
            max_sequences=len(parts),
            max_context=max(part.context + part.count for part in parts),
        )
        self.step = self._step()
        self.attention.begin_step(self.step)

    def run(self, *, layer: int = 0, window: int | None = None) -> Tensor:
        """Returns [T, heads, head_dim]."""
        out = self.attention(self.qk, self.v, layer=layer, window=window)
        return out.view(-1, self.heads.num_heads, self.heads.head_dim)

    def error_over_bound(self, out: Tensor, rows: list[int], *, window: int | None, roundoff: float) -> float:
        """Returns the largest error of some rows beside float64, over what roundings may make."""
        owners = [(i, part.context + row + 1) for i, part in enumerate(self.parts) for row in range(part.count)]
        worst = 0.0
        for row in rows:
            sequence, end = owners[row]
            table = torch.from_numpy(self.tables[sequence])
            span = {"layer": 0, "first": 0 if window is None else max(0, end - window), "end": end}
            keys, values = (read_tokens(self.cache, table, kind=kind, **span) for kind in (0, 1))
            q = self.qk[row, : self.heads.num_heads]
            want = attend(q, keys, values, scale=self.heads.scale, softcap=self.heads.softcap)
            worst = max(worst, want.error_over_bound(out[row], roundoff=roundoff))
        return worst

    def _step(self) -> AttentionRows:
        num_decode = sum(part.count == 1 for part in self.parts)
        kv_rows, chunks, first = [], [], 0
        pages = np.zeros((num_decode, max((table.size for table in self.tables[:num_decode]), default=0)), dtype=np.int64)
        rows_per_page = self.cache.shape[1] * 2 * _PAGE_SIZE
        for index, (part, table) in enumerate(zip(self.parts, self.tables, strict=True)):
            tokens = np.arange(part.context, part.context + part.count)
            kv_rows.append(table[tokens // _PAGE_SIZE] * rows_per_page + tokens % _PAGE_SIZE)
            if index < num_decode:
                pages[index, : table.size] = table
            else:
                chunks.append(ChunkRows(first, part.count, part.context, table))
            first += part.count
        lengths = np.array([part.context + 1 for part in self.parts[:num_decode]], dtype=np.int64)
        return AttentionRows(np.concatenate(kv_rows), lengths, pages, chunks)


def attention() -> Iterator[Figure]:
    """Whether attention is right, and what it takes beside the bytes and beside the library."""
    yield from right()
    yield from decode_times()
    yield from prefill_times()


def right(
    *,
    forms: tuple[Heads, ...] = (LLAMA_7B_HEADS, LLAMA_8B_HEADS, GEMMA_HEADS),
    device: str = _DEVICE,
    contexts: tuple[int, ...] = (1, 255, 256, 1023, 3000),
    chunk: int = 70,
    repeats: int = 1000,
) -> Iterator[Figure]:
    """Rows of one split and of many, and a chunk over a context, beside float64; the same bits every time."""
    roundoff = _ROUNDOFF if device == _DEVICE else 2 * _ROUNDOFF  # the interpreter cuts off instead of rounding
    worst, different = 0.0, 0
    for heads, window in itertools.product(forms, (None, contexts[-1] // 2)):
        world = World(heads, [*map(Part, contexts), Part(contexts[1], chunk)], device=device)
        out = world.run(window=window)
        rows = [*range(len(contexts)), len(contexts), len(contexts) + chunk - 1]
        worst = max(worst, world.error_over_bound(out, rows, window=window, roundoff=roundoff))
        changed = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(repeats if window is None else 1):
            changed += (world.run(window=window) != out).any()
        different += int(changed)
    yield Figure("error_over_bound", worst, "ratio", 1.0)
    yield Figure(f"different_of_{repeats}_repeats", different)
    assert worst <= 1, f"an error is {worst:.2f} times its bound"
    assert different == 0, "the same step gave other bits"
    dependent = _changed_by_neighbours(forms[0], contexts, device=device)
    yield Figure("rows_changed_by_neighbours", dependent)
    assert dependent == 0, "a row's bits depend on its neighbours"


def _changed_by_neighbours(heads: Heads, contexts: tuple[int, ...], *, device: str) -> int:
    """Returns the rows that get other bits alone than beside all others."""
    world = World(heads, [Part(context) for context in contexts], device=device)
    together, step = world.run(), world.step
    changed = 0
    for row in range(len(contexts)):
        world.attention.begin_step(
            AttentionRows(step.kv_rows[row : row + 1], step.lengths[row : row + 1], step.pages[row : row + 1], ())
        )
        alone = world.attention(world.qk[row : row + 1], world.v[row : row + 1], layer=0, window=None)
        changed += int(not torch.equal(alone.flatten(), together[row].flatten()))
    return changed


def decode_times(*, num_rows: int = 64, num_layers: int = 4) -> Iterator[Figure]:
    """A layer's attention, append included, in a captured graph, over the bytes of keys and values."""
    bandwidth = read_bandwidth()
    for (name, heads), context in itertools.product((("7b", LLAMA_7B_HEADS), ("8b", LLAMA_8B_HEADS)), CONTEXTS):
        world = World(heads, [Part(context)] * num_rows, device=_DEVICE, num_layers=num_layers)
        taken = _layers_ms(world, num_layers) / num_layers
        size = 2 * num_rows * (context + 1) * heads.num_kv_heads * heads.head_dim * DTYPE.itemsize
        yield Figure(f"decode_{name}_context_{context}_us", taken * 1e3, "us", size / bandwidth * 1e6)
        yield Figure(f"decode_{name}_context_{context}_of_bandwidth", size / (taken / 1e3) / bandwidth, "ratio")


def prefill_times(*, num_rows: int = 2048) -> Iterator[Figure]:
    """A layer's attention over one chunk, without and with a context, over PyTorch's without, and a library in our place."""
    heads = LLAMA_7B_HEADS
    q, k, v = torch.empty(3, 1, heads.num_heads, num_rows, heads.head_dim, dtype=DTYPE, device=_DEVICE).normal_()
    plain = median_ms(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    yield Figure(f"prefill_{num_rows}_torch_us", plain * 1e3, "us")
    for context in (0, num_rows):
        taken = _layers_ms(World(heads, [Part(context, num_rows)], device=_DEVICE), 1)
        yield Figure(f"prefill_{num_rows}_after_{context}_us", taken * 1e3, "us")
        yield Figure(f"prefill_{num_rows}_after_{context}_of_torch", taken / plain, "ratio")
    try:
        library = find_library(dtype=DTYPE, scale=heads.scale, group=heads.num_heads // heads.num_kv_heads, softcap=None)
    except NoLibraryError as error:
        yield Figure("prefill_library", f"none: {error}")
        return
    yield Figure("prefill_library", library.name)
    world = World(heads, [Part(0, num_rows)], device=_DEVICE)
    world.attention.use(library)
    world.attention.begin_step(world.step)
    yield Figure(f"prefill_{num_rows}_library_of_torch", _layers_ms(world, 1) / plain, "ratio")


def _layers_ms(world: World, num_layers: int) -> float:
    def run() -> None:
        for layer in range(num_layers):
            world.run(layer=layer)

    return median_ms(captured(run).replay)
