"""The layers of a decoder, one after the other: the interface, and its form in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dataplane.model.architecture import Architecture
from dataplane.model.attention import Attention
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


class Stack(Protocol):
    """All layers of a decoder."""

    @property
    def layers(self) -> tuple[DecoderLayer, ...]:
        """Their weights, in order."""
        ...

    def run(self, x: Tensor, positions: Tensor, attention: Attention, low_rank: LowRank) -> Tensor | None:
        """Runs a step through the layers. Both attention and low-rank part have begun it.

        Each site runs one base product over all rows of the batch, whatever adapters they use, and the low-rank part right after.

        Args:
            x: [T, H], the residual stream; is changed.
            positions: int64 [T], of the rows in their sequences.
            attention: Over the KV cache.
            low_rank: The adapters' part.

        Returns:
            [T, H], what is still to be added to x; None when there is no layer.
        """
        ...


@dataclass(frozen=True, slots=True)
class PieceStack:
    """Calls piece by piece, with any form of them; see `Stack`.

    Attributes:
        form: The architecture.
        layers: Their weights, in order.
        rotaries: A position table for each set of rotary parameters that a layer has.
        pieces: The form of what lies between the products.
    """

    form: Architecture
    layers: tuple[DecoderLayer, ...]
    rotaries: Mapping[Rope, Rotary]
    pieces: Pieces

    def run(self, x: Tensor, positions: Tensor, attention: Attention, low_rank: LowRank) -> Tensor | None:
        """See `Stack`."""
        form, eps, pieces = self.form, self.form.norm_eps, self.pieces
        angles = {rope: rotary.at(positions) for rope, rotary in self.rotaries.items()}
        num_turned = form.num_heads + form.num_kv_heads
        gated = pieces.silu_mul if form.activation == "silu" else pieces.gelu_tanh_mul
        y: Tensor | None = None
        for i, (layer, of) in enumerate(zip(self.layers, form.layers, strict=True)):
            h = pieces.add_norm(x, y, layer.attention_norm, eps)
            qkv = self._product(layer.qkv, h, low_rank, layer=i, site="qkv")
            heads = qkv.view(-1, num_turned + form.num_kv_heads, form.head_dim)
            qk, v = heads[:, :num_turned], heads[:, num_turned:]
            if layer.qk_norm is not None:
                qk = pieces.norm(qk, layer.qk_norm, eps)
            if of.rope is not None:
                qk = pieces.rotate(qk, *angles[of.rope])
            attended = attention(qk, v, layer=i)
            y = self._product(layer.o, attended, low_rank, layer=i, site="o")
            if layer.post_attention_norm is not None:
                y = pieces.norm(y, layer.post_attention_norm, eps)

            h = pieces.add_norm(x, y, layer.mlp_norm, eps)
            gate_up = self._product(layer.gate_up, h, low_rank, layer=i, site="gate_up")
            h = gated(gate_up)
            y = self._product(layer.down, h, low_rank, layer=i, site="down")
            if layer.post_mlp_norm is not None:
                y = pieces.norm(y, layer.post_mlp_norm, eps)
        return y

    @staticmethod
    def _product(linear: Linear, x: Tensor, low_rank: LowRank, *, layer: int, site: str) -> Tensor:
        y = linear(x)
        low_rank.add_(y, x, layer=layer, site=site)
        return y
