"""Sizes of the attention kernels, as data: one configuration a head dimension and element size."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gpu.tiles import Launch

PAGE_SIZES = (16, 32)
MAX_HEAD_DIM = 256
MAX_SPLITS = 32
"""Most splits of a row that decodes; a power of two."""


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Sizes for head dimensions up to `max_head_dim`. What a row gets depends on these and on its own sequence.

    Attributes:
        max_head_dim: Widest head in this configuration.
        decode_n: Tokens that a round of the decode kernel's loop takes; a power of two, a multiple of every page size.
        split_tokens: Fewest tokens of a split, a multiple of `decode_n`.
        prefill_m: Rows times query heads of a key head in a tile of a chunk.
        prefill_n: Tokens that a round of the prefill kernel's loop takes; likewise.
        decode: Launch of the decode kernel.
        prefill: Launch of the prefill kernel.
        waves: Programs of either for each multiprocessor.
    """

    max_head_dim: int
    decode_n: int
    split_tokens: int
    prefill_m: int
    prefill_n: int
    decode: Launch
    prefill: Launch
    waves: int = 4

    def rows_per_tile(self, group: int) -> int:
        """Returns the rows of a chunk that a tile takes when so many query heads share a key head."""
        return self.prefill_m // group


ATTENTION_TILES = (
    AttentionTiles(64, 64, 256, 128, 64, Launch(4, 5), Launch(8, 3)),
    AttentionTiles(128, 64, 256, 128, 32, Launch(4, 5), Launch(8, 3)),
    AttentionTiles(256, 32, 256, 64, 32, Launch(4, 5), Launch(8, 2)),
)
"""For elements of two bytes, by ascending head dimension."""

WIDE_ATTENTION_TILES = (
    AttentionTiles(128, 32, 256, 64, 32, Launch(4, 2), Launch(8, 2)),
    AttentionTiles(256, 32, 256, 32, 32, Launch(4, 2), Launch(8, 2)),
)
"""For float32, which serves only where the last digits matter."""


def attention_tiles_for(head_dim: int, element_bytes: int) -> AttentionTiles:
    """Returns the first configuration whose heads are as wide; `head_dim` is at most MAX_HEAD_DIM."""
    table = ATTENTION_TILES if element_bytes == 2 else WIDE_ATTENTION_TILES
    return next(tiles for tiles in table if head_dim <= tiles.max_head_dim)
