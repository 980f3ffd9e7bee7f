"""Ranks and scaling of adapters that PEFT itself made and saved, against what PEFT uses for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from veneer.artifact import BaseDescription, check
from veneer.artifact.keys import KeyMap

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore::FutureWarning")]

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"], "r": 3},
    "rslora": {"target_modules": ["k_proj", "o_proj"], "r": 16, "use_rslora": True, "lora_alpha": 2.5},
    "all linear": {"target_modules": "all-linear", "r": 2},
    "expression": {"target_modules": r".*\.layers\.1\..*(gate|up)_proj", "r": 5},
    "some layers": {"target_modules": ["q_proj"], "layers_to_transform": [1], "r": 4},
    "patterns by name": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"q_proj": 5, "down_proj": 1},
        "alpha_pattern": {"v_proj": 100},
    },
    "patterns by path": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 2, "layers.1.self_attn.q_proj": 7},
        "alpha_pattern": {"^model.layers.1.self_attn.v_proj": 3, r"layers\.\d\.self_attn\..*": 9},
    },
    "first pattern wins": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {r".*\.(q|v)_proj": 6, "q_proj": 4},
        "use_rslora": True,
    },
    "activated": {"target_modules": ["q_proj", "v_proj"], "r": 4, "alora_invocation_tokens": [3, 1, 4]},
    "gaussian start": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_ranks_scaling_and_values_are_those_of_peft(config: dict[str, Any], tmp_path: Path, tiny_base: BaseDescription) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
    }
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**shape, vocab_size=32)), LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    artifact = check((tmp_path / "adapter_config.json").read_bytes(), weights, tiny_base)
    assert artifact.report.warnings == ()
    assert artifact.report.invocation_tokens == tuple(model.peft_config["default"].alora_invocation_tokens or ())
    paths = KeyMap(tiny_base).paths(has_head=True)
    adapted = {path for path in paths if hasattr(model.get_submodule(f"base_model.model.{path}"), "lora_A")}
    assert len(artifact.pairs) == len(adapted)
    for pair, a, b in artifact.read(weights):
        path = tiny_base.modules[pair.slice].path.format(layer=pair.layer)
        module = model.get_submodule(f"base_model.model.{path}")
        assert path in adapted
        assert (pair.rank, pair.scaling) == (module.r["default"], module.scaling["default"])
        np.testing.assert_array_equal(a, module.lora_A["default"].weight.detach().numpy())
        np.testing.assert_array_equal(b, module.lora_B["default"].weight.detach().numpy())
