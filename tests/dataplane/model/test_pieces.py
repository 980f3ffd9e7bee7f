"""The native pieces of a layer against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dataplane.model.layers import gelu_tanh_mul, rms_norm, rotate, silu_mul, softcap
from dataplane.model.pieces import NativePieces, Pieces, TorchPieces
from kernels.native import INSTRUCTION_SETS, load_native, processor_features

AVAILABLE = [one for one in INSTRUCTION_SETS if one.needs <= processor_features()]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
Make = Callable[[torch.dtype], NativePieces]


@pytest.fixture(params=AVAILABLE, ids=lambda one: one.name)
def make(request: pytest.FixtureRequest) -> Make:
    return lambda dtype: NativePieces(load_native(request.param), dtype)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [16, 37, 576])
@pytest.mark.parametrize("rows", [1, 9])
def test_add_norm_adds_in_place_and_norms_the_rounded_sum(make: Make, rows: int, width: int, dtype: torch.dtype) -> None:
    x, y, weight = (torch.randn(shape).to(dtype) for shape in ((rows, width), (rows, width), (width,)))
    added = x.clone()
    out = make(dtype).add_norm(added, y, weight, 1e-5)
    assert torch.equal(added, x + y)
    wide = added.double()
    check(out, wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    assert torch.equal(make(dtype).add_norm(added, None, weight, 1e-5), out)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_rotate_turns_the_heads_it_is_given_and_no_others(make: Make, dim: int, dtype: torch.dtype) -> None:
    heads, cos, sin = (
        torch.randn(9, 5, dim).to(dtype),
        torch.randn(9, 1, dim // 2).to(dtype),
        torch.randn(9, 1, dim // 2).to(dtype),
    )
    before = heads.clone()
    check(make(dtype).rotate(heads[:, :3], cos, sin), rotate(before[:, :3].double(), cos.double(), sin.double()))
    assert torch.equal(heads[:, 3:], before[:, 3:])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotate_leaves_what_of_a_head_does_not_turn(make: Make, dtype: torch.dtype) -> None:
    heads, cos, sin = torch.randn(9, 5, 48).to(dtype), torch.randn(9, 1, 12).to(dtype), torch.randn(9, 1, 12).to(dtype)
    before = heads.clone()
    check(make(dtype).rotate(heads, cos, sin), rotate(before.double(), cos.double(), sin.double()))
    assert torch.equal(heads[..., 24:], before[..., 24:])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("wide", [False, True])
def test_norm_takes_heads_that_lie_in_wider_rows_and_float32_weights(make: Make, wide: bool, dtype: torch.dtype) -> None:
    heads = torch.randn(9, 7, 40).to(dtype)
    weight = torch.randn(5, 40).to(torch.float32 if wide else dtype)
    before = heads.clone()
    check(make(dtype).norm(heads[:, :5], weight, 1e-6), rms_norm(heads[:, :5].double(), weight.double(), 1e-6))
    assert torch.equal(heads, before)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_capped_values_are_those_of_float64(make: Make, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 37) * 20).to(dtype)
    x[0, :6] = torch.tensor([1e-6, -0.01, 2.9, 3.1, 3e4, -3e4])
    want = softcap(x.double(), 30.0)
    got = make(dtype).softcap(x, 30.0)
    assert got.data_ptr() == x.data_ptr()
    torch.testing.assert_close(got.double(), want, rtol=2 * TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu_tanh_mul_is_that_of_float64(make: Make, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(5, 2 * 53) * 4).to(dtype)
    gate_up[0, :3] = torch.tensor([200.0, -200.0, 0.0])
    want = gelu_tanh_mul(gate_up.double())
    torch.testing.assert_close(make(dtype).gelu_tanh_mul(gate_up).double(), want, rtol=4 * TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [16, 53, 1536])
def test_silu_mul_is_that_of_float64(make: Make, width: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(5, 2 * width) * 4).to(dtype)
    gate_up[0, :3] = torch.tensor([200.0, -200.0, 0.0])
    want = silu_mul(gate_up.double())
    got = make(dtype).silu_mul(gate_up)
    torch.testing.assert_close(got.double(), want, rtol=4 * TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [16, 199])
def test_the_first_of_equal_largest_values_is_the_likeliest(make: Make, width: int, dtype: torch.dtype) -> None:
    logits = torch.randn(6, width).to(dtype)
    logits[1, 3] = logits[1, width - 1] = logits[1, 5] = 9.0
    logits[2, width - 1] = 9.0
    tokens, finite = make(dtype).likeliest(logits)
    assert torch.equal(tokens, TorchPieces().likeliest(logits)[0])
    assert tokens[1:3].tolist() == [3, width - 1]
    assert finite.tolist() == [True] * 6


@pytest.mark.parametrize("place", [0, 150, 198])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_seen_alone(make: Make, value: float, place: int) -> None:
    logits = torch.randn(3, 199)
    logits[1, place] = value
    native: Pieces = make(torch.float32)
    for pieces in (native, TorchPieces()):
        assert pieces.likeliest(logits)[1].tolist() == [True, False, True]


def test_a_row_without_any_token_left_is_not_finite(make: Make) -> None:
    assert make(torch.float32).likeliest(torch.full((1, 33), -torch.inf))[1].tolist() == [False]


def test_not_a_number_stays_one(make: Make) -> None:
    pieces = make(torch.bfloat16)
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    x[1, 7] = torch.nan
    assert pieces.add_norm(x, None, torch.ones(32).bfloat16(), 1e-5).isnan().all(1).tolist() == [False, True]
    assert pieces.silu_mul(x)[1].isnan().sum() == 1
