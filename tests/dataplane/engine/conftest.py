"""A tiny random Llama, in a folder, as a plain full-recompute forward pass, and in engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.runner import model_features
from dataplane.lora.image import ImagePair, build_image
from dataplane.lora.image_file import write_image
from dataplane.model.architecture import Architecture
from dataplane.model.config import parse_config
from dataplane.model.decoder import weight_shapes
from tests.dataplane.engine.serving import Make
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
def tiny_config(tiny_dir: Path) -> Make:
    def make(**changes: object) -> EngineConfig:
        settings: dict[str, object] = {
            "model_dir": str(tiny_dir), "dtype": "float32", "num_threads": 1, "max_sequences": 8, "max_step_tokens": 32,
            "kv_bytes": 1 << 20, "arena_bytes": 1 << 20, "arena_unit_bytes": 4096, "max_slots": 4, "max_step_rank_rows": 256,
        }  # fmt: skip
        return EngineConfig(**(settings | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
async def started(tiny_config: Make) -> AsyncIterator[Callable[..., Any]]:
    clients: list[EngineClient] = []

    async def start(*, in_process: bool = True, **changes: Any) -> EngineClient:
        clients.append(await EngineClient.start(tiny_config(**changes), in_process=in_process))
        return clients[-1]

    yield start
    for client in clients:
        await client.stop()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, plain: Any) -> dict[str, Any]:
    """Three adapters of other ranks and modules: image paths, and the merged model of each."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(5)
    features = model_features(plain.config)
    names = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"]
    made: dict[str, Any] = {}
    for version, rank, slices in (("v1", 3, range(7)), ("v2", 16, (0, 2)), ("v3", 1, (6,))):
        pairs, weights = [], dict(plain.weights)
        for layer in range(plain.config.num_layers):
            for index in slices:
                a = generator.standard_normal((rank, features[index][0])).astype(np.float32) * 0.3
                b = generator.standard_normal((features[index][1], rank)).astype(np.float32) * 0.3
                pairs.append(ImagePair(layer, index, 0.5, a, b))
                name = f"model.layers.{layer}.{names[index]}_proj.weight"
                weights[name] = weights[name] + 0.5 * torch.from_numpy(b @ a)
        image = build_image(
            pairs, version=version, base_digest="base", dtype="float32", num_layers=plain.config.num_layers, num_slices=7
        )
        write_image(folder / version, image)
        made[version] = (folder / version, type(plain)(plain.config, weights))
    return made
