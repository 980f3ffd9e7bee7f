"""A tiny random Llama, in a folder and as a plain full-recompute forward pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from dataplane.engine.config import EngineConfig
from dataplane.model.architecture import Architecture
from dataplane.model.config import parse_config
from dataplane.model.decoder import weight_shapes
from tests.dataplane.frontend.conftest import train_byte_level

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

EOS = 0
SPOKEN_VOCAB = 512


class PlainLlama:
    """The model written down naively: one sequence, no cache, no fusion, float32."""

    def __init__(self, config: Architecture, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = weights

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Returns logits at every position, [tokens, vocab]."""
        c, w = self.config, self.weights
        n, half = len(tokens), c.head_dim // 2
        angle = torch.arange(n)[:, None] * c.layers[0].rope.theta ** (-torch.arange(half) / half)
        x = w["model.embed_tokens.weight"][tokens]
        for i in range(c.num_layers):
            p = f"model.layers.{i}."
            h = self._norm(x, w[p + "input_layernorm.weight"])
            q, k, v = (h @ w[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv")
            q = self._turn(q.view(n, -1, c.head_dim), angle)
            k = self._turn(k.view(n, -1, c.head_dim), angle)
            v = v.view(n, -1, c.head_dim)
            repeat = c.num_heads // c.num_kv_heads
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / c.head_dim**0.5
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
            o = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
            x = x + o @ w[p + "self_attn.o_proj.weight"].T
            h = self._norm(x, w[p + "post_attention_layernorm.weight"])
            gate, up = (h @ w[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        return self._norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Returns the tokens of a greedy run that recomputes everything each time."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * weight

    @staticmethod
    def _turn(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.fixture(scope="session")
def tiny_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 0.1) + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in weight_shapes(parse_config(FIELDS)).items()
    }


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory, tiny_weights: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(FIELDS))
    save_file(tiny_weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def spoken_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer, for what needs text."""
    folder = tmp_path_factory.mktemp("spoken-llama")
    fields = FIELDS | {"vocab_size": SPOKEN_VOCAB, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(1)
    shapes = weight_shapes(parse_config(fields))
    save_file(
        {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    train_byte_level().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def plain(tiny_weights: dict[str, torch.Tensor]) -> PlainLlama:
    return PlainLlama(parse_config(FIELDS), tiny_weights)


@pytest.fixture(scope="session")
def tiny_config(tiny_dir: Path) -> Callable[..., EngineConfig]:
    def make(**changes: object) -> EngineConfig:
        settings: dict[str, object] = {
            "model_dir": str(tiny_dir), "dtype": "float32", "num_threads": 1, "max_sequences": 8, "max_step_tokens": 32,
            "kv_bytes": 1 << 20, "arena_bytes": 1 << 20, "arena_unit_bytes": 4096, "max_slots": 4, "max_step_rank_rows": 256,
        }  # fmt: skip
        return EngineConfig(**(settings | changes))  # type: ignore[arg-type]

    return make
