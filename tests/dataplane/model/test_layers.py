"""Layers against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from dataplane.model.config import parse_config
from dataplane.model.layers import Rotary, gelu_tanh_mul, rms_norm, rotary_frequencies, rotate, silu_mul, softcap
from dataplane.model.rope import Rope

FIELDS = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 1, "vocab_size": 10, "max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def rope(scaling: dict[str, object] | None = None) -> Rope:
    own = parse_config(FIELDS | {"rope_scaling": scaling}).layers[0].rope
    assert own is not None
    return own


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_layers_follow_their_formulas_in_each_dtype(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.rand(64).to(dtype)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, rtol=tolerance, atol=tolerance)
    gate, up = x.double().chunk(2, -1)
    exact = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_mul(x).double(), exact, rtol=2 * tolerance, atol=2 * tolerance)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    exact = gate * (1 + inner.tanh()) / 2 * up
    torch.testing.assert_close(gelu_tanh_mul(x).double(), exact, rtol=2 * tolerance, atol=2 * tolerance)
    exact = 1.5 * (x.double() / 1.5).tanh()
    torch.testing.assert_close(softcap(x.clone(), 1.5).double(), exact, rtol=2 * tolerance, atol=2 * tolerance)


def test_each_head_is_normed_with_a_weight_of_its_own() -> None:
    x, weight = torch.randn(5, 6, 16), torch.rand(6, 16)
    exact = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x[:, :6], weight, 1e-5), exact)


@pytest.mark.parametrize("shape", [(64,), (4, 16)])
def test_a_float32_weight_is_not_rounded_before_it_is_used(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(5, *shape).bfloat16(), 1 + torch.rand(shape) / 1000  # less than bfloat16 tells from 1
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, rms_norm(x.float(), weight, 1e-5).bfloat16(), rtol=0, atol=0)


def test_what_does_not_turn_stays_as_it_is() -> None:
    heads, angle = torch.randn(5, 4, 16), torch.randn(5, 1, 3)
    turned = rotate(heads, angle.cos(), angle.sin())
    torch.testing.assert_close(turned[..., 6:], heads[..., 6:], rtol=0, atol=0)
    torch.testing.assert_close(turned[..., :6], rotate(heads[..., :6], angle.cos(), angle.sin()))
    assert not torch.allclose(turned[..., :6], heads[..., :6])


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    rotary = Rotary(rope(), max_context=64, dtype=torch.float32, device=torch.device("cpu"))
    q, k = torch.randn(1, 4, 16), torch.randn(1, 4, 16)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, *rotary.at(torch.tensor([position])))

    torch.testing.assert_close(turned(q, 0), q)
    torch.testing.assert_close(turned(q, 17).norm(dim=-1), q.norm(dim=-1))
    near, far = (turned(q, 5) * turned(k, 2)).sum(-1), (turned(q, 45) * turned(k, 42)).sum(-1)
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(near, (turned(q, 5) * turned(k, 3)).sum(-1), atol=1e-3)


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    plain, scaled = rotary_frequencies(rope()), rotary_frequencies(rope(LLAMA3))
    waves = 2 * math.pi / plain
    for wave, before, after in zip(waves.tolist(), plain.tolist(), scaled.tolist(), strict=True):
        if wave < 16:
            assert after == before
        elif wave > 64:
            assert after == pytest.approx(before / 8)
        else:
            share = (64 / wave - 1) / 3
            assert after == pytest.approx((1 - share) * before / 8 + share * before)
    assert any(16 <= wave <= 64 for wave in waves.tolist())


def test_linear_scaling_divides_every_frequency() -> None:
    torch.testing.assert_close(rotary_frequencies(rope({"rope_type": "linear", "factor": 8.0})), rotary_frequencies(rope()) / 8)


def test_yarn_keeps_what_turns_often_stretches_what_turns_seldom_and_ramps_between() -> None:
    own = rope({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 0.5})
    shares = rotary_frequencies(own) / rotary_frequencies(rope())
    turns = rotary_frequencies(rope()) * 64 / (2 * math.pi)
    for turned, share in zip(turns.tolist(), shares.tolist(), strict=True):
        if turned > 4 * 2:  # the ends of the ramp are whole dimensions
            assert share == pytest.approx(1)
        elif turned < 0.5 / 4:
            assert share == pytest.approx(1 / 8)
    assert (shares.diff() <= 1e-6).all()
    assert ((shares > 0.13) & (shares < 0.99)).any()
    table = Rotary(own, max_context=64, dtype=torch.float32, device=torch.device("cpu"))
    torch.testing.assert_close(table.cos**2 + table.sin**2, torch.full((64, 8), own.magnitude**2))
