"""How an image holds a pair: both matrices in the model's dtype, or in fp8 behind their factors, and what that loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.fp8 import relative_error, to_fp8

_STORED: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "fp8": np.dtype(np.uint8),
}
ITEM_BYTES = {name: stored.itemsize for name, stored in _STORED.items()}
"""Bytes of an element by the dtype of an image."""


@dataclass(frozen=True, slots=True)
class Coded:
    """One pair as it lies in an image.

    Attributes:
        factors: float32 [r] in front of A; None outside of fp8.
        a: A, [r, K], row-major.
        b: B transposed, [r, N], row-major.
        loss: `‖B A − B' A'‖ / ‖B A‖` in fp8, in Frobenius norms; 0 in other dtypes.
        not_finite: Names of what has values that the dtype does not hold; the rest is void then.
    """

    factors: bytes | None
    a: bytes
    b: bytes
    loss: float
    not_finite: tuple[str, ...] = ()


def code_pair(a: npt.NDArray[Any], b: npt.NDArray[Any], *, dtype: str) -> Coded:
    """Casts A, [r, K], and B, [N, r], to a dtype of ITEM_BYTES, to nearest and ties to even; in fp8 see `kernels.fp8`.

    Both are float32, or are in the dtype already, bfloat16 as the uint16 of its bits; fp8 is made of float32 alone.
    """
    if dtype == "fp8":
        return _code_fp8(a, b)
    cast = {"A": _cast(a, dtype), "B": _cast(b.T, dtype)}
    not_finite = tuple(name for name, matrix in cast.items() if not _is_finite(matrix, dtype))
    return Coded(None, cast["A"].tobytes(), cast["B"].tobytes(), 0.0, not_finite)


def _code_fp8(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> Coded:
    not_finite = tuple(name for name, matrix in (("A", a), ("B", b)) if not np.isfinite(matrix).all())
    if not_finite:
        return Coded(None, b"", b"", 0.0, not_finite)
    pair = to_fp8(np.ascontiguousarray(a), b)
    if not np.isfinite(pair.factors).all():
        return Coded(None, b"", b"", 0.0, ("A times B",))
    return Coded(pair.factors.tobytes(), pair.a.tobytes(), pair.b.tobytes(), relative_error(a, b, pair))


def _cast(matrix: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Returns the matrix in the dtype, row-major; bfloat16 as the uint16 of its bits."""
    if matrix.dtype == _STORED[dtype]:
        return np.ascontiguousarray(matrix)
    matrix = np.ascontiguousarray(matrix, dtype=np.float32)
    if dtype == "bfloat16":
        bits = matrix.view(np.uint32)
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # ties go to the even neighbour
        rounded = np.where(np.isfinite(matrix), bits + half, bits | np.uint32(0x10000))  # a NaN must not round to infinity
        return (rounded >> np.uint32(16)).astype(np.uint16)
    with np.errstate(over="ignore"):
        return matrix.astype(np.dtype(dtype))


def _is_finite(matrix: npt.NDArray[Any], dtype: str) -> bool:
    if dtype == "bfloat16":
        return bool(((matrix & np.uint16(0x7F80)) != np.uint16(0x7F80)).all())
    return bool(np.isfinite(matrix).all())
