"""Packed products against float64."""

from __future__ import annotations

import pytest
import torch

from dataplane.model.linear import pack_linear


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
