from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veneer.artifact.header import DTYPE_BYTES, TensorRef
from veneer.artifact.source import Source
from veneer.artifact.values import measure, measure_run, widen
from veneer.errors import DataLossError


def _measure(data: bytes, dtype: str) -> tuple[float, int, int]:
    count = len(data) // DTYPE_BYTES[dtype]
    found = measure(Source(io.BytesIO(b"junk" + data)), TensorRef("t", dtype, (count,), 4, len(data)))
    return found.max_abs, found.num_not_finite, found.num_overflowing


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=50))
def test_bfloat16_widens_to_the_float32_with_the_same_high_half(bits: list[int]) -> None:
    wide = widen(np.array(bits, dtype="<u2").tobytes(), "BF16")
    assert wide.dtype == np.float32
    assert (wide.view(np.uint32) >> 16).tolist() == bits
    assert not (wide.view(np.uint32) & 0xFFFF).any()


@given(st.lists(st.floats(width=16), min_size=1, max_size=50))
def test_float16_widens_exactly(values: list[float]) -> None:
    narrow = np.array(values, dtype="<f2")
    np.testing.assert_array_equal(widen(narrow.tobytes(), "F16"), narrow.astype(np.float64))


@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, -3.0, 2.0], (3.0, 0, 0)),
        ([np.nan, -3.0, 2.0], (3.0, 1, 0)),
        ([np.inf, -np.inf, np.nan], (0.0, 3, 0)),
        ([1.0, np.inf], (1.0, 1, 0)),
        ([-0.0], (0.0, 0, 0)),
    ],
)
def test_elements_that_are_not_finite_are_counted(dtype: str, values: list[float], expected: tuple[float, int, int]) -> None:
    assert _measure(np.array(values, dtype=dtype).tobytes(), {"<f4": "F32", "<f2": "F16"}[dtype]) == expected


def test_float32_that_rounds_to_infinity_in_bfloat16_is_counted() -> None:
    largest = np.array([0x7F7F0000], dtype=np.uint32).view(np.float32)[0]
    halfway = np.array([0x7F7F8000], dtype=np.uint32).view(np.float32)[0]
    below = np.nextafter(halfway, np.float32(0))
    assert _measure(np.array([largest, below, halfway, -halfway, np.nan], dtype="<f4").tobytes(), "F32") == (float(halfway), 1, 2)


@given(
    st.sampled_from(["F32", "F16", "BF16"]),
    st.lists(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=6), min_size=1, max_size=5),
)
def test_tensors_measured_together_are_measured_as_each_alone(dtype: str, rows: list[list[int]]) -> None:
    item = DTYPE_BYTES[dtype]
    data, tensors = b"junk", []
    for row in rows:  # the high half of a float32 decides what it is like
        bits = np.array(row, dtype=np.uint32) << 16 if dtype == "F32" else np.array(row, dtype=np.uint16)
        tensors.append(TensorRef("t", dtype, (len(row),), len(data), len(row) * item))
        data += bits.astype(f"<u{item}").tobytes()
    source = Source(io.BytesIO(data))
    assert measure_run(source, tensors) == [measure(source, tensor) for tensor in tensors]


def test_a_tensor_longer_than_a_part_is_measured_whole() -> None:
    values = np.zeros((1 << 20) + 5, dtype="<f4")
    values[0], values[-1] = -7, 5
    values[-2] = np.nan
    assert _measure(values.tobytes(), "F32") == (7.0, 1, 0)


def test_a_file_that_ends_early_is_data_loss() -> None:
    with pytest.raises(DataLossError, match="ended at byte 8, 12 were expected"):
        measure(Source(io.BytesIO(bytes(8))), TensorRef("t", "F32", (2,), 4, 8))
