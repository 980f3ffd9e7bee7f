"""Every GPU kernel with every configuration that service may launch, for `kernels.aot`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernels.gpu import pieces
from kernels.gpu.attention import APPEND_BLOCK
from kernels.gpu.attention_tiles import MAX_SPLITS, attention_tiles_for
from kernels.gpu.decode_attention import decode_attention
from kernels.gpu.epilogue import epilogue
from kernels.gpu.expand import expand
from kernels.gpu.extension import extension
from kernels.gpu.kv_append import kv_append
from kernels.gpu.launches import EPILOGUE_COLUMNS
from kernels.gpu.prefill_attention import prefill_attention
from kernels.gpu.shrink import shrink
from kernels.gpu.tiles import TILES, Launch, Tiles
from kernels.rows import ALIGN

_ELEMENT_BYTES = 2
_HEAD_DIMS = (64, 96, 128, 256)


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel with one configuration.

    Attributes:
        name: For the table.
        kernel: The kernel, as `triton.jit` made it.
        constants: Values of its constexpr arguments, but those that follow from the target.
        launch: Warps and stages.
        operand_bytes: Bytes that one round of the main loop loads of its two operands; 0 for a kernel without products.
        index_loads: Loads of 8 bytes that the pipeline may make of addresses, where the main loop looks rows up: for adapters one
            for each 16 rows and stage, for pages one for each load of 16 bytes and stage.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    launch: Launch
    operand_bytes: int
    index_loads: int

    @property
    def is_fp8(self) -> bool:
        """Whether the arena holds bytes, of which a thread may take 8 at once: a row of 64 is then read in whole sectors too."""
        return bool(self.constants.get("FP8"))

    @property
    def least_bytes(self) -> int:
        """Bytes a thread that the two operands need in wide loads: once in the loop, once before it."""
        return 2 * self.operand_bytes // (32 * self.launch.num_warps)


def builds() -> Iterator[Build]:
    """Yields every kernel with every configuration that its tables make; equal ones once."""
    made = {build.name: build for tiles in TILES for is_fp8 in (False, True) for build in _builds(tiles, is_fp8=is_fp8)}
    yield from made.values()
    yield Build("epilogue", epilogue, {"BLOCK_N": EPILOGUE_COLUMNS}, Launch(4, 1), 0, 0)
    yield from _pieces()
    for head_dim in _HEAD_DIMS:
        yield from _attention(head_dim, page_size=16)
    yield from _attention(128, page_size=32, softcap=50.0)
    constants = {"WIDTH": 1024, "FIRST": 4096, "PAGE_SIZE": 16, "BLOCK": APPEND_BLOCK}
    yield Build("append 1024", kv_append, constants, Launch(4, 1), 0, 0)


def _pieces() -> Iterator[Build]:
    """Yields what lies between the products, at the widths of a 7B model."""
    yield Build("add_norm 4096", pieces.add_norm, {"WIDTH": 4096, "BLOCK": 4096, "HAS_Y": True}, Launch(8, 1), 0, 0)
    yield Build("rotate 128", pieces.rotate, {"HEAD_DIM": 128, "HALF": 64, "BLOCK_H": 32, "BLOCK": 64}, Launch(4, 1), 0, 0)
    yield Build("gated 1024", pieces.gated, {"GELU": False, "BLOCK": 1024}, Launch(4, 1), 0, 0)
    yield Build("softcap 1024", pieces.softcap, {"BLOCK": 1024}, Launch(4, 1), 0, 0)


def _builds(tiles: Tiles, *, is_fp8: bool) -> Iterator[Build]:
    m, suffix = tiles.block_m, " fp8" if is_fp8 else ""
    item = 1 if is_fp8 else _ELEMENT_BYTES
    common = {"BLOCK_M": m, "FP8": is_fp8}
    index_loads = tiles.block_j // ALIGN
    for split_k in (1 << power for power in range(tiles.max_split.bit_length())):
        name = f"shrink {m}×{ALIGN}×{tiles.block_k} split {split_k}{suffix}"
        constants = common | {"BLOCK_J": ALIGN, "BLOCK_K": tiles.block_k, "SPLIT_K": split_k}
        yield Build(name, shrink, constants, tiles.shrink, (m * _ELEMENT_BYTES + ALIGN * item) * tiles.block_k, 0)
    for in_place in (True, False):
        name = f"expand {m}×{tiles.block_n}×{tiles.block_j} {'in place' if in_place else 'first'}{suffix}"
        constants = common | {"BLOCK_N": tiles.block_n, "BLOCK_J": tiles.block_j, "ITEM": ALIGN, "IN_PLACE": in_place}
        operands = (m * _ELEMENT_BYTES + tiles.block_n * item) * tiles.block_j
        yield Build(name, expand, constants, tiles.expand, operands, tiles.expand.num_stages * index_loads)
    of = tiles.extension
    for block_n in sorted({of.block_n, of.narrow_n}):
        constants = common | {"BLOCK_N": block_n, "BLOCK_K": of.block_k, "BLOCK_J": tiles.block_j, "ITEM": ALIGN}
        operands = (m + block_n) * of.block_k * _ELEMENT_BYTES
        for has_bias in (False, True):
            name = f"extension {m}×{block_n}×{of.block_k}{' bias' * has_bias}{suffix}"
            constants = constants | {"HAS_BIAS": has_bias}
            yield Build(name, extension, constants, of.launch, operands, of.launch.num_stages * index_loads)


def _attention(head_dim: int, *, page_size: int, softcap: float = 0.0) -> Iterator[Build]:
    """Both kernels for four query heads a key head. A page is looked up for a token, by each thread that loads some of it."""
    tiles, block_d = attention_tiles_for(head_dim, _ELEMENT_BYTES), 1 << (head_dim - 1).bit_length()
    common = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": head_dim, "PAGE_SIZE": page_size, "SCALE": 0.1, "SOFTCAP": softcap}
    suffix = f" pages of {page_size}, softcap" if softcap else ""
    for name, kernel, block_n, launch, more in (
        ("decode attention", decode_attention, tiles.decode_n, tiles.decode, {"BLOCK_G": 16, "MAX_SPLITS": MAX_SPLITS}),
        ("prefill attention", prefill_attention, tiles.prefill_n, tiles.prefill, {"BLOCK_M": tiles.prefill_m}),
    ):
        operand_bytes = 2 * block_n * block_d * _ELEMENT_BYTES
        lookups = launch.num_stages * operand_bytes // (16 * 32 * launch.num_warps)
        constants = common | more | {"BLOCK_D": block_d, "BLOCK_N": block_n}
        yield Build(f"{name} {head_dim}×{block_n}{suffix}", kernel, constants, launch, operand_bytes, lookups)
