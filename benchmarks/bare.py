"""A bare decode loop: the fewest torch calls that compute the same tokens, with no engine around them.

It is the yardstick for the engine's own overhead: the same prepacked projections, dense attention over a cache that needs no page
table, the same low-rank products over one list of rank rows, the likeliest token; no scheduler, no sampling, no streams. All
sequences have the same length, so nothing is padded or masked that an engine would have to mask.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

SLICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Timing:
    """What one run took.

    Attributes:
        tokens_per_s: Generated tokens over the time of prefill and decode together.
        prefill_s: Time of the prefill.
        decode_step_s: Median time of one decode step.
    """

    tokens_per_s: float
    prefill_s: float
    decode_step_s: float


class _Packed:
    """One frozen projection, prepacked for its usual number of rows."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return y


@dataclass(frozen=True, slots=True)
class _Site:
    """Low-rank rows of all adapters at one projection: A `[slices * J, in]`, one B `[J, columns]` a slice."""

    a: Tensor
    b: tuple[Tensor, ...]
    columns: tuple[slice, ...]

    def add_(self, y: Tensor, x: Tensor, own: Tensor) -> None:
        h = F.linear(x, self.a).view(len(x), len(self.b), -1)
        h = torch.where(own[:, None, :], h, 0)
        for index, (b, columns) in enumerate(zip(self.b, self.columns, strict=True)):
            y[:, columns].addmm_(h[:, index], b)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one decoder layer."""

    norm: Tensor
    mlp_norm: Tensor
    sites: dict[str, _Packed]


def _layer(weights: dict[str, Tensor], index: int, rows: int) -> _Layer:
    prefix = f"model.layers.{index}."
    names = [f"{prefix}{'mlp' if name in SLICES[4:] else 'self_attn'}.{name}.weight" for name in SLICES]
    q, k, v, o, gate, up, down = (weights[name] for name in names)
    fused = {"qkv": torch.cat([q, k, v]), "o": o, "gate_up": torch.cat([gate, up]), "down": down}
    norm, mlp_norm = (weights[f"{prefix}{name}_layernorm.weight"] for name in ("input", "post_attention"))
    return _Layer(norm, mlp_norm, {name: _Packed(weight, rows) for name, weight in fused.items()})


class Bare:
    """Llama in a loop, for one fixed batch.

    Args:
        folder: Hugging Face folder of a model with tied embeddings.
        rows: Sequences in the batch.
        num_adapters: Adapters of `rank` on all seven modules, spread evenly over the sequences; 0 for the base alone.
        rank: Rank of every adapter.
    """

    def __init__(self, folder: Path, *, rows: int, num_adapters: int = 0, rank: int = 16) -> None:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self._rows = rows
        self._heads: int = config["num_attention_heads"]
        self._kv_heads: int = config["num_key_value_heads"]
        self._hidden: int = config["hidden_size"]
        self._mlp: int = config["intermediate_size"]
        self._head_dim = self._hidden // self._heads
        self._eps: float = config["rms_norm_eps"]
        theta = float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
        self._frequencies = theta ** (-torch.arange(0, self._head_dim, 2).float() / self._head_dim)
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = _Packed(self._embedding, rows)
        self._norm = weights["model.norm.weight"]
        self._layers = [_layer(weights, index, rows) for index in range(config["num_hidden_layers"])]
        self._num_adapters, self._rank = num_adapters, rank
        self._sites = [self._low_rank() for _ in self._layers] if num_adapters else []
        if num_adapters:
            owner = torch.arange(rows) % num_adapters
            self._own = owner[:, None] == torch.arange(num_adapters * rank) // rank

    def _low_rank(self) -> dict[str, _Site]:
        rows, kv = self._num_adapters * self._rank, self._kv_heads * self._head_dim

        def site(width: int, *columns: int) -> _Site:
            ends = torch.tensor(columns).cumsum(0).tolist()
            slices = tuple(slice(end - count, end) for end, count in zip(ends, columns, strict=True))
            matrices = tuple((torch.randn(rows, count) * 0.01).bfloat16() for count in columns)
            return _Site((torch.randn(len(columns) * rows, width) * 0.01).bfloat16(), matrices, slices)

        return {
            "qkv": site(self._hidden, self._hidden, kv, kv),
            "o": site(self._hidden, self._hidden),
            "gate_up": site(self._hidden, self._mlp, self._mlp),
            "down": site(self._mlp, self._hidden),
        }

    def run(self, prompts: Tensor, *, steps: int) -> Timing:
        """Generates `steps` tokens for prompts `[rows, length]` and says what it took."""
        with torch.inference_mode():
            start = time.perf_counter()
            length = prompts.shape[1]
            cache = torch.zeros(
                len(self._layers), 2, self._rows, self._kv_heads, length + steps, self._head_dim, dtype=torch.bfloat16
            )
            tokens = self._step(prompts, 0, cache)
            prefill = time.perf_counter() - start
            taken = []
            for step in range(steps - 1):
                before = time.perf_counter()
                tokens = self._step(tokens[:, None], length + step, cache)
                taken.append(time.perf_counter() - before)
            total = time.perf_counter() - start
        return Timing(self._rows * steps / total, prefill, sorted(taken)[len(taken) // 2])

    def _step(self, ids: Tensor, position: int, cache: Tensor) -> Tensor:
        rows, length = ids.shape
        angles = torch.arange(position, position + length).float()[:, None] * self._frequencies
        cos, sin = angles.cos().repeat(1, 2).bfloat16(), angles.sin().repeat(1, 2).bfloat16()
        x = F.embedding(ids, self._embedding).view(rows * length, -1)
        own = self._own.repeat_interleave(length, 0) if self._sites else None
        for index, layer in enumerate(self._layers):
            qkv = self._project("qkv", _norm(x, layer.norm, self._eps), index, own)
            attended = self._attend(qkv.view(rows, length, -1, self._head_dim), position, cos, sin, cache[index])
            x = x + self._project("o", attended, index, own)
            gate, up = self._project("gate_up", _norm(x, layer.mlp_norm, self._eps), index, own).chunk(2, -1)
            x = x + self._project("down", F.silu(gate) * up, index, own)
        best: Tensor = self._head(_norm(x.view(rows, length, -1)[:, -1], self._norm, self._eps)).max(-1).indices
        return best

    def _project(self, site: str, x: Tensor, index: int, own: Tensor | None) -> Tensor:
        y = self._layers[index].sites[site](x)
        if own is not None:
            self._sites[index][site].add_(y, x, own)
        return y

    def _attend(self, qkv: Tensor, position: int, cos: Tensor, sin: Tensor, cache: Tensor) -> Tensor:
        rows, length = qkv.shape[:2]
        q, k, v = qkv.transpose(1, 2).split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        end = position + length
        cache[0, :, :, position:end] = _rotate(k, cos, sin)
        cache[1, :, :, position:end] = v
        keys, values = cache[0, :, :, :end], cache[1, :, :, :end]
        q = _rotate(q, cos, sin)
        if length > 1:
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(rows * length, -1)
        grouped = q.view(rows, self._kv_heads, -1, self._head_dim)  # query heads of one key head stand where queries would
        return F.scaled_dot_product_attention(grouped, keys, values).reshape(rows, -1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
