"""Step buffers: one block of memory at fixed addresses, allocated for the largest step and filled from each plan."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dataplane.engine.plan import Plan, PlannedRows
from dataplane.engine.sequence import MAX_SCORED_ROWS
from dataplane.model.attention import PagedKv
from dataplane.model.batch import Batch, Chunk


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A plan, ready to run.

    Attributes:
        batch: What the model reads.
        row_slot: int32 [T], adapter slot of each row, -1 for the base.
        sampled: The planned rows whose last row is sampled, in the order of the batch's sampled rows.
        scored: The planned rows that have targets; their logits come after those of the sampled rows.
        late: (row, seat) of rows whose token id is still on the device only.
    """

    batch: Batch
    row_slot: npt.NDArray[np.int32]
    sampled: tuple[PlannedRows, ...]
    scored: tuple[PlannedRows, ...]
    late: tuple[tuple[int, int], ...]


class StepBuffers:
    """Owned by the runner. The record that `fill` returns is valid until the next `fill`.

    The block is int64: ids, positions and cache rows [max_step_tokens each], lengths [max_sequences], rows that give logits
    [max_sequences + MAX_SCORED_ROWS], then the page lists of the step. On the CPU the model reads this very memory; elsewhere
    one copy moves the used part to the device.
    """

    def __init__(self, *, max_step_tokens: int, max_sequences: int, max_pages: int, device: torch.device) -> None:
        sizes = (*3 * (max_step_tokens,), max_sequences, max_sequences + MAX_SCORED_ROWS)
        size = sum(sizes) + max_sequences * max_pages
        host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host = host
        self._device = host if device.type == "cpu" else torch.zeros(size, dtype=torch.int64, device=device)
        self._numbers: npt.NDArray[np.int64] = host.numpy()
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._table = np.zeros((max_sequences, max_pages), dtype=np.int64)

    def fill(self, plan: Plan, kv: PagedKv) -> FilledStep:
        """Writes a plan into the buffers."""
        rows = plan.rows
        ids: list[int] = []
        late = []
        for planned in rows:
            if planned.new_pages:
                before = planned.num_pages_before
                self._table[planned.seat, before : before + len(planned.new_pages)] = planned.new_pages
            ids += planned.ids
            if len(planned.ids) < planned.count:
                late.append((len(ids), planned.seat))
                ids.append(0)
        counts = np.array([planned.count for planned in rows])
        seats = np.array([planned.seat for planned in rows])
        firsts = np.cumsum(counts) - counts
        starts = np.array([planned.start for planned in rows])
        num_tokens = plan.num_tokens
        positions = np.arange(num_tokens) + np.repeat(starts - firsts, counts)
        pages = self._table[np.repeat(seats, counts), positions // kv.page_size]
        num_decode = int(np.count_nonzero(counts == 1))
        sampled = [i for i, planned in enumerate(rows) if planned.sampling is not None]
        scored = [i for i, planned in enumerate(rows) if planned.targets]

        at_ids, at_positions, at_rows, at_lengths, at_sampled, end = self._starts
        numbers = self._numbers
        numbers[at_ids : at_ids + num_tokens] = ids
        numbers[at_positions : at_positions + num_tokens] = positions
        numbers[at_rows : at_rows + num_tokens] = pages * kv.rows_per_page + positions % kv.page_size
        numbers[at_lengths : at_lengths + num_decode] = starts[:num_decode] + 1
        numbers[at_sampled : at_sampled + len(sampled)] = (firsts + counts - 1)[sampled]
        num_logits = len(sampled)
        for i in scored:
            first, count = int(firsts[i]) + rows[i].score_start, len(rows[i].targets)
            numbers[at_sampled + num_logits : at_sampled + num_logits + count] = np.arange(first, first + count)
            num_logits += count

        width = int(starts[:num_decode].max()) // kv.page_size + 1 if num_decode else 0
        at_pages = end
        end += num_decode * width
        used = np.arange(width) <= starts[:num_decode, None] // kv.page_size
        numbers[at_pages:end] = np.where(used, self._table[seats[:num_decode], :width], 0).ravel()
        slots = np.repeat(np.array([planned.slot for planned in rows], dtype=np.int32), counts)
        spans = []
        for planned, first in zip(rows[num_decode:], firsts[num_decode:], strict=True):
            slots[first : first + planned.num_base] = -1
            count = (planned.start + planned.count - 1) // kv.page_size + 1
            numbers[end : end + count] = self._table[planned.seat, :count]
            spans.append((end, end + count))
            end += count

        if self._device is not self._host:
            self._device[:end].copy_(self._host[:end], non_blocking=True)
        on_device = self._device
        chunks = tuple(
            Chunk(int(first), planned.count, planned.start, on_device[begin:stop])
            for planned, first, (begin, stop) in zip(rows[num_decode:], firsts[num_decode:], spans, strict=True)
        )
        batch = Batch(
            ids=on_device[at_ids : at_ids + num_tokens],
            positions=on_device[at_positions : at_positions + num_tokens],
            kv_rows=on_device[at_rows : at_rows + num_tokens],
            num_decode=num_decode,
            decode_lengths=on_device[at_lengths : at_lengths + num_decode],
            decode_pages=on_device[at_pages : at_pages + num_decode * width].view(num_decode, width),
            chunks=chunks,
            sample_rows=None if len(sampled) == num_tokens and not scored else on_device[at_sampled : at_sampled + num_logits],
        )
        return FilledStep(batch, slots, tuple(rows[i] for i in sampled), tuple(rows[i] for i in scored), tuple(late))
