"""Loading a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dataplane.model.architecture import Architecture
from dataplane.model.config import parse_config
from dataplane.model.decoder import Decoder, weight_bytes, weight_shapes
from dataplane.model.loader import load_decoder
from veneer.errors import InvalidArgumentError

FIELDS = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 20, "max_position_embeddings": 64,
}  # fmt: skip
CONFIG = parse_config(FIELDS)
TIED = parse_config(FIELDS | {"tie_word_embeddings": True})


def weights(config: Architecture) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in weight_shapes(config).items()}


def load(folder: Path, config: Architecture) -> Decoder:
    return load_decoder(folder, config, max_context=64, dtype=torch.float32, device=torch.device("cpu"))


def test_projections_of_a_site_are_fused_in_order(tmp_path: Path) -> None:
    tensors = weights(CONFIG)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:7]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[7:]}, tmp_path / "model-00002-of-00002.safetensors")
    model = load(tmp_path, CONFIG)
    x, p = torch.randn(3, 32), "model.layers.1."
    qkv = torch.cat([x @ tensors[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv"], -1)
    gate_up = torch.cat([x @ tensors[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up")], -1)
    torch.testing.assert_close(model.layers[1].qkv(x), qkv)
    torch.testing.assert_close(model.layers[1].gate_up(x), gate_up)
    torch.testing.assert_close(model.head(x), x @ tensors["lm_head.weight"].T)


def test_a_tied_head_is_the_embedding_even_when_the_file_repeats_it(tmp_path: Path) -> None:
    tensors = weights(TIED)
    save_file(tensors | {"lm_head.weight": torch.zeros(20, 32)}, tmp_path / "model.safetensors")
    x = torch.randn(3, 32)
    torch.testing.assert_close(load(tmp_path, TIED).head(x), x @ tensors["model.embed_tokens.weight"].T)


def test_every_missing_unknown_and_misshapen_tensor_is_listed(tmp_path: Path) -> None:
    tensors = weights(CONFIG)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(47, 32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgumentError) as caught:
        load(tmp_path, CONFIG)
    assert [violation.field for violation in caught.value.violations] == [
        "model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias",
    ]  # fmt: skip


def test_a_folder_without_weights_or_with_a_damaged_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="safetensors"):
        load(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04 not tensors")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        load(tmp_path, CONFIG)


def test_weight_bytes_counts_what_is_loaded() -> None:
    elements = sum(tensor.numel() for tensor in weights(CONFIG).values())
    assert weight_bytes(CONFIG, torch.bfloat16) == 2 * elements
