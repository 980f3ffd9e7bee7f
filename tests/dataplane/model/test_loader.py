"""Loading a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv, TorchAttention
from dataplane.model.batch import Batch, Chunk
from dataplane.model.config import parse_config
from dataplane.model.decoder import Decoder, weight_bytes, weight_shapes
from dataplane.model.families import FAMILIES
from dataplane.model.loader import load_decoder
from dataplane.model.stack import NoLowRank
from veneer.errors import InvalidArgumentError

FIELDS = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 20, "max_position_embeddings": 64,
}  # fmt: skip
CPU = torch.device("cpu")
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
    torch.testing.assert_close(model.stack.layers[1].qkv(x), qkv)
    torch.testing.assert_close(model.stack.layers[1].gate_up(x), gate_up)
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


def test_only_the_files_of_the_index_are_read(tmp_path: Path) -> None:
    tensors = weights(CONFIG)
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"layers\.0\.attention\.wq\.weight: is not a tensor of this model"):
        load(tmp_path, CONFIG)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, held in files.items() for name in held}}))
    torch.testing.assert_close(load(tmp_path, CONFIG).norm, tensors["model.norm.weight"])
    for text in ("{", "[]", '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(InvalidArgumentError, match=r"index\.json"):
            load(tmp_path, CONFIG)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    tensors = weights(CONFIG)
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "b.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"model\.norm\.weight: is in b\.safetensors and in another file"):
        load(tmp_path, CONFIG)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_a_short_dtype_says_nearly_what_it_says_in_float32(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    form = parse_config(FIELDS | {"architectures": [name], "head_dim": 16, "sliding_window": 3, "query_pre_attn_scalar": 16})
    generator = torch.Generator().manual_seed(3)
    tensors = {
        part: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 0.2)
        for part, shape in weight_shapes(form).items()
    }
    save_file({part: tensor.to(dtype) for part, tensor in tensors.items()}, tmp_path / "model.safetensors")
    logits = {}
    for own in (torch.float32, dtype):
        model = load_decoder(tmp_path, form, max_context=64, dtype=own, device=CPU)
        kv = PagedKv(form, num_pages=3, page_size=4, dtype=own, device=CPU)
        positions = torch.arange(8)
        pages = torch.tensor([1, 2])
        kv_rows = pages[positions // 4] * kv.rows_per_page + positions % 4
        none = torch.empty(0, dtype=torch.int64)
        chunks = (Chunk(0, 8, 0, pages),)
        batch = Batch(positions + 3, positions, kv_rows, 0, none, none.view(0, 0), chunks, None)
        logits[own] = model.forward(batch, TorchAttention(form, kv), NoLowRank())
        assert logits[own].dtype is own
    error = (logits[dtype].float() - logits[torch.float32]).norm() / logits[torch.float32].norm()
    assert error < (0.05 if dtype is torch.bfloat16 else 0.01)
