from __future__ import annotations

import pytest

from tests.fixtures.adapters import describe_llama
from veneer.artifact.keys import Key, KeyMap

BASE = describe_llama(num_layers=12)
KEYS = KeyMap(BASE)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
            Key("model.layers.0.self_attn.q_proj", 0, 0, "A", "", has_head=True),
        ),
        (
            "base_model.model.model.layers.11.mlp.down_proj.lora_B.default.weight",
            Key("model.layers.11.mlp.down_proj", 11, 6, "B", "default", has_head=True),
        ),
        (
            "base_model.model.layers.3.mlp.gate_proj.lora_A.lora.weight",
            Key("layers.3.mlp.gate_proj", 3, 4, "A", "lora", has_head=False),
        ),
        ("base_model.model.lm_head.lora_B.weight", Key("lm_head", 12, 1, "B", "", has_head=True)),
        ("base_model.model.embed_tokens.lora_embedding_A", Key("embed_tokens", 12, 0, "A", "", has_head=False)),
        ("base_model.model.model.embed_tokens.lora_embedding_B.me", Key("model.embed_tokens", 12, 0, "B", "me", has_head=True)),
    ],
)
def test_names_that_peft_writes_are_understood(name: str, key: Key) -> None:
    assert KEYS.parse(name) == key


def test_every_module_of_the_base_has_its_own_place() -> None:
    places = set()
    for path in KEYS.paths(has_head=True):
        key = KEYS.parse(f"base_model.model.{path}.lora_{'embedding_A' if 'embed' in path else 'A.weight'}")
        assert isinstance(key, Key)
        assert BASE.module_at(key.layer, key.slice).path.format(layer=key.layer) == path
        places.add((key.layer, key.slice))
    assert len(places) == 12 * 7 + 2
    assert KEYS.paths(has_head=True)[-2:] == ["model.embed_tokens", "lm_head"]
    assert KEYS.paths(has_head=False)[0] == "layers.0.self_attn.q_proj"


_STEM = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (f"{_STEM}.lora_typo.weight", "is not an A or B"),
        (f"{_STEM}.lora_A", "is not an A or B"),
        (f"{_STEM}.lora_A.a.b.weight", "is not an A or B"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "must begin with base_model.model."),
        ("base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight", "is not one of this base"),
        ("base_model.model.model.layers.12.self_attn.q_proj.lora_A.weight", "layers 0 to 11"),
        ("base_model.model.model.layers.01.self_attn.q_proj.lora_A.weight", "is not one of this base"),
        ("base_model.model.model.layers.1_0.self_attn.q_proj.lora_A.weight", "is not one of this base"),
        ("base_model.model.model.layers.-1.self_attn.q_proj.lora_A.weight", "is not one of this base"),
        ("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", "is not one of this base"),
        ("base_model.model.model.layers.0.feed_forward.gate_proj.lora_A.weight", "is not one of this base"),
        (f"{_STEM}.bias", "this base has no bias at 'model.layers.0.self_attn.q_proj'"),
        (f"{_STEM}.base_layer.bias", "this base has no bias"),
        ("base_model.model.model.layers.0.input_layernorm.bias", "is not one of this base"),
        (f"{_STEM}.lora_A.bias", "is not one of this base"),
        ("base_model.model.model.embed_tokens.lora_A.weight", "is not how PEFT writes a pair of embed_tokens"),
        ("base_model.model.lm_head.lora_embedding_A", "is not how PEFT writes a pair of lm_head"),
        ("base_model.model.lm_head.lora_magnitude_vector", "DoRA and biases are served in the layers only"),
        ("base_model.model.lm_head.lora_B.bias", "leave lm_head out of target_modules"),
        ("base_model.model.lm_head.bias", "this base has no bias at 'lm_head'"),
        ("base_model.model.lm_head.modules_to_save.weight", "modules_to_save"),
        ("base_model.model.model.embed_tokens.modules_to_save.default.weight", "modules_to_save"),
        ("base_model.model.model.norm.weight", "modules_to_save"),
        (f"{_STEM}.weight", "is not an A or B"),
        (f"{_STEM}.base_layer.weight", "is not an A or B"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "trainable_token_indices"),
        (f"{_STEM}.lora_E", "AdaLoRA"),
        (f"{_STEM}.ia3_l", "IA3"),
        ("base_model.vera_A", "VeRA"),
        (f"{_STEM}.hada_w1_a", "LoHa"),
        ("prompt_embeddings", "prompt tuning"),
    ],
)
def test_other_names_are_refused_and_the_feature_is_named(name: str, fault: str) -> None:
    found = KEYS.parse(name)
    assert isinstance(found, str)
    assert fault in found


@pytest.mark.parametrize("between", ["", ".base_layer"])
@pytest.mark.parametrize(("path", "index"), [("model.embed_tokens", 0), ("embed_tokens", 0), ("lm_head", 1)])
def test_a_copy_of_the_embedding_or_the_head_is_known_as_one(path: str, index: int, between: str) -> None:
    found = KEYS.parse(f"base_model.model.{path}{between}.weight")
    assert isinstance(found, Key)
    assert (found.part, found.slice) == ("copy", index)
