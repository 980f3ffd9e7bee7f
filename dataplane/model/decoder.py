"""The forward pass of every family over one packed batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dataplane.model.architecture import Architecture
from dataplane.model.attention import Attention
from dataplane.model.batch import Batch
from dataplane.model.linear import Linear
from dataplane.model.pieces import Pieces
from dataplane.model.stack import LowRank, Stack
from kernels.edges import Edges


@dataclass(frozen=True, slots=True)
class Decoder:
    """A frozen model. Every request shares it; nothing in it depends on adapters.

    Attributes:
        form: Its architecture.
        embedding: [vocab, H].
        embedding_scale: `form.embedding_scale`, rounded to the model's dtype.
        stack: Its layers.
        norm: The last norm's weight.
        head: [vocab, H] as a product.
        pieces: The form of what lies around the products.
    """

    form: Architecture
    embedding: Tensor
    embedding_scale: float
    stack: Stack
    norm: Tensor
    head: Linear
    pieces: Pieces

    def forward(self, batch: Batch, attention: Attention, low_rank: LowRank, edges: Edges | None = None) -> Tensor:
        """Computes one step: appends all rows to the KV cache and returns logits of the rows that are sampled.

        Args:
            batch: The rows.
            attention: Over the KV cache.
            low_rank: Adapters of the layers.
            edges: Adapters of embedding and head; None without.

        Returns:
            [sampled rows, vocab], in the model's dtype.
        """
        attention.begin_step(batch)
        return self.compute(batch, attention, low_rank, edges)

    def compute(self, batch: Batch, attention: Attention, low_rank: LowRank, edges: Edges | None = None) -> Tensor:
        """Does what `forward` does once attention and the low-rank part have begun the step: what can be captured of it."""
        form, pieces = self.form, self.pieces
        x = self.embedding[batch.ids]
        if edges is not None:
            edges.embed_(x, batch.ids)
        if self.embedding_scale != 1:
            x *= self.embedding_scale
        y: Tensor | None = self.stack.run(x, batch.positions, attention, low_rank)
        if batch.sample_rows is not None:
            x, y = x[batch.sample_rows], None if y is None else y[batch.sample_rows]
        if not len(x):
            return x.new_empty(0, form.vocab_size)
        h = pieces.add_norm(x, y, self.norm, form.norm_eps)
        logits = self.head(h)
        if edges is not None:
            edges.head_(logits, h, (batch.host or batch).sample_rows)
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
