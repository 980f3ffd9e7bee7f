"""An adapter's image: the immutable bytes of one version as the arena holds them.

Payload: one block for each (layer, slice) that the adapter has, in that order, each on a multiple of 128 bytes: in fp8 the
factors of its rank rows, float32 [rank]; A as [rank, K], then, again on a multiple of 128, B transposed to [rank, N], then,
likewise, gain and shift in float32, [N] each, where there are any. Only rank rows that exist take room; a block with a gain or
shift may have none. An image lies in host memory as a mapped file (`dataplane.lora.image_file`) and is copied to the device as it
is, or read in place; it is never written again, and scales stay beside the rows, so that loading it twice gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.lora.coding import ITEM_BYTES, Coded, code_pair
from dataplane.lora.holdings import Loss
from kernels.rows import ABSENT
from veneer.errors import DataLossError, InvalidArgumentError, Violation

ALIGN_BYTES = 128


class ImageError(InvalidArgumentError):
    """An adapter cannot become an image: its values do not fit the dtype, or its pairs do not add up."""


class LossyAdapterError(ImageError):
    """An adapter loses more in fp8 than the settings allow."""


class CorruptImageError(DataLossError):
    """An image file is not what it should be: cut, changed, or of another version, base or dtype."""


@dataclass(frozen=True, slots=True)
class ImagePair:
    """One low-rank pair to put into an image: `y ← gain ⊙ (y + scaling · B A x) + shift`.

    Attributes:
        layer: Layer of the model; the number of layers stands for what is outside of them.
        slice: Slice index of the projection; outside of the layers 0 is the embedding, 1 the head.
        scaling: Factor of B A x: alpha / r, or alpha / sqrt(r).
        a: [r, K], float32 or in the image's own dtype, bfloat16 as the uint16 of its bits; r may be 0 where there is a shift.
        b: [N, r], likewise.
        gain: float32 [N]; None for ones.
        shift: float32 [N]; None for zeros.
    """

    layer: int
    slice: int
    scaling: float
    a: npt.NDArray[Any]
    b: npt.NDArray[Any]
    gain: npt.NDArray[np.float32] | None = None
    shift: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Where one (layer, slice) lies in the payload; offsets and sizes in bytes, ABSENT for what it does not have.

    `loss` is what its pair loses in fp8, see `dataplane.lora.coding`.
    """

    layer: int
    slice: int
    rank: int
    scale: float
    loss: float
    in_features: int
    out_features: int
    factor_offset: int
    a_offset: int
    b_offset: int
    gain_offset: int
    shift_offset: int
    size_bytes: int

    @property
    def offset(self) -> int:
        """Where its first part lies."""
        return self.a_offset if self.factor_offset == ABSENT else self.factor_offset


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks by layer and slice, [L, slices]; those on embedding and head are not in it.

    Attributes:
        block: int64, number of the block there; 0 where there is none.
        rank: int32; 0 where there is none.
        scale: float32; 0 where there is none.
        matrices: int64 [2, L, slices], offsets of A and B in the payload, in bytes; 0 where there are none.
        vectors: Likewise of gain and shift, ABSENT where there is none; None where there are none at all.
    """

    block: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float32]
    matrices: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.int64] | None

    @classmethod
    def of(cls, blocks: Sequence[Block], num_layers: int, num_slices: int) -> Grid:
        """Spreads blocks out."""
        inner = [block for block in blocks if block.layer < num_layers]
        at = ([block.layer for block in inner], [block.slice for block in inner])

        def spread(values: Sequence[float], dtype: npt.DTypeLike, nothing: int = 0) -> npt.NDArray[Any]:
            grid = np.full((num_layers, num_slices), nothing, dtype)
            grid[at] = values
            return grid

        matrices = [[block.a_offset for block in inner], [block.b_offset for block in inner]]
        vectors = [[block.gain_offset for block in inner], [block.shift_offset for block in inner]]
        has_vectors = any(offset != ABSENT for offsets in vectors for offset in offsets)
        return cls(
            spread(range(len(inner)), np.int64),
            spread([block.rank for block in inner], np.int32),
            spread([block.scale for block in inner], np.float32),
            np.stack([spread(offsets, np.int64) for offsets in matrices]),
            np.stack([spread(offsets, np.int64, ABSENT) for offsets in vectors]) if has_vectors else None,
        )


@dataclass(frozen=True, slots=True)
class Image:
    """An opened image.

    Attributes:
        version: Digest of the adapter version.
        base_digest: Digest of the base model that it was made for.
        dtype: `bfloat16`, `float16` or `float32`, which is the model's, or `fp8`.
        num_layers: Layers of the model.
        num_slices: Slices of the model.
        blocks: Where each (layer, slice) lies, in the order of the payload, without gaps.
        payload: uint8, read-only, mapped from the file or in memory.
    """

    version: str
    base_digest: str
    dtype: str
    num_layers: int
    num_slices: int
    blocks: tuple[Block, ...]
    payload: npt.NDArray[np.uint8]
    _grid: Grid | None = field(init=False, repr=False, compare=False, default=None)

    @property
    def grid(self) -> Grid:
        """Where what is inside the layers lies. Made when first asked for, since each load asks for it."""
        if self._grid is None:
            object.__setattr__(self, "_grid", Grid.of(self.blocks, self.num_layers, self.num_slices))
        assert self._grid is not None, "it was just made"
        return self._grid

    @property
    def rank(self) -> int:
        """Largest rank over layers and slices: the list entries that the adapter takes, before padding."""
        return max((block.rank for block in self.blocks), default=0)

    @property
    def loss(self) -> Loss | None:
        """What the pair loses that loses most in fp8; None in other dtypes."""
        if self.dtype != "fp8" or not self.blocks:
            return None
        worst = max(self.blocks, key=lambda block: block.loss)
        return Loss(worst.loss, worst.layer, worst.slice)

    @property
    def has_edges(self) -> bool:
        """Whether it has a pair on the embedding or the head; these come last."""
        return bool(self.edges)

    @property
    def edges(self) -> tuple[Block, ...]:
        """Its blocks on the embedding and the head."""
        return tuple(block for block in self.blocks[-2:] if block.layer == self.num_layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return int(self.payload.size)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Sizes of the blocks, for `Residency.stage`."""
        return tuple(block.size_bytes for block in self.blocks)


