"""The forward pass of every family over one packed batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dataplane.model.architecture import Architecture
from dataplane.model.attention import Attention
from dataplane.model.batch import Batch
from dataplane.model.layers import Rotary
from dataplane.model.linear import Linear
from dataplane.model.pieces import Pieces
from dataplane.model.rope import Rope


class LowRank(Protocol):
    """Adds what the adapters of the step's rows contribute at one site."""

    def add_(self, y: Tensor, x: Tensor, *, layer: int, site: str) -> None:
        """Adds to y in place, row by row: `y[t] += scale · B (A x[t])` of the adapter of row t; base rows stay as they are."""


class NoLowRank:
    """The base model alone."""

    def add_(self, y: Tensor, x: Tensor, *, layer: int, site: str) -> None:
        """Adds nothing."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; q, k and v are one product, gate and up another.

    Attributes:
        attention_norm: [H], before attention.
        qkv: The product of queries, keys and values.
        qk_norm: [heads + kv_heads, head_dim], of each query and key head; None without.
        o: The product after attention.
        post_attention_norm: [H], of what attention gives; None without.
        mlp_norm: [H], before the MLP.
        gate_up: The product of gate and up.
        down: The product after the activation.
        post_mlp_norm: [H], of what the MLP gives; None without.
    """

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    o: Linear
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A frozen model. Every request shares it; nothing in it depends on adapters.

    Attributes:
        form: Its architecture.
        embedding: [vocab, H].
        embedding_scale: `form.embedding_scale`, rounded to the model's dtype.
        layers: In order.
        norm: The last norm's weight.
        head: [vocab, H] as a product.
        rotaries: A position table for each set of rotary parameters that a layer has.
        pieces: The form of what lies between the products.
    """

    form: Architecture
    embedding: Tensor
    embedding_scale: float
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Linear
    rotaries: dict[Rope, Rotary]
    pieces: Pieces

    def forward(self, batch: Batch, attention: Attention, low_rank: LowRank) -> Tensor:
        """Computes one step: appends all rows to the KV cache and returns logits of the rows that are sampled.

        Each site runs one base product over all rows of the batch, whatever adapters they use, and the low-rank part right after.

        Returns:
            [sampled rows, vocab], in the model's dtype.
        """
        form, eps, pieces = self.form, self.form.norm_eps, self.pieces
        attention.begin_step(batch)
        angles = {rope: rotary.at(batch.positions) for rope, rotary in self.rotaries.items()}
        num_turned = form.num_heads + form.num_kv_heads
        gated = pieces.silu_mul if form.activation == "silu" else pieces.gelu_tanh_mul

        x = self.embedding[batch.ids]
        if self.embedding_scale != 1:
            x *= self.embedding_scale
        y: Tensor | None = None
        for i, (layer, of) in enumerate(zip(self.layers, form.layers, strict=True)):
            h = pieces.add_norm(x, y, layer.attention_norm, eps)
            qkv = layer.qkv(h)
            low_rank.add_(qkv, h, layer=i, site="qkv")
            heads = qkv.view(-1, num_turned + form.num_kv_heads, form.head_dim)
            qk, v = heads[:, :num_turned], heads[:, num_turned:]
            if layer.qk_norm is not None:
                qk = pieces.norm(qk, layer.qk_norm, eps)
            if of.rope is not None:
                qk = pieces.rotate(qk, *angles[of.rope])
            attended = attention(qk, v, layer=i)
            y = layer.o(attended)
            low_rank.add_(y, attended, layer=i, site="o")
            if layer.post_attention_norm is not None:
                y = pieces.norm(y, layer.post_attention_norm, eps)

            h = pieces.add_norm(x, y, layer.mlp_norm, eps)
            gate_up = layer.gate_up(h)
            low_rank.add_(gate_up, h, layer=i, site="gate_up")
            h = gated(gate_up)
            y = layer.down(h)
            low_rank.add_(y, h, layer=i, site="down")
            if layer.post_mlp_norm is not None:
                y = pieces.norm(y, layer.post_mlp_norm, eps)

        if batch.sample_rows is not None:
            x, y = x[batch.sample_rows], None if y is None else y[batch.sample_rows]
        if not len(x):
            return x.new_empty(0, form.vocab_size)
        logits = self.head(pieces.add_norm(x, y, self.norm, eps))
        return logits if form.logit_softcap is None else pieces.softcap(logits, form.logit_softcap)


@dataclass(frozen=True, slots=True)
class NormNames:
    """What a checkpoint calls the norms of a layer; None for one that the family does not have."""

    attention: str
    post_attention: str | None
    mlp: str
    post_mlp: str | None


def norm_names(form: Architecture) -> NormNames:
    """Returns the names; `post_attention_layernorm` stands before the MLP, or, in families with four norms, after attention."""
    if form.post_norms:
        return NormNames("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return NormNames("input_layernorm", None, "post_attention_layernorm", None)


def weight_shapes(form: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns every tensor that a model folder must hold, by name."""
    hidden, names = form.hidden, norm_names(form)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (form.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not form.tied:
        shapes["lm_head.weight"] = (form.vocab_size, hidden)
    for i in range(form.num_layers):
        prefix = f"model.layers.{i}."
        for norm in (names.attention, names.post_attention, names.mlp, names.post_mlp):
            if norm is not None:
                shapes[f"{prefix}{norm}.weight"] = (hidden,)
        for projection in form.projections:
            shapes[f"{prefix}{projection.path}.weight"] = (projection.out_features, projection.in_features)
            if projection.bias:
                shapes[f"{prefix}{projection.path}.bias"] = (projection.out_features,)
        if form.qk_norm:
            shapes |= {f"{prefix}self_attn.{kind}_norm.weight": (form.head_dim,) for kind in "qk"}
    return shapes


def weight_bytes(form: Architecture, dtype: torch.dtype) -> int:
    """Returns the memory of a loaded model; a tied head counts, since its packed form is a copy of its own."""
    elements = sum(torch.Size(shape).numel() for shape in weight_shapes(form).values())
    if form.tied:
        elements += form.vocab_size * form.hidden
    return elements * dtype.itemsize
