from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.fp8 import decode, encode, factor_bytes, from_fp8, relative_error, to_fp8


def test_codes_are_those_of_e4m3_rounded_to_nearest_and_ties_to_even():
    exact = decode(np.array([code for code in range(256) if code & 0x7F != 0x7F], dtype=np.uint8))
    middles = (np.sort(exact)[1:] + np.sort(exact)[:-1]) / 2
    random = np.random.default_rng(0).uniform(-448, 448, 10_000)
    small = np.random.default_rng(1).uniform(-0.1, 0.1, 10_000)
    values = np.concatenate([exact, middles, random, small]).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn)
    assert np.array_equal(decode(encode(values)), expected.float().numpy())
    assert np.array_equal(encode(values)[values != 0], expected.view(torch.uint8).numpy()[values != 0])


def test_every_code_of_a_finite_value_is_finite():
    assert np.isfinite(decode(encode(np.linspace(-448, 448, 100_001).astype(np.float32)))).all()


@pytest.mark.parametrize("rank", [1, 3, 16, 64])
def test_an_adapter_of_normal_numbers_loses_about_as_much_as_its_mantissa(rank):
    rng = np.random.default_rng(rank)
    a, b = rng.standard_normal((rank, 200), dtype=np.float32), rng.standard_normal((300, rank), dtype=np.float32)
    pair = to_fp8(a, b)
    narrow_a, narrow_b = from_fp8(pair)
    exact = b.astype(np.float64) @ a
    lost = np.linalg.norm(exact - narrow_b @ narrow_a) / np.linalg.norm(exact)
    assert relative_error(a, b, pair) == pytest.approx(lost, rel=1e-6)
    assert 0.02 < lost < 0.06


def test_each_rank_row_has_a_factor_of_its_own():
    rng = np.random.default_rng(0)
    sizes = np.array([1e-6, 1.0, 3e4], dtype=np.float32)
    a, b = rng.standard_normal((3, 64), dtype=np.float32) * sizes[:, None], rng.standard_normal((96, 3), dtype=np.float32)
    narrow_a, narrow_b = from_fp8(to_fp8(a, b))
    for row in range(3):
        exact = np.outer(b[:, row].astype(np.float64), a[row])
        assert np.linalg.norm(exact - np.outer(narrow_b[:, row], narrow_a[row])) < 0.06 * np.linalg.norm(exact)


def test_zeros_stay_zeros():
    a, b = np.zeros((2, 16), np.float32), np.ones((16, 2), np.float32)
    assert relative_error(a, b, to_fp8(a, b)) == 0
    assert not from_fp8(to_fp8(a, b))[0].any()


def test_rank_rows_that_cancel_lose_more_than_each_of_them_does():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((1, 64), dtype=np.float32), rng.standard_normal((96, 1), dtype=np.float32)
    near = a + 0.01 * rng.standard_normal((1, 64), dtype=np.float32)
    a, b = np.concatenate([a, near]), np.concatenate([b, -b], axis=1)
    assert relative_error(a, b, to_fp8(a, b)) > 0.5


def test_a_pair_without_rank_rows_loses_nothing():
    a, b = np.empty((0, 16), np.float32), np.empty((16, 0), np.float32)
    assert relative_error(a, b, to_fp8(a, b)) == 0


def test_factors_take_whole_lines_in_front_of_a():
    assert [factor_bytes(rank) for rank in (1, 32, 33, 64)] == [128, 128, 256, 256]
