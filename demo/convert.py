"""A Llama model in a GGUF file, rewritten as a Hugging Face folder.

Only what SmolLM2 needs: tied embeddings, no biases, a byte-level BPE tokenizer whose pre-tokenizer is called `smollm`. Anything
else is refused, so that a changed file never becomes a model that talks nonsense.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_CONTROL_TOKEN = 3
"""Value of `tokenizer.ggml.token_type` for tokens that text never becomes, such as `<|im_end|>`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the header of the file says about the model; all counts, widths in elements."""

    num_layers: int
    num_heads: int
    num_key_value_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    rope_theta: float
    norm_epsilon: float

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


def convert(source: Path, folder: Path) -> None:
    """Writes config, weights (bfloat16), tokenizer and chat template of `source` into `folder`, which must exist.

    Equal input gives equal bytes, so that everybody's base model has the same digest.

    Args:
        source: The GGUF file.
        folder: Where the files go.

    Raises:
        ValueError: The file is not the kind of model that this module understands.
    """
    reader = GGUFReader(source)
    shape = _read_shape(reader)
    weights = folder / "model.safetensors"
    save_file(dict(_tensors(reader, shape)), weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    _tokenizer(reader).save(str(folder / "tokenizer.json"))
    for name, content in _descriptions(reader, shape).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def to_rotated_halves(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undoes the row order that GGUF gives to q and k.

    GGUF pairs rotary dimensions as neighbours (0, 1), (2, 3) …; a Hugging Face model pairs d with d + head_dim / 2.

    Args:
        weight: float32 [num_heads * head_dim, in], rows as GGUF orders them.
        num_heads: Heads of this projection.

    Returns:
        The same rows, head by head, first halves of all pairs before the second halves; a copy.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3).reshape(rows, columns))


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the GGUF file has no field {name}")
    return field.contents()


def _read_shape(reader: GGUFReader) -> Shape:
    for name, expected in {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }.items():
        if (found := _field(reader, name)) != expected:
            raise ValueError(f"{name} is {found!r}, and only {expected!r} is understood")
    shape = Shape(
        num_layers=_field(reader, "llama.block_count"),
        num_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        vocab_size=_field(reader, "llama.vocab_size"),
        max_context=_field(reader, "llama.context_length"),
        rope_theta=_field(reader, "llama.rope.freq_base"),
        norm_epsilon=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
    )
    if (rotary := _field(reader, "llama.rope.dimension_count")) != shape.head_dim:
        raise ValueError(f"llama.rope.dimension_count is {rotary}, and only whole heads of {shape.head_dim} are understood")
    return shape


def _tensors(reader: GGUFReader, shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name = _TOP_NAMES.get(tensor.name)
        if name is None:
            block, layer, part, kind = (*tensor.name.split("."), "", "", "")[:4]
            if block != "blk" or part not in _LAYER_NAMES or kind != "weight":
                raise ValueError(f"tensor {tensor.name} has no place in a Llama model with tied embeddings and no biases")
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
            if part == "attn_q":
                values = to_rotated_halves(values, shape.num_heads)
            elif part == "attn_k":
                values = to_rotated_halves(values, shape.num_key_value_heads)
        yield name, torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in _field(reader, "tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _special_tokens(reader)])
    return tokenizer


def _special_tokens(reader: GGUFReader) -> list[str]:
    kinds = _field(reader, "tokenizer.ggml.token_type")
    return [token for token, kind in zip(_field(reader, "tokenizer.ggml.tokens"), kinds, strict=True) if kind == _CONTROL_TOKEN]


def _descriptions(reader: GGUFReader, shape: Shape) -> dict[str, dict[str, Any]]:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    ids = {
        kind: _field(reader, f"tokenizer.ggml.{name}_token_id")
        for kind, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    numbers = {f"{kind}_token_id": index for kind, index in ids.items()}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": shape.intermediate_size,
            "max_position_embeddings": shape.max_context,
            "mlp_bias": False,
            "num_attention_heads": shape.num_heads,
            "num_hidden_layers": shape.num_layers,
            "num_key_value_heads": shape.num_key_value_heads,
            "rms_norm_eps": shape.norm_epsilon,
            "rope_scaling": None,
            "rope_theta": shape.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": shape.vocab_size,
            **numbers,
        },
        "generation_config.json": {"_from_model_config": True, **numbers},
        "tokenizer_config.json": {
            "add_bos_token": False,
            "add_prefix_space": False,
            "additional_special_tokens": _special_tokens(reader),
            "chat_template": _field(reader, "tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_context,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
            **{f"{kind}_token": tokens[index] for kind, index in ids.items()},
        },
    }
