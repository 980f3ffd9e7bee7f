"""What the catalogue knows of a base model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

MODULE_SITES = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.v_proj": "qkv",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate_up",
    "mlp.up_proj": "gate_up",
    "mlp.down_proj": "down",
}
"""Projections of a Llama layer in slice order, with the fused projection that computes each."""

FUSED_MODULE_SITES = {
    "self_attn.qkv_proj": "qkv",
    "self_attn.o_proj": "o",
    "mlp.gate_up_proj": "gate_up",
    "mlp.down_proj": "down",
}
"""Likewise for families whose checkpoints hold q, k, v as one tensor, and gate, up as one: each is one slice."""


@dataclass(frozen=True, slots=True)
class TargetModule:
    """A linear projection that adapters may target; its index in `BaseDescription.modules` is the slice index.

    Attributes:
        path: Module path with the layer number replaced by `{layer}`.
        site: Fused projection that it is computed in: `qkv`, `o`, `gate_up` or `down`.
        in_features: Input features, in elements.
        out_features: Output features, in elements.
    """

    path: str
    site: str
    in_features: int
    out_features: int

    @property
    def name(self) -> str:
        """Last segment of the path, e.g. `q_proj`."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class EdgeDigest:
    """A digest of the embedding's or the head's weights as one type.

    Attributes:
        site: `embed` or `head`; of a base whose head is its embedding, both are there and equal.
        dtype: `F32`, `F16` or `BF16`, to which they are rounded from what the base's files hold.
        sha256: Of the bytes of the matrix, [vocabulary, hidden]; 64 lower-case hex digits.
    """

    site: str
    dtype: str
    sha256: str


@dataclass(frozen=True, slots=True)
class BaseDescription:
    """A base model as adapters are checked against it.

    Attributes:
        digest: Content digest; 64 lower-case hex digits.
        name: Human name.
        family: Model family, e.g. `llama`.
        num_layers: Decoder layers.
        modules: Projections in slice order, the same in every layer.
        vocab_size: Rows of the token embedding, in tokens.
        max_context: Longest context, in tokens.
        known_names: Other names under which adapter files may refer to it.
        eos_ids: Tokens that end a sequence; None where that is not known (registered before it was kept).
        edge_digests: By which copies of embedding and head are known; None where they are not (likewise).
        chat_contents: What control tokens in contents of messages are: `text` or `tokens`; None: as the catalogue has it.
        chat_fault: Why the chat template cannot be used, empty where it can; None where it was not tried.
    """

    digest: str
    name: str
    family: str
    num_layers: int
    modules: tuple[TargetModule, ...]
    vocab_size: int
    max_context: int
    known_names: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] | None = None
    edge_digests: tuple[EdgeDigest, ...] | None = None
    chat_contents: str | None = None
    chat_fault: str | None = None

    @property
    def edges(self) -> tuple[TargetModule, ...]:
        """What adapters may target outside of the layers, under the layer `num_layers`: the token embedding and the head."""
        hidden = self.modules[0].in_features
        return (
            TargetModule("model.embed_tokens", "embed", self.vocab_size, hidden),
            TargetModule("lm_head", "head", hidden, self.vocab_size),
        )

    def module_at(self, layer: int, index: int) -> TargetModule:
        """Returns the module of a pair: one of `modules`, or of `edges` under the layer `num_layers`."""
        return self.modules[index] if layer < self.num_layers else self.edges[index]

    def to_json(self) -> str:
        """Writes the description as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> BaseDescription:
        """Reads what `to_json` wrote. For our own messages only: the text is trusted."""
        fields = json.loads(text)
        fields["modules"] = tuple(TargetModule(**module) for module in fields["modules"])
        fields["known_names"] = tuple(fields["known_names"])
        if fields.get("eos_ids") is not None:
            fields["eos_ids"] = tuple(fields["eos_ids"])
        if fields.get("edge_digests") is not None:
            fields["edge_digests"] = tuple(EdgeDigest(**one) for one in fields["edge_digests"])
        return cls(**fields)
