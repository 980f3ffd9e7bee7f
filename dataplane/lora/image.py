"""An adapter's image: the immutable bytes of one version as the arena holds them.

File: `VNRIMG03`, uint32 length of the header, SHA-256 of the header, the header (JSON), zeros up to a multiple of 4096, the
payload. Payload: one block for each (layer, slice) that the adapter has, in that order, each on a multiple of 128 bytes: in fp8
the factors of its rank rows, float32 [rank]; A as [rank, K], then, again on a multiple of 128, B transposed to [rank, N], then,
likewise, gain and shift in float32, [N] each, where there are any. Only rank rows that exist take room; a block with a gain or
shift may have none. An image lies in host memory as a mapped file and is copied to the device as it is, or read in place; it is
never written again, and scales stay beside the rows, so that loading it twice gives the same bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.lora.coding import ITEM_BYTES, Coded, code_pair
from dataplane.lora.holdings import Loss
from kernels.rows import ABSENT
from veneer.errors import DataLossError, InvalidArgumentError, Violation

ALIGN_BYTES = 128
MAGIC = b"VNRIMG03"
"""What an image file of this format begins with."""
_PREFIX = struct.Struct("<8sI32s")
_PAGE = 4096
_MAX_HEADER_BYTES = 64 * 1024 * 1024
BACKDATED_NS = 1_000_000_000
"""By how much an image file's time is earlier than it was written; longer than a file system's clock ticks."""


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


_block_fields = attrgetter(*(one.name for one in fields(Block)))


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
        The image, in memory; see `write_image`.

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
    blocks: list[Block] = []
    chunks: list[bytes] = []
    start = 0
    for _, (pair, coded) in sorted(rows.items(), key=lambda item: item[0]):
        vectors = [None if vector is None else vector.tobytes() for vector in (pair.gain, pair.shift)]
        parts = [coded.factors, coded.a, coded.b, *vectors]
        chunks += [part.ljust(_aligned(len(part)), b"\0") for part in parts if part is not None]
        places = _places(start, [None if part is None else len(part) for part in parts])
        rank, in_features = pair.a.shape
        scale = float(np.float32(pair.scaling))
        block = Block(pair.layer, pair.slice, rank, scale, coded.loss, in_features, pair.b.shape[0], *places)
        blocks.append(block)
        start += block.size_bytes
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


def write_image(path: Path, image: Image) -> int:
    """Writes an image file atomically: whole under a name of its own, then renamed. Returns its size in bytes.

    Two writers of one path cannot mix their bytes, and a reader sees the old file, the new one or none. It is not synced, since a
    request waits: what a machine that lost its power leaves is noticed by its checksum, and fetched again.

    The file says that it was written a little earlier than it was: so whatever writes into it later changes that time, however
    soon it comes, and who has checked the file can tell.
    """
    header = json.dumps(
        {
            "version": image.version,
            "base_digest": image.base_digest,
            "dtype": image.dtype,
            "num_layers": image.num_layers,
            "num_slices": image.num_slices,
            "payload_bytes": image.num_bytes,
            "payload_sha256": hashlib.sha256(image.payload.data).hexdigest(),
            "blocks": [_block_fields(block) for block in image.blocks],
        },
        separators=(",", ":"),
    ).encode()
    prefix = _PREFIX.pack(MAGIC, len(header), hashlib.sha256(header).digest()) + header
    prefix = prefix.ljust(-(-len(prefix) // _PAGE) * _PAGE, b"\0")
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(prefix)
            file.write(image.payload.data)
            file.flush()
            written_ns = time.time_ns() - BACKDATED_NS
            os.utime(file.fileno(), ns=(written_ns, written_ns))
        Path(temporary).rename(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return len(prefix) + image.num_bytes


def open_image(path: Path, *, version: str | None = None, base_digest: str | None = None, dtype: str | None = None) -> Image:
    """Maps an image file and checks all of it: header, layout, checksum, and what the caller expects.

    All is read before it is mapped. A page of a mapping that has to come from the disk first stops who touches it, with Python's
    lock in hand and so with every other thread, and ends the process when the disk cannot read it.

    Args:
        path: The file.
        version: Digest that the image must carry; None for any.
        base_digest: Base that it must carry; None for any.
        dtype: Dtype that it must carry; None for any.

    Returns:
        The image; its payload is mapped read-only and stays valid when the file is unlinked.

    Raises:
        CorruptImageError: The file is cut, changed, or another one than expected.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        if sys.platform == "linux":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise CorruptImageError(f"image of {len(prefix)} bytes is shorter than its prefix")
        magic, length, digest = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise CorruptImageError("not an image file of this format")
        header = file.read(min(length, _MAX_HEADER_BYTES))
        if len(header) != length or hashlib.sha256(header).digest() != digest:
            raise CorruptImageError("the image's header is cut or changed")
        start = -(-(_PREFIX.size + length) // _PAGE) * _PAGE
        file.seek(start)
        payload_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    image = _read_header(header, np.frombuffer(mapped, dtype=np.uint8)[start:], payload_sha256=payload_sha256)
    for name, expected in (("version", version), ("base_digest", base_digest), ("dtype", dtype)):
        if expected is not None and getattr(image, name) != expected:
            raise CorruptImageError(f"the image's {name} is {getattr(image, name)!r}, expected {expected!r}")
    return image


def _read_header(header: bytes, payload: npt.NDArray[np.uint8], *, payload_sha256: str) -> Image:
    try:
        fields: dict[str, Any] = json.loads(header)
        blocks = tuple(Block(*block) for block in fields["blocks"])
        image = Image(
            version=fields["version"],
            base_digest=fields["base_digest"],
            dtype=fields["dtype"],
            num_layers=fields["num_layers"],
            num_slices=fields["num_slices"],
            blocks=blocks,
            payload=payload,
        )
        payload_bytes, expected_sha256 = fields["payload_bytes"], fields["payload_sha256"]
        item = ITEM_BYTES[image.dtype]
        end, before = 0, (-1, -1)
        for block in blocks:
            vector, has_vector = 4 * block.out_features, (block.gain_offset != ABSENT, block.shift_offset != ABSENT)
            factors = 4 * block.rank if image.dtype == "fp8" else None
            sizes = [factors, block.rank * block.in_features * item, block.rank * block.out_features * item]
            places = _places(end, [*sizes, *(vector if there else None for there in has_vector)])
            in_order = before < (block.layer, block.slice)
            inside = _is_inside(block.layer, block.slice, image.num_layers, image.num_slices)
            positive = min(block.rank + any(has_vector), block.in_features, block.out_features) > 0 <= block.rank
            vectors = (block.gain_offset, block.shift_offset)
            placed = places == (block.factor_offset, block.a_offset, block.b_offset, *vectors, block.size_bytes)
            finite = math.isfinite(block.scale) and math.isfinite(block.loss)
            if not (in_order and inside and positive and finite and placed):
                raise CorruptImageError(f"the image's block of layer {block.layer}, slice {block.slice} is misplaced")
            end, before = end + block.size_bytes, (block.layer, block.slice)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptImageError("the image's header has no valid fields") from error
    if not end == payload_bytes == payload.size:
        raise CorruptImageError(f"the image's payload has {payload.size} bytes, its blocks {end}")
    if payload_sha256 != expected_sha256:
        raise CorruptImageError("the image's payload is changed")
    return image


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


def _places(start: int, sizes: Sequence[int | None]) -> tuple[int, ...]:
    """Returns where parts of these bytes lie, one after the other from `start` on, ABSENT for None; then the bytes of all."""
    places, end = [], start
    for size in sizes:
        places.append(ABSENT if size is None else end)
        end += _aligned(size or 0)
    return (*places, end - start)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _name(pair: ImagePair) -> str:
    return f"layer {pair.layer}, slice {pair.slice}"
