"""The pieces of a layer beside float64, in the interpreter; everything around the outputs is NaN and stays so."""

from __future__ import annotations

import pytest
import torch

from dataplane.model.layers import gelu_tanh_mul, rms_norm, rotate, silu_mul, softcap
from dataplane.model.triton_pieces import TritonPieces

ROUNDOFF = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Of one rounding; the interpreter cuts off instead of rounding, and float32 sums have their own."""
DTYPES = list(ROUNDOFF)
PIECES = TritonPieces()

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # 1 / (1 + inf) is 0, as meant


def numbers(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(got, expected, dtype, times=1):
    bound = times * ROUNDOFF[dtype] * (expected.abs() + 1e-3)
    assert bool(((got.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 48), (5, 64), (3, 576)])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_add_norm_adds_in_place_and_norms_the_sum(dtype, rows, width, wide_weight):
    around = torch.full((rows + 2, width + 32), torch.nan, dtype=dtype)
    x = around[1:-1, 16:-16]
    x.copy_(numbers(rows, width, dtype=dtype, scale=3))
    y = numbers(rows, width, dtype=dtype, seed=1)
    weight = numbers(width, dtype=torch.float32 if wide_weight else dtype, seed=2)
    expected_sum = x.double() + y.double()
    out = PIECES.add_norm(x, y, weight, 1e-5)
    close(x, expected_sum, dtype)
    close(out, rms_norm(x.double(), weight.double(), 1e-5), dtype, times=2)
    x.fill_(torch.nan)
    assert bool(around.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_takes_heads_with_weights_of_their_own_in_a_strided_view(dtype):
    whole = numbers(3, 6, 32, dtype=dtype)
    heads, weight = whole[:, :4], numbers(4, 32, dtype=dtype, seed=2)
    out = PIECES.norm(heads, weight, 1e-6)
    assert out.shape == (3, 4, 32)
    close(out, rms_norm(heads.double(), weight.double(), 1e-6), dtype, times=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "half"), [(3, 32, 16), (5, 48, 24), (2, 64, 8)])
def test_rotate_turns_in_place_what_turns_and_nothing_else(dtype, heads, dim, half):
    whole = numbers(4, heads + 2, dim, dtype=dtype)
    before = whole.clone()
    angles = numbers(4, 1, half, dtype=torch.float32, seed=3)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    got = PIECES.rotate(whole[:, :heads], cos, sin)
    assert got.data_ptr() == whole.data_ptr()
    expected = rotate(before[:, :heads].double(), cos.double(), sin.double())
    bound = ROUNDOFF[dtype] * (before[:, :heads].double().abs().amax(-1, keepdim=True) * 2)
    assert bool(((got.double() - expected).abs() <= bound).all())
    assert torch.equal(whole[:, heads:], before[:, heads:])
    assert torch.equal(whole[:, :heads, 2 * half :], before[:, :heads, 2 * half :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [48, 1024, 1100])
@pytest.mark.parametrize(("name", "reference"), [("silu_mul", silu_mul), ("gelu_tanh_mul", gelu_tanh_mul)])
def test_gated_activations_follow_their_formula(dtype, width, name, reference):
    gate_up = numbers(3, 2 * width, dtype=dtype, scale=4)
    close(getattr(PIECES, name)(gate_up), reference(gate_up.double()), dtype, times=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_is_in_place_and_stays_below_its_cap(dtype):
    x = numbers(3, 700, dtype=dtype, scale=60)
    x[0, :3] = torch.tensor([1e4, -1e4, 0.0])
    expected = softcap(x.double(), 30.0)
    got = PIECES.softcap(x, 30.0)
    assert got.data_ptr() == x.data_ptr()
    bound = 2 * ROUNDOFF[dtype] * 30
    assert bool(((got.double() - expected).abs() <= bound).all())
    assert bool((got.abs() <= 30).all())


@pytest.mark.parametrize("piece", ["silu_mul", "gelu_tanh_mul", "softcap"])
def test_what_is_not_a_number_stays_so_and_harms_no_other_row(piece):
    x = numbers(3, 64, dtype=torch.float32)
    x[1, 5] = torch.nan
    got = PIECES.softcap(x, 30.0) if piece == "softcap" else getattr(PIECES, piece)(x)
    assert got.isnan().any(dim=1).tolist() == [False, True, False]


def test_a_rows_bits_do_not_depend_on_its_neighbours():
    x, weight = numbers(7, 96, dtype=torch.bfloat16), numbers(96, dtype=torch.bfloat16, seed=1)
    whole = PIECES.norm(x, weight, 1e-5)
    assert all(torch.equal(PIECES.norm(x[i : i + 1], weight, 1e-5)[0], whole[i]) for i in range(7))
