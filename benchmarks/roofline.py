"""Bytes that a decode step cannot avoid, and the ratio of a mixed step to a base step that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.sites import Site

_ELEMENT_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Shapes:
    """Widths of a Llama.

    Attributes:
        num_layers: Layers.
        hidden: Width of the residual.
        kv: Width of keys, and of values.
        mlp: Width inside the MLP.
        vocab: Tokens.
    """

    num_layers: int
    hidden: int
    kv: int
    mlp: int
    vocab: int

    @property
    def sites(self) -> tuple[Site, ...]:
        """The four fused products, of seven slices."""
        return (
            Site.fused("qkv", first_slice=0, in_features=self.hidden, out_features=(self.hidden, self.kv, self.kv)),
            Site.fused("o", first_slice=3, in_features=self.hidden, out_features=(self.hidden,)),
            Site.fused("gate_up", first_slice=4, in_features=self.hidden, out_features=(self.mlp, self.mlp)),
            Site.fused("down", first_slice=6, in_features=self.mlp, out_features=(self.hidden,)),
        )

    @property
    def base_bytes(self) -> int:
        """Weights that every step reads: the products of all layers, and the head."""
        layer = sum(site.in_features * site.columns[-1][1] for site in self.sites)
        return _ELEMENT_BYTES * (self.num_layers * layer + self.vocab * self.hidden)

    @property
    def rank_row_bytes(self) -> int:
        """One rank row of A and of B on all modules of all layers."""
        layer = sum(site.in_features * len(site.slices) + site.columns[-1][1] for site in self.sites)
        return _ELEMENT_BYTES * self.num_layers * layer

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token."""
        return _ELEMENT_BYTES * self.num_layers * 2 * self.kv


LLAMA_7B = Shapes(num_layers=32, hidden=4096, kv=4096, mlp=11008, vocab=32000)


def floor_ratio(shapes: Shapes, *, num_adapters: int, rank: int, num_rows: int = 64, context: int = 0) -> float:
    """Returns the bytes of a step with so many distinct adapters over those of a base step: no kernel can be below it."""
    base = shapes.base_bytes + num_rows * context * shapes.kv_token_bytes
    return 1 + num_adapters * rank * shapes.rank_row_bytes / base
