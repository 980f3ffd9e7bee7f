"""The layers of a decoder whose low-rank part makes the base product too, in the order that suits it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from dataplane.model.linear import Linear, PlainLinear
from dataplane.model.stack import LowRank, PieceStack


@runtime_checkable
class Projects(LowRank, Protocol):
    """A low-rank product that takes whole sites."""

    def project_(self, y: Tensor, x: Tensor, weight: Tensor, *, layer: int, site: str, bias: Tensor | None = None) -> None:
        """Writes to y, [T, N], the base product `x Wᵀ + bias` and what the adapters make of x, [T, K]; W is [N, K]."""


class ProjectedStack(PieceStack):
    """`PieceStack` on a device; products are `PlainLinear`, and the low-rank part is one of `Projects`."""

    @staticmethod
    def _product(linear: Linear, x: Tensor, low_rank: LowRank, *, layer: int, site: str) -> Tensor:
        assert isinstance(low_rank, Projects), "forms are chosen together"
        assert isinstance(linear, PlainLinear), "likewise"
        y = x.new_empty(x.shape[0], linear.weight.shape[0])
        low_rank.project_(y, x, linear.weight, layer=layer, site=site, bias=linear.bias)
        return y
