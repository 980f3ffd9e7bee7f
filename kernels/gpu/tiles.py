"""Sizes of the kernels' tiles, as data: one configuration a row bucket."""

from __future__ import annotations

from dataclasses import dataclass

_NARROW = 8192


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is launched: warps of a program and stages of its main loop."""

    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int | bool]:
        """Returns Triton's options; multiplication and addition may fuse, which has to be said since its default will change."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class ExtensionTiles:
    """Sizes of the base product that takes the list as an extension of its K.

    Attributes:
        block_n: Columns of a program.
        narrow_n: The same at sites of at most 8192 columns, of which a device would otherwise have too few programs.
        block_k: Columns of x that one product takes.
        launch: Its launch.
    """

    block_n: int
    narrow_n: int
    block_k: int
    launch: Launch

    def columns(self, width: int) -> int:
        """Returns the columns of a program at a site of so many."""
        return self.narrow_n if width <= _NARROW else self.block_n


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes for steps of up to `max_rows` rows. What a row gets depends on these and on the site, never on the step's mix.

    Attributes:
        max_rows: Most rows of a step in this bucket.
        block_m: Rows of a tile.
        block_k: Columns of x that one product of the shrink takes.
        k_part: The shrink splits K once for each full `k_part` of it, up to `max_split`.
        max_split: Most parts; a power of two, 1 for no split.
        block_n: Columns of a program of the expand.
        block_j: List entries that one product of the expand takes, a multiple of 16.
        shrink: Launch of the shrink.
        expand: Launch of the expand.
        extension: The base product with the list behind its K.
    """

    max_rows: int
    block_m: int
    block_k: int
    k_part: int
    max_split: int
    block_n: int
    block_j: int
    shrink: Launch
    expand: Launch
    extension: ExtensionTiles

    def split_k(self, in_features: int) -> int:
        """Returns the parts into which the shrink splits K at a site: a power of two."""
        parts = max(1, min(self.max_split, in_features // self.k_part))
        return 1 << (parts.bit_length() - 1)

    def num_tiles(self, num_rows: int) -> int:
        """Returns the tiles that a step of so many rows has."""
        return -(-num_rows // self.block_m)


# Stages keep bytes on their way: 4.3 TB/s over 132 multiprocessors for 1 µs are 33 KB each, some 2 programs of 4 tiles of A or B.
TILES = (
    Tiles(16, 16, 128, 1024, 8, 64, 64, Launch(4, 5), Launch(4, 5), ExtensionTiles(64, 32, 128, Launch(4, 4))),
    Tiles(64, 64, 128, 1024, 8, 64, 64, Launch(4, 5), Launch(4, 5), ExtensionTiles(64, 32, 128, Launch(4, 3))),
    Tiles(128, 64, 128, 1024, 4, 64, 64, Launch(4, 3), Launch(4, 3), ExtensionTiles(64, 64, 128, Launch(4, 3))),
    Tiles(1 << 20, 128, 64, 1024, 1, 128, 32, Launch(4, 3), Launch(8, 3), ExtensionTiles(128, 128, 64, Launch(8, 3))),
)
"""The product's configurations, by ascending bucket."""


def tiles_for(num_rows: int, table: tuple[Tiles, ...] = TILES) -> Tiles:
    """Returns the first configuration whose bucket holds so many rows."""
    return next(tiles for tiles in table if num_rows <= tiles.max_rows)
