"""The forward pass of a Llama-family model over one packed batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dataplane.model.attention import Attention
from dataplane.model.batch import Batch
from dataplane.model.config import LlamaConfig
from dataplane.model.layers import Rotary
from dataplane.model.linear import Linear
from dataplane.model.pieces import Pieces


class LowRank(Protocol):
    """Adds what the adapters of the step's rows contribute at one site."""

    def add_(self, y: Tensor, x: Tensor, *, layer: int, site: str) -> None:
        """Adds to y in place, row by row: `y[t] += scale · B (A x[t])` of the adapter of row t; base rows stay as they are."""


class NoLowRank:
    """The base model alone."""

    def add_(self, y: Tensor, x: Tensor, *, layer: int, site: str) -> None:
        """Adds nothing."""


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one decoder layer; q, k and v are one product, gate and up another."""

    attention_norm: Tensor
    qkv: Linear
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Llama:
    """A frozen model. Every request shares it; nothing in it depends on adapters.

    Attributes:
        config: Shapes.
        embedding: [vocab, H].
        layers: In order.
        norm: The last norm's weight.
        head: [vocab, H] as a product.
        rotary: Position tables.
        pieces: The form of what lies between the products.
    """

    config: LlamaConfig
    embedding: Tensor
    layers: tuple[LlamaLayer, ...]
    norm: Tensor
    head: Linear
    rotary: Rotary
    pieces: Pieces

    def forward(self, batch: Batch, attention: Attention, low_rank: LowRank) -> Tensor:
        """Computes one step: appends all rows to the KV cache and returns logits of the rows that are sampled.

        Each site runs one base product over all rows of the batch, whatever adapters they use, and the low-rank part right after.

        Returns:
            [sampled rows, vocab], in the model's dtype.
        """
        config, eps, pieces = self.config, self.config.norm_eps, self.pieces
        attention.begin_step(batch)
        cos, sin = self.rotary.at(batch.positions)
        num_turned = config.num_heads + config.num_kv_heads

        x = self.embedding[batch.ids]
        y: Tensor | None = None
        for i, layer in enumerate(self.layers):
            h = pieces.add_norm(x, y, layer.attention_norm, eps)
            qkv = layer.qkv(h)
            low_rank.add_(qkv, h, layer=i, site="qkv")
            heads = qkv.view(-1, num_turned + config.num_kv_heads, config.head_dim)
            attended = attention(pieces.rotate(heads[:, :num_turned], cos, sin), heads[:, num_turned:], layer=i)
            y = layer.o(attended)
            low_rank.add_(y, attended, layer=i, site="o")

            h = pieces.add_norm(x, y, layer.mlp_norm, eps)
            gate_up = layer.gate_up(h)
            low_rank.add_(gate_up, h, layer=i, site="gate_up")
            h = pieces.silu_mul(gate_up)
            y = layer.down(h)
            low_rank.add_(y, h, layer=i, site="down")

        if batch.sample_rows is not None:
            x, y = x[batch.sample_rows], None if y is None else y[batch.sample_rows]
        if not len(x):
            return x.new_empty(0, config.vocab_size)
        return self.head(pieces.add_norm(x, y, self.norm, eps))


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns every tensor that a model folder must hold, by name."""
    hidden, inner = config.hidden, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (config.q_size, hidden),
            prefix + "self_attn.k_proj.weight": (config.kv_size, hidden),
            prefix + "self_attn.v_proj.weight": (config.kv_size, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, config.q_size),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def weight_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
    """Returns the memory of a loaded model; a tied head counts, since its packed form is a copy of its own."""
    elements = sum(torch.Size(shape).numel() for shape in weight_shapes(config).values())
    if config.tied:
        elements += config.vocab_size * config.hidden
    return elements * dtype.itemsize