def lay_out(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Says where the parts of blocks lie, one after the other from the start of the payload on.

    Args:
        sizes: [blocks, parts], bytes; ABSENT for what a block does not have.

    Returns:
        [blocks, parts + 1], offsets, ABSENT likewise; then the bytes of the block.
    """
    is_there = sizes != ABSENT
    taken = np.where(is_there, -(-sizes // ALIGN_BYTES) * ALIGN_BYTES, 0)
    starts = np.cumsum(taken).reshape(taken.shape) - taken
    return np.column_stack([np.where(is_there, starts, ABSENT), taken.sum(axis=1)])


def build_image(
    pairs: Iterable[ImagePair],
    *,
    version: str,
    base_digest: str,
    dtype: str,
    num_layers: int,
    num_slices: int,
) -> Image:
    """Casts pairs to a dtype and lays them out.

    Args:
        pairs: The adapter's pairs in any order, each (layer, slice) once.
        version: Digest of the adapter version.
        base_digest: Digest of the base model.
        dtype: `bfloat16`, `float16`, `float32` or `fp8`: see `dataplane.lora.coding`.
        num_layers: Layers of the model.
        num_slices: Slices of the model.

    Returns:
        The image, in memory; see `dataplane.lora.image_file.write_image`.

    Raises:
        ImageError: A value is not finite after the cast, or a pair is wrong, doubled or outside the model; lists every fault.
    """
    if dtype not in ITEM_BYTES:
        raise ImageError.of([Violation("dtype", f"{dtype!r} is none of {', '.join(ITEM_BYTES)}")])
    violations: list[Violation] = []
    rows: dict[tuple[int, int], tuple[ImagePair, Coded]] = {}
    for pair in pairs:
        faults = _faults(pair, num_layers, num_slices)
        if (pair.layer, pair.slice) in rows:
            faults.append(Violation(_name(pair), "is given twice"))
        if faults:
            violations += faults
            continue
        coded = code_pair(pair.a, pair.b, dtype=dtype)
        violations += [
            Violation(f"{_name(pair)}: {name}", f"has values that are not finite in {dtype}") for name in coded.not_finite
        ]
        rows[pair.layer, pair.slice] = (pair, coded)
    if not rows and not violations:
        violations.append(Violation("adapter", "has no pair"))
    if violations:
        raise ImageError.of(violations)
    chunks: list[bytes] = []
    sizes: list[list[int]] = []
    in_order = [row for _, row in sorted(rows.items(), key=lambda item: item[0])]
    for pair, coded in in_order:
        vectors = [None if vector is None else vector.tobytes() for vector in (pair.gain, pair.shift)]
        parts = [coded.factors, coded.a, coded.b, *vectors]
        chunks += [part.ljust(-(-len(part) // ALIGN_BYTES) * ALIGN_BYTES, b"\0") for part in parts if part is not None]
        sizes.append([ABSENT if part is None else len(part) for part in parts])
    blocks = [
        Block(pair.layer, pair.slice, pair.a.shape[0], float(np.float32(pair.scaling)), coded.loss, *_shape(pair), *places)
        for (pair, coded), places in zip(in_order, lay_out(np.array(sizes)).tolist(), strict=True)
    ]
    payload = np.frombuffer(b"".join(chunks), dtype=np.uint8)
    return Image(version, base_digest, dtype, num_layers, num_slices, tuple(blocks), payload)


def check_loss(image: Image, *, most: float) -> None:
    """Checks what an image loses in fp8 against the setting `max_adapter_loss`.

    Raises:
        LossyAdapterError: Names the pair that loses most, and the limit.
    """
    if image.loss is not None and image.loss.error > most:
        where = f"layer {image.loss.layer}, slice {image.loss.slice}"
        fault = f"loses {image.loss.error:.3g} of its norm in fp8, max_adapter_loss is {most:g}"
        raise LossyAdapterError.of([Violation(where, fault)])


def _faults(pair: ImagePair, num_layers: int, num_slices: int) -> list[Violation]:
    faults = []
    if not _is_inside(pair.layer, pair.slice, num_layers, num_slices):
        faults.append(Violation(_name(pair), f"lies outside {num_layers} layers of {num_slices} slices"))
    vectors = [vector for vector in (pair.gain, pair.shift) if vector is not None]
    shape = (*pair.a.shape[:1], *pair.b.shape[1:])
    if pair.a.ndim != 2 or pair.b.ndim != 2 or shape[0] != shape[1] or 0 in (pair.a.shape[1], pair.b.shape[0]):
        faults.append(Violation(_name(pair), f"A {pair.a.shape} and B {pair.b.shape} are no [r, in] and [out, r]"))
    elif not shape[0] and not vectors:
        faults.append(Violation(_name(pair), "has rank 0 and nothing else"))
    kinds = {(vector.dtype, vector.shape, bool(np.isfinite(vector).all())) for vector in vectors}
    if kinds - {(np.dtype(np.float32), pair.b.shape[:1], True)}:
        faults.append(Violation(f"{_name(pair)}: gain or shift", "is not finite, or no float32 [out]"))
    if not math.isfinite(pair.scaling) or abs(pair.scaling) > float(np.finfo(np.float32).max):
        faults.append(Violation(f"{_name(pair)}: scaling", "is not finite in float32"))
    return faults


def _is_inside(layer: int, index: int, num_layers: int, num_slices: int) -> bool:
    return 0 <= layer <= num_layers and 0 <= index < (num_slices if layer < num_layers else 2)


def _shape(pair: ImagePair) -> tuple[int, int]:
    return pair.a.shape[1], pair.b.shape[0]


def _name(pair: ImagePair) -> str:
    return f"layer {pair.layer}, slice {pair.slice}"
