"""Adapters in fp8: bytes of e4m3, each rank row over a factor of its own, and what that loses.

In an arena of bytes a block is the factors, float32 [rank], padded to 128 bytes, then A and B as ever, one byte an element. `A_j`
stands for `a_j · codes`, `B_j` for `b_j · codes`; the kernels widen a code to 1/256 of its value, so factor j is
`65536 · a_j · b_j`, and goes into H with the scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FACTOR_ALIGN = 128
"""Bytes to a multiple of which the factors are padded, and so where A starts behind them."""

LARGEST = 448.0
_WIDENED = 256.0  # what the kernels divide a code by, for A and for B
_LEAST_NORMAL = np.float32(2.0**-6)
_DENORMAL_UNIT = np.float32(2.0**14)  # whose neighbours in float32 are as far apart as denormal codes


def _values() -> npt.NDArray[np.float32]:
    """Returns the value of each code, NaN of the two that `encode` never makes."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    sizes = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -sizes, sizes)).astype(np.float32)


_VALUES = _values()


@dataclass(frozen=True, slots=True)
class Fp8Pair:
    """One low-rank pair in fp8.

    Attributes:
        a: uint8 [r, K], codes of A.
        b: uint8 [r, N], codes of B, transposed.
        factors: float32 [r].
    """

    a: npt.NDArray[np.uint8]
    b: npt.NDArray[np.uint8]
    factors: npt.NDArray[np.float32]


def factor_bytes(rank: int) -> int:
    """Returns the bytes that the factors of a block take in front of A."""
    return -(-4 * rank // FACTOR_ALIGN) * FACTOR_ALIGN


def encode(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Returns the codes of e4m3 nearest to values of at most 448, ties to the even code.

    A normal value is rounded where 20 bits of its mantissa are cut off, a small one by an addition: 2 ns a value on one core,
    where a search among the codes takes 36.
    """
    sizes = np.abs(values)
    bits = sizes.view(np.int32)
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3)
    denormal = (sizes + _DENORMAL_UNIT).view(np.int32) - _DENORMAL_UNIT.view(np.int32)
    codes = np.where(sizes < _LEAST_NORMAL, denormal, normal).astype(np.uint8)
    return codes | (values.view(np.uint32) >> 24 & 0x80).astype(np.uint8)


def decode(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Returns the values of codes that `encode` makes."""
    return _VALUES[codes]


def to_fp8(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> Fp8Pair:
    """Returns a pair, A as [r, K] and B as [N, r], in fp8; both are finite.

    A factor is infinite where the largest of A times the largest of B, in one rank row, is beyond float32: nothing holds it then.
    """
    codes_a, scale_a = _rows(a)
    codes_b, scale_b = _rows(np.ascontiguousarray(b.T))
    with np.errstate(over="ignore"):
        return Fp8Pair(codes_a, codes_b, (_WIDENED**2 * scale_a.astype(np.float64) * scale_b).astype(np.float32))


def from_fp8(pair: Fp8Pair) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns A as [r, K] and B as [N, r] of the same product; the factors are in A."""
    a = decode(pair.a).astype(np.float64) * (pair.factors.astype(np.float64) / _WIDENED**2)[:, None]
    return a, decode(pair.b).astype(np.float64).T


def relative_error(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], narrow: Fp8Pair) -> float:
    """Returns `‖B A − B' A'‖ / ‖B A‖` in Frobenius norms, where B' A' is the same pair in fp8; 0 for a pair of zeros.

    The product is never formed: `‖B A‖² = Σ (Bᵀ B) ⊙ (A Aᵀ)`.
    """
    narrow_a, narrow_b = from_fp8(narrow)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    whole = _squared_norm(wide_a, wide_b)
    lost = _squared_norm(np.concatenate([wide_a, narrow_a]), np.concatenate([wide_b, -narrow_b], axis=1))
    return float(np.sqrt(max(lost, 0.0) / whole)) if whole else 0.0


def _rows(matrix: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    largest = np.abs(matrix).max(axis=1)
    scale = np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    return encode(np.clip(matrix / scale[:, None], -LARGEST, LARGEST)), scale


def _squared_norm(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    return float(((b.T @ b) * (a @ a.T)).sum())
