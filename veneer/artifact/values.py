"""Numbers inside tensors: exact widening to float32, and the check that every one is finite and small enough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from veneer.artifact.header import DTYPE_BYTES, TensorRef
from veneer.artifact.source import Source

_CHUNK_ELEMENTS = 1 << 20
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
    step = _CHUNK_ELEMENTS * DTYPE_BYTES[tensor.dtype]
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


def read_matrix(source: Source, tensor: TensorRef) -> npt.NDArray[np.float32]:
    """Reads a whole tensor as float32."""
    return widen(source.read(tensor.offset, tensor.size_bytes), tensor.dtype).reshape(tensor.shape)
