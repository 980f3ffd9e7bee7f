"""Numbers inside tensors: exact widening to float32, and the check that every one is finite and small enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from veneer.artifact.header import DTYPE_BYTES, TensorRef
from veneer.artifact.source import Source

CHUNK_ELEMENTS = 1 << 20
"""Elements that are read at once."""
_MAGNITUDES = {
    "F32": (np.uint32, 0x7FFF_FFFF, 0x7F7F_0000),
    "F16": (np.uint16, 0x7FFF, 0x7BFF),
    "BF16": (np.uint16, 0x7FFF, 0x7F7F),
}
"""Type of an element's bits, those of its magnitude, and the largest magnitude that is finite in bfloat16 too."""
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_LARGEST_BFLOAT16 = 2.0**127 * (2.0 - 2.0**-7)
# Halfway from the largest bfloat16 to the next power of two: from here a float32 rounds to infinity.
_BFLOAT16_OVERFLOW = 2.0**127 * (2.0 - 2.0**-8)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a tensor's elements are like.

    Attributes:
        max_abs: Largest magnitude among the finite elements.
        num_not_finite: Elements that are NaN or infinite.
        num_overflowing: Finite elements that become infinite when cast to bfloat16.
    """

    max_abs: float
    num_not_finite: int
    num_overflowing: int


def widen(data: bytes, dtype: str) -> npt.NDArray[np.float32]:
    """Turns raw little-endian elements into float32; exact for all three types.

    Args:
        data: The bytes of a tensor or of a part of it.
        dtype: `F32`, `F16` or `BF16`.

    Returns:
        A new array of one dimension; read-only for `F32`, where it is a view of the bytes.
    """
    if dtype == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F16":
        return np.frombuffer(data, dtype="<f2").astype(np.float32)
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


def measure(source: Source, tensor: TensorRef) -> Statistics:
    """Reads a tensor once, in parts of at most a million elements."""
    step = CHUNK_ELEMENTS * DTYPE_BYTES[tensor.dtype]
    max_abs = 0.0
    num_not_finite = num_overflowing = 0
    for offset in range(0, tensor.size_bytes, step):
        values = widen(source.read(tensor.offset + offset, min(step, tensor.size_bytes - offset)), tensor.dtype)
        low, high = float(values.min()), float(values.max())
        if not (np.isfinite(low) and np.isfinite(high)):  # min and max hand on a NaN
            finite = values[np.isfinite(values)]
            num_not_finite += values.size - finite.size
            low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        largest = max(-low, high)
        max_abs = max(max_abs, largest)
        if largest > _LARGEST_BFLOAT16:
            num_overflowing += int(np.count_nonzero(np.isfinite(values) & (np.abs(values) >= np.float32(_BFLOAT16_OVERFLOW))))
    return Statistics(max_abs=max_abs, num_not_finite=num_not_finite, num_overflowing=num_overflowing)


def measure_run(source: Source, tensors: Sequence[TensorRef]) -> list[Statistics]:
    """Reads tensors of one type that lie one after the other without a gap, all at once; the same as `measure` of each.

    The bits of magnitudes are ordered as the magnitudes are.
    """
    dtype = tensors[0].dtype
    bits, mask, largest = _MAGNITUDES[dtype]
    data = source.read(tensors[0].offset, sum(tensor.size_bytes for tensor in tensors))
    starts = [(tensor.offset - tensors[0].offset) // DTYPE_BYTES[dtype] for tensor in tensors]
    peaks = np.maximum.reduceat(np.frombuffer(data, bits) & bits(mask), starts)
    return [
        Statistics(max_abs=value, num_not_finite=0, num_overflowing=0) if peak <= largest else measure(source, tensor)
        for tensor, peak, value in zip(tensors, peaks.tolist(), widen(peaks.tobytes(), dtype).tolist(), strict=True)
    ]


def read_matrix(source: Source, tensor: TensorRef, *, keep: str = "") -> npt.NDArray[Any]:
    """Reads a whole tensor: as float32, or as it is, read-only, where it has the type to keep (`BF16` as uint16)."""
    data = source.read(tensor.offset, tensor.size_bytes)
    values = np.frombuffer(data, dtype=_STORED[keep]) if tensor.dtype == keep else widen(data, tensor.dtype)
    return values.reshape(tensor.shape)
