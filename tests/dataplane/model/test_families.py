"""What each family replaces of Llama, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.model.architecture import Architecture, LayerForm
from dataplane.model.config import parse_config
from dataplane.model.families import FAMILIES
from dataplane.model.rope import FreeScaling, LinearScaling, Rope, YarnScaling
from veneer.artifact.families import FAMILIES as CATALOGUE
from veneer.errors import InvalidArgumentError

SHAPES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 4, "vocab_size": 160, "max_position_embeddings": 64,
}  # fmt: skip


def read(name: str, **fields: Any) -> Architecture:
    return parse_config({"architectures": [f"{name}ForCausalLM"], **SHAPES, **fields})


def windows(form: Architecture) -> list[int | None]:
    return [layer.window for layer in form.layers]


def rope(form: Architecture, layer: int = 0) -> Rope:
    found = form.layers[layer].rope
    assert found is not None
    return found


def test_catalogue_and_engine_know_the_same_families() -> None:
    assert {key: family.name for key, family in FAMILIES.items()} == {key: family.name for key, family in CATALOGUE.items()}


def test_a_field_that_is_left_out_means_what_transformers_takes() -> None:
    assert windows(read("Llama", sliding_window=7)) == [None] * 4
    assert windows(read("Mistral")) == [4096] * 4
    assert windows(read("Phi3")) == windows(read("Qwen2")) == [None] * 4
    assert (rope(read("SmolLM3")).theta, rope(read("Qwen3")).theta) == (2e6, 1e4)
    assert [read(name).norm_eps for name in ("Llama", "Phi3")] == [1e-6, 1e-5]
    assert [read(name).tied for name in ("Llama", "Qwen3", "SmolLM3", "Gemma2")] == [False, False, True, True]
    gemma = read("Gemma2")
    assert (gemma.attention_softcap, gemma.logit_softcap, gemma.attention_scale) == (50.0, 30.0, 1 / 16)
    without = read("Gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (without.attention_softcap, without.logit_softcap) == (None, None)


def test_layers_slide_and_turn_as_the_family_has_it() -> None:
    assert windows(read("Mistral", sliding_window=5)) == [5] * 4
    assert windows(read("Mistral", sliding_window=None)) == [None] * 4
    assert windows(read("Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=3)) == [None, None, None, 5]
    assert windows(read("Qwen2", use_sliding_window=False, sliding_window=5, max_window_layers=0)) == [None] * 4
    assert windows(read("Gemma2", sliding_window=5)) == [5, None, 5, None]
    assert windows(read("Gemma3", sliding_window=5, sliding_window_pattern=3)) == [5, 5, None, 5]
    mixed = ["full_attention", "sliding_attention"] * 2
    assert windows(read("Qwen3", use_sliding_window=True, sliding_window=5, layer_types=mixed)) == [None, 5, None, 5]
    assert [layer.rope is None for layer in read("SmolLM3").layers] == [False, False, False, True]
    smol = read("SmolLM3", no_rope_layers=[0, 1, 1, 0], use_sliding_window=True, sliding_window=5)
    turned = LayerForm(rope(smol, 1))
    assert smol.layers == (LayerForm(None, 5), turned, turned, LayerForm(None, 5))


def test_gemma3_has_positions_of_its_own_in_layers_that_slide_in_both_spellings() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    old = read(
        "Gemma3",
        layer_types=kinds,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8},
    )
    new = read(
        "Gemma3",
        layer_types=kinds,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        },
    )
    assert old == new
    assert rope(old, 0) == rope(old, 2) == Rope(2e4, 16, None, 1.0, 64)
    assert rope(old, 1) == Rope(5e5, 16, LinearScaling(8.0), 1.0, 64)


def test_a_fused_checkpoint_has_one_slice_for_each_tensor() -> None:
    assert [(part.path, part.site, part.in_features, part.out_features) for part in read("Phi3").projections] == [
        ("self_attn.qkv_proj", "qkv", 64, 128),
        ("self_attn.o_proj", "o", 64, 64),
        ("mlp.gate_up_proj", "gate_up", 64, 192),
        ("mlp.down_proj", "down", 96, 64),
    ]


def test_the_context_is_what_can_be_computed_exactly() -> None:
    def context(name: str = "Llama", original: int | None = None, **parameters: Any) -> int:
        if original is not None:
            parameters["original_max_position_embeddings"] = original
        return read(name, rope_scaling=parameters).max_context

    assert context(rope_type="dynamic", factor=4.0) == 64
    assert context(rope_type="linear", factor=4.0) == 64
    assert context(rope_type="yarn", factor=4.0, original=32) == 128
    assert context(rope_type="yarn", factor=4.0, original=8) == 64
    assert context(rope_type="yarn", factor=4.0) == 64
    assert context("Phi3", type="su", original=16, short_factor=[1.0] * 8) == 16


def test_yarn_and_longrope_scale_cosines_and_sines() -> None:
    yarn = rope(read("Llama", rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}))
    assert yarn.scaling == YarnScaling(4.0, 16, 32.0, 1.0, truncate=True)
    assert yarn.magnitude == pytest.approx(1.1386, abs=1e-4)
    fields = {"rope_type": "longrope", "short_factor": [2] * 4, "partial_rotary_factor": 0.5}
    long = rope(read("Phi3", rope_scaling=fields, original_max_position_embeddings=16))
    assert (long.scaling, long.width) == (FreeScaling((2.0,) * 4), 8)
    assert long.magnitude == pytest.approx(1.5**0.5)


@pytest.mark.parametrize(
    ("name", "fields", "fault"),
    [
        ("Mixtral", {}, "architectures: must be one of LlamaForCausalLM, "),
        ("Qwen3", {"attention_bias": True}, "attention_bias"),
        ("Mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 4}, "sliding_window: must be given"),
        ("Qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types: must be a list of 4"),
        ("Qwen3", {"layer_types": ["chunked_attention"] * 4}, "layer_types: must hold"),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": -1}, "sliding_window"),
        ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: must be 1"),
        ("Llama", {"rope_parameters": {"full_attention": {}}}, "rope_parameters: must be one set"),
        ("Llama", {"rope_theta": 1.0}, "rope_theta: must be more than 1"),
        ("Llama", {"rope_scaling": [4.0]}, "rope_scaling: must be an object"),
        ("Phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' is not supported in this family"),
        ("Phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ("Phi3", {"partial_rotary_factor": 0.3, "head_dim": 10}, "head_dim: must be even"),
        ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("Gemma2", {"sliding_window": None}, "sliding_window: must be given"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("Gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: must hold one set"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name: str, fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidArgumentError, match=fault):
        read(name, **fields)
