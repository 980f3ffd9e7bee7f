"""Packed products against float64."""

from __future__ import annotations

import pytest
import torch

from dataplane.model.linear import NativeLinear, pack_linear
from kernels.native import INSTRUCTION_SETS, InstructionSet, load_native, processor_features

AVAILABLE = [one for one in INSTRUCTION_SETS if one.needs <= processor_features()]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 130])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (33, 17), (960, 576)])
def test_a_packed_product_is_the_product_at_any_row_count(
    dtype: torch.dtype, tolerance: float, rows: int, out_features: int, in_features: int
) -> None:
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    x = torch.randn(rows, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype)
    exact = x.double() @ weight.double().T
    with torch.inference_mode():
        y, biased = pack_linear(weight)(x), pack_linear(weight, bias)(x)
    assert y.dtype is biased.dtype is dtype
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=2 * tolerance)
    torch.testing.assert_close(biased.double(), exact + bias.double(), rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 11, 64, 130, 500])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (33, 18), (64, 2), (130, 1600), (70, 3200)])
def test_a_native_product_is_the_product_at_any_row_count(
    dtype: torch.dtype, tolerance: float, rows: int, out_features: int, in_features: int
) -> None:
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    x = torch.randn(rows, in_features + 8).to(dtype)[:, :in_features]
    bias = torch.randn(out_features).to(dtype)
    exact = x.double() @ weight.double().T
    y, biased = NativeLinear(weight, load_native())(x), NativeLinear(weight, load_native(), bias)(x)
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=2 * tolerance)
    torch.testing.assert_close(biased.double(), exact + bias.double(), rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("instruction_set", AVAILABLE, ids=lambda one: one.name)
def test_every_instruction_set_multiplies(instruction_set: InstructionSet) -> None:
    weight, x = torch.randn(70, 66).bfloat16(), torch.randn(13, 66).bfloat16()
    y = NativeLinear(weight, load_native(instruction_set))(x)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("in_features", [576, 3200])
def test_a_row_of_a_native_product_keeps_its_bits_whatever_is_computed_beside_it(in_features: int) -> None:
    product = NativeLinear(torch.randn(130, in_features).bfloat16(), load_native())
    x = torch.randn(700, in_features).bfloat16()
    whole = product(x)
    for first, last in ((0, 1), (3, 10), (100, 164), (699, 700)):
        assert torch.equal(product(x[first:last]), whole[first:last])
