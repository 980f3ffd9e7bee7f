"""What one step computes, as tensors: the record between the runner, which fills it, and the model, which reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one sequence that are computed together.

    Attributes:
        first_row: Row of the batch at which the chunk starts.
        num_rows: Its rows.
        context: Tokens of the sequence that lie before the chunk, already in the cache.
        pages: int64 [pages that hold context and chunk].
    """

    first_row: int
    num_rows: int
    context: int
    pages: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed batch: `num_decode` rows of one sequence each, then the rows of all `chunks`.

    The tensors are views of buffers whose addresses never change; they are valid until the next step is filled.

    Attributes:
        ids: int64 [T], token ids.
        positions: int64 [T], positions in their sequences.
        kv_rows: int64 [T], the cache row of each token at layer 0 (see `PagedKv.row_of`).
        num_decode: Rows [0, num_decode) have one token each.
        decode_lengths: int64 [num_decode], tokens of the sequence with this one.
        decode_pages: int64 [num_decode, pages of the longest], padded with page 0, which is always zero.
        chunks: The other rows.
        sample_rows: int64 [S], rows whose logits are wanted; None for all rows in order.
        host: The same in the memory of the host, where the other tensors lie on a device; a form that plans its launches there
            reads lengths and pages from it without waiting for the device.
    """

    ids: Tensor
    positions: Tensor
    kv_rows: Tensor
    num_decode: int
    decode_lengths: Tensor
    decode_pages: Tensor
    chunks: tuple[Chunk, ...]
    sample_rows: Tensor | None
    host: Batch | None = None
