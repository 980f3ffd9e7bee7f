"""The form of a decoder: one record for all families, Llama where nothing else is said."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dataplane.model.rope import Rope


@dataclass(frozen=True, slots=True)
class LayerForm:
    """How one layer sees positions.

    Attributes:
        rope: Rotary positions of its queries and keys; None for a layer without positions.
        window: A token sees this many tokens, itself included; None for all before it.
    """

    rope: Rope | None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Projection:
    """One tensor of the checkpoint that is multiplied with, and one slice of an adapter.

    Attributes:
        path: Its module inside a layer, e.g. `self_attn.q_proj`.
        site: The fused product that computes it.
        in_features: Columns of its weight.
        out_features: Rows of its weight.
        bias: It has a bias.
    """

    path: str
    site: str
    in_features: int
    out_features: int
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shapes, constants and form of one decoder. The defaults are those of Llama; `families` says what others replace.

    Attributes:
        family: Name of the family.
        hidden: Width of the residual stream.
        intermediate: Width of the MLP.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of a head.
        vocab_size: Rows of the embedding.
        max_context: Positions that the model computes as its makers did.
        norm_eps: Epsilon of the RMS norms.
        layers: Form of each layer, in order.
        tied: The head is the embedding.
        activation: Of the MLP's gate: `silu` or `gelu_tanh`.
        fused_weights: The checkpoint holds q, k, v as one tensor, and gate, up as one.
        qkv_bias: q, k and v have a bias.
        qk_norm: Each query and key head is normed before it turns.
        post_norms: What attention and MLP give is normed before it is added.
        norm_offset: Added to the stored weights of norms; norms then compute in float32 throughout.
        embedding_scale: Factor of embedded tokens.
        attention_scale: Factor of the scores.
        attention_softcap: Scores s become `cap · tanh(s / cap)`; None leaves them.
        logit_softcap: Likewise for logits.
    """

    family: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    norm_eps: float
    layers: tuple[LayerForm, ...]
    tied: bool
    activation: str
    attention_scale: float
    fused_weights: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def q_size(self) -> int:
        """Columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    def within(self, max_context: int) -> Architecture:
        """Returns the same model without the windows that hide nothing in sequences of up to `max_context` tokens."""
        layers = (
            layer if layer.window is None or layer.window < max_context else replace(layer, window=None) for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Projections of a layer in slice order; those of one site follow each other as the columns of its product do."""
        hidden, inner, q, kv = self.hidden, self.intermediate, self.q_size, self.kv_size
        o = Projection("self_attn.o_proj", "o", q, hidden)
        down = Projection("mlp.down_proj", "down", inner, hidden)
        if self.fused_weights:
            return (
                Projection("self_attn.qkv_proj", "qkv", hidden, q + 2 * kv, self.qkv_bias),
                o,
                Projection("mlp.gate_up_proj", "gate_up", hidden, 2 * inner),
                down,
            )
        return (
            Projection("self_attn.q_proj", "qkv", hidden, q, self.qkv_bias),
            Projection("self_attn.k_proj", "qkv", hidden, kv, self.qkv_bias),
            Projection("self_attn.v_proj", "qkv", hidden, kv, self.qkv_bias),
            o,
            Projection("mlp.gate_proj", "gate_up", hidden, inner),
            Projection("mlp.up_proj", "gate_up", hidden, inner),
            down,
        )
