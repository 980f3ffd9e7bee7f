"""The models that benchmarks run: SmolLM2-135M, and two layers with the shapes of a model of seven billion parameters."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from demo.prepare import default_folder
from veneer.artifact import BaseDescription

_NAME = "random-7b-shapes-2-layers"


def prepare_7b_shapes(folder: Path | None = None) -> Path:
    """Writes the random model once, 0.8 GB in bfloat16; returns its folder.

    The vocabulary is small, so that the head's share of a step is that of a whole model of 32 layers.

    Args:
        folder: Where it shall lie; None means beside the demonstration's model.
    """
    target = folder or default_folder().with_name(_NAME)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_random_llama(scratch, hidden=4096, mlp=11_008, heads=32, layers=2, vocab=4096)
        scratch.rename(target)
    except OSError:
        if not target.exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def write_random_llama(folder: Path, *, hidden: int, mlp: int, heads: int, layers: int, vocab: int) -> None:
    """Writes a Llama of random weights in bfloat16, without grouped heads, with a tied head and a tokenizer of numbered words."""
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).mul_(columns**-0.5).bfloat16()

    norm = torch.ones(hidden).bfloat16()
    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": norm}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        tensors |= {f"{stem}.self_attn.{name}_proj.weight": matrix(hidden, hidden) for name in "qkvo"}
        tensors |= {f"{stem}.mlp.{name}_proj.weight": matrix(mlp, hidden) for name in ("gate", "up")}
        tensors[f"{stem}.mlp.down_proj.weight"] = matrix(hidden, mlp)
        tensors |= {f"{stem}.{name}_layernorm.weight": norm.clone() for name in ("input", "post_attention")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": vocab,
        "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    words = {f"w{index}": index for index in range(vocab)}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def adapter_bytes(base: BaseDescription, *, rank: int) -> int:
    """Returns the bytes of an adapter on all modules of all layers, in bfloat16."""
    return 2 * rank * base.num_layers * sum(module.in_features + module.out_features for module in base.modules)
