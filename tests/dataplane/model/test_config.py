"""Reading `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataplane.model.config import parse_config, read_config
from dataplane.model.rope import Llama3Scaling, Rope
from veneer.errors import InvalidArgumentError

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_both_spellings_of_the_rotary_parameters_mean_the_same() -> None:
    old = parse_config(FIELDS | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    new = parse_config(
        {k: v for k, v in FIELDS.items() if k != "rope_theta"}
        | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    )
    assert old == new
    assert old.layers[0].rope == Rope(5e5, 16, Llama3Scaling(8.0, 1.0, 4.0, 8192), 1.0, 256)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    ],
)
def test_what_this_code_does_not_compute_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        parse_config(FIELDS | change)


def test_every_fault_is_listed() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_config(FIELDS | {"attention_bias": True, "mlp_bias": True, "vocab_size": 0})
    assert len(caught.value.violations) == 3


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"config\.json"):
        read_config(tmp_path)


def test_the_head_width_follows_from_the_hidden_width(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    config = read_config(tmp_path)
    assert (config.head_dim, config.q_size, config.kv_size) == (16, 64, 32)
