"""An image as a file: written whole or not at all, and checked whole before it is used.

File: `VNRIMG03`, uint32 length of the header, SHA-256 of the header, the header (JSON), zeros up to a multiple of 4096, the
payload (`dataplane.lora.image`).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from io import BufferedReader
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.lora.coding import ITEM_BYTES
from dataplane.lora.image import Block, CorruptImageError, Image, lay_out
from dataplane.lora.mapped_file import map_file
from kernels.rows import ABSENT

MAGIC = b"VNRIMG03"
"""What an image file of this format begins with."""
_PREFIX = struct.Struct("<8sI32s")
_PAGE = 4096
_BLOCK_BYTES = 256 * 1024
_MAX_HEADER_BYTES = 64 * 1024 * 1024
_MAX_SIDE = 1 << 24
"""Of ranks, features and numbers of layers and slices: far beyond any model, and products of two fit an integer."""
BACKDATED_NS = 1_000_000_000
"""By how much an image file's time is earlier than it was written; longer than a file system's clock ticks."""

_FIELDS = tuple(one.name for one in fields(Block))
_block_fields = attrgetter(*_FIELDS)


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
    file = tempfile.NamedTemporaryFile(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent, delete=False)  # noqa: SIM115
    temporary = Path(file.name)
    try:
        with file:
            file.write(prefix)
            file.write(image.payload.data)
            file.flush()
            written_ns = time.time_ns() - BACKDATED_NS
            os.utime(file.fileno(), ns=(written_ns, written_ns))
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return len(prefix) + image.num_bytes


def open_image(
    path: Path,
    *,
    version: str | None = None,
    base_digest: str | None = None,
    dtype: str | None = None,
    computing: AbstractContextManager[object] | None = None,
) -> Image:
    """Maps an image file and checks all of it: header, layout, checksum, and what the caller expects.

    All is read before it is mapped. A page of a mapping that has to come from the disk first stops who touches it, with Python's
    lock in hand and so with every other thread, and ends the process when the disk cannot read it.

    Args:
        path: The file.
        version: Digest that the image must carry; None for any.
        base_digest: Base that it must carry; None for any.
        dtype: Dtype that it must carry; None for any.
        computing: Held while this computes, and given back while it waits for the disk.

    Returns:
        The image; its payload is mapped read-only and stays valid when the file is unlinked.

    Raises:
        CorruptImageError: The file is cut, changed, or another one than expected.
        OSError: The file cannot be read.
    """
    computing = nullcontext() if computing is None else computing
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
        payload_sha256 = _sha256(file, computing)
        mapped = map_file(file.fileno())
    with computing:
        image = _read_header(header, mapped[start:], payload_sha256=payload_sha256)
    for name, expected in (("version", version), ("base_digest", base_digest), ("dtype", dtype)):
        if expected is not None and getattr(image, name) != expected:
            raise CorruptImageError(f"the image's {name} is {getattr(image, name)!r}, expected {expected!r}")
    return image


def _sha256(file: BufferedReader, computing: AbstractContextManager[object]) -> str:
    """Returns the digest of the rest of a file."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK_BYTES))
    while num_bytes := file.readinto(block):
        with computing:
            digest.update(block[:num_bytes])
    return digest.hexdigest()


def _read_header(header: bytes, payload: npt.NDArray[np.uint8], *, payload_sha256: str) -> Image:
    try:
        known: dict[str, Any] = json.loads(header)
        rows = known["blocks"]
        image = Image(
            version=known["version"],
            base_digest=known["base_digest"],
            dtype=known["dtype"],
            num_layers=known["num_layers"],
            num_slices=known["num_slices"],
            blocks=tuple(Block(*row) for row in rows),
            payload=payload,
        )
        payload_bytes, expected_sha256 = known["payload_bytes"], known["payload_sha256"]
        num_bytes = _check_blocks(rows, image)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CorruptImageError("the image's header has no valid fields") from error
    if not num_bytes == payload_bytes == payload.size:
        raise CorruptImageError(f"the image's payload has {payload.size} bytes, its blocks {num_bytes}")
    if payload_sha256 != expected_sha256:
        raise CorruptImageError("the image's payload is changed")
    return image


def _check_blocks(rows: Sequence[Sequence[float]], image: Image) -> int:
    """Checks that blocks lie where they must, all at once; returns the bytes that they take.

    Raises:
        CorruptImageError: One does not.
        ValueError: They are no numbers, or not as many as a block has.
    """
    table = np.array(rows)
    if table.dtype.kind not in "if":
        raise ValueError("a field of a block is no number")
    columns = dict(zip(_FIELDS, table.astype(np.float64).reshape(len(rows), len(_FIELDS)).T, strict=True))
    is_finite = np.isfinite(columns.pop("scale")) & np.isfinite(columns.pop("loss"))
    whole = {name: column.astype(np.int64) for name, column in columns.items()}
    layer, place, rank = whole["layer"], whole["slice"], whole["rank"]
    num_in, num_out = whole["in_features"], whole["out_features"]
    has_vectors = np.stack([whole["gain_offset"], whole["shift_offset"]], axis=1) != ABSENT

    is_whole = np.all([columns[name] == whole[name] for name in whole], axis=0)
    limits = np.where(layer < image.num_layers, image.num_slices, 2)
    is_inside = (layer >= 0) & (layer <= image.num_layers) & (place >= 0) & (place < limits)
    is_sized = (rank >= 0) & (rank + has_vectors.any(axis=1) > 0) & (np.minimum(num_in, num_out) > 0)
    is_sized &= np.max([rank, num_in, num_out], axis=0, initial=0) < _MAX_SIDE
    numbers = layer * _MAX_SIDE + place
    is_next = np.diff(numbers, prepend=-1) > 0
    wrong = ~(is_finite & is_whole & is_inside & is_sized & is_next)
    if not wrong.any():
        item = ITEM_BYTES[image.dtype]
        factors = 4 * rank if image.dtype == "fp8" else np.full_like(rank, ABSENT)
        vectors = np.where(has_vectors, 4 * num_out[:, None], ABSENT)
        sizes = np.column_stack([factors, rank * num_in * item, rank * num_out * item, vectors])
        given = np.column_stack([whole[name] for name in _FIELDS[-6:]])
        wrong = (lay_out(sizes) != given).any(axis=1)
    if wrong.any():
        first = int(wrong.argmax())
        raise CorruptImageError(f"the image's block of layer {rows[first][0]}, slice {rows[first][1]} is misplaced")
    return sum(whole["size_bytes"].tolist())
