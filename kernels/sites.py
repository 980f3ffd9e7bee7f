"""A site: one fused projection of the model, its slices and the columns that they write."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Site:
    """One fused projection, e.g. `qkv`.

    Attributes:
        name: The name by which the model calls it.
        slices: Slice index of each projection that the site fuses: the second and third axis of the descriptor table.
        in_features: Width K of the input that all its slices share.
        columns: First and last + 1 column of the output that each slice writes; disjoint, one pair a slice.
    """

    name: str
    slices: tuple[int, ...]
    in_features: int
    columns: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        assert len(self.slices) == len(self.columns), "one pair of columns a slice"

    @classmethod
    def fused(cls, name: str, *, first_slice: int, in_features: int, out_features: tuple[int, ...]) -> Site:
        """Returns the site whose slices follow each other in the table and in the columns of the output."""
        ends = [sum(out_features[: i + 1]) for i in range(len(out_features))]
        columns = tuple((end - width, end) for end, width in zip(ends, out_features, strict=True))
        return cls(name, tuple(range(first_slice, first_slice + len(out_features))), in_features, columns)
