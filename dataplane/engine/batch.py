"""Step buffers: one block of memory at fixed addresses, allocated for the largest step and filled from each plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dataplane.engine.plan import Integers, Picks, Plan, PlannedRows
from dataplane.engine.sequence import MAX_SCORED_ROWS
from dataplane.model.attention import PagedKv
from dataplane.model.batch import Batch, Chunk
from kernels.rows import BASE


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A plan, ready to run.

    Attributes:
        batch: What the model reads; the ids of its first rows, those of sequences that decode, are still on the device only.
        row_slot: int32 [T], adapter slot of each row, -1 for the base.
        picks: The rows whose token is chosen, in the order of the batch's sampled rows.
        scored: The planned rows that have targets; their logits come after those of the picks.
        decode_seats: int64 [D], seats of the first rows.
        pick_seats: int64 [S], seats of the picks; it begins with those of the decodes.
    """

    batch: Batch
    row_slot: npt.NDArray[np.int32]
    picks: Picks
    scored: tuple[PlannedRows, ...]
    decode_seats: torch.Tensor
    pick_seats: torch.Tensor


class PinnedBlock:
    """Host memory that is written while the copy of another block may still be on its way.

    Attributes:
        data: int64 [size].
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.data = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._numbers: npt.NDArray[np.int64] = self.data.numpy()
        self._copied: torch.cuda.Event | None = None

    def wait(self) -> npt.NDArray[np.int64]:
        """Returns the block for writing, once its last copy was made."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers

    def send(self, target: torch.Tensor, count: int) -> None:
        """Starts the copy of the first `count` numbers on the current stream."""
        target[:count].copy_(self.data[:count], non_blocking=True)
        self._copied = self._copied or torch.cuda.Event()
        self._copied.record()


class StepBuffers:
    """Owned by the runner. The record that `fill` returns is valid until the next `fill`.

    The block is int64: ids, positions and cache rows [max_step_tokens each], seats of picks and lengths [max_sequences each],
    rows that give logits [max_sequences + MAX_SCORED_ROWS], then the page lists of the step. On the CPU the model reads this very
    memory; for a device two pinned blocks take turns, and one copy moves the used part of one there.
    """

    def __init__(self, *, max_step_tokens: int, max_sequences: int, max_pages: int, device: torch.device) -> None:
        sizes = (*3 * (max_step_tokens,), *2 * (max_sequences,), max_sequences + MAX_SCORED_ROWS)
        size = sum(sizes) + max_sequences * max_pages
        on_cpu = device.type == "cpu"
        self._hosts = [PinnedBlock(size, pinned=not on_cpu) for _ in range(1 if on_cpu else 2)]
        self._device = self._hosts[0].data if on_cpu else torch.zeros(size, dtype=torch.int64, device=device)
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._table = np.zeros((max_sequences, max_pages), dtype=np.int64)

    def fill(self, plan: Plan, kv: PagedKv) -> FilledStep:
        """Writes a plan into the buffers."""
        decodes, rows = plan.decodes, plan.rows
        self._add_pages(plan)
        num_tokens, num_decodes = plan.num_tokens, len(decodes)
        counts = np.concatenate((np.ones(num_decodes, dtype=np.int64), _column(planned.count for planned in rows)))
        seats = np.concatenate((decodes.picks.seats, _column(planned.seat for planned in rows)))
        starts = np.concatenate((decodes.starts, _column(planned.start for planned in rows)))
        slots = np.concatenate((decodes.slots, _column(planned.slot for planned in rows).astype(np.int32)))
        firsts = np.cumsum(counts) - counts
        positions = np.arange(num_tokens) + np.repeat(starts - firsts, counts)
        pages = self._table[np.repeat(seats, counts), positions // kv.page_size]
        num_single = num_decodes + sum(planned.count == 1 for planned in rows)

        at_ids, at_positions, at_rows, at_seats, at_lengths, at_sampled, end = self._starts
        host = self._hosts[0]
        self._hosts.reverse()
        numbers = host.wait()
        numbers[at_ids + num_decodes : at_ids + num_tokens] = list(itertools.chain.from_iterable(planned.ids for planned in rows))
        numbers[at_positions : at_positions + num_tokens] = positions
        numbers[at_rows : at_rows + num_tokens] = pages * kv.rows_per_page + positions % kv.page_size
        numbers[at_seats : at_seats + num_decodes] = decodes.picks.seats
        numbers[at_lengths : at_lengths + num_single] = starts[:num_single] + 1
        others = [index for index, planned in enumerate(rows) if planned.sampling is not None]
        scored = [index for index, planned in enumerate(rows) if planned.targets]
        num_sampled = num_logits = num_decodes + len(others)
        numbers[at_seats + num_decodes : at_seats + num_sampled] = seats[num_decodes:][others]
        numbers[at_sampled : at_sampled + num_decodes] = np.arange(num_decodes)
        numbers[at_sampled + num_decodes : at_sampled + num_sampled] = (firsts + counts - 1)[num_decodes:][others]
        for index in scored:
            first, count = int(firsts[num_decodes + index]) + rows[index].score_start, len(rows[index].targets)
            numbers[at_sampled + num_logits : at_sampled + num_logits + count] = np.arange(first, first + count)
            num_logits += count

        width = int(starts[:num_single].max()) // kv.page_size + 1 if num_single else 0
        at_pages = end
        end += num_single * width
        used = np.arange(width) <= starts[:num_single, None] // kv.page_size
        numbers[at_pages:end] = np.where(used, self._table[seats[:num_single], :width], 0).ravel()
        chunks = rows[num_single - num_decodes :]
        row_slot = np.repeat(slots, counts)
        spans = []
        for planned, first in zip(chunks, firsts[num_single:], strict=True):
            row_slot[first : first + planned.num_base] = -1
            count = (planned.start + planned.count - 1) // kv.page_size + 1
            numbers[end : end + count] = self._table[planned.seat, :count]
            spans.append((end, end + count))
            end += count

        on_device = self._device

        def batch_in(block: torch.Tensor, in_host: Batch | None) -> Batch:
            return Batch(
                ids=block[at_ids : at_ids + num_tokens],
                positions=block[at_positions : at_positions + num_tokens],
                kv_rows=block[at_rows : at_rows + num_tokens],
                num_decode=num_single,
                decode_lengths=block[at_lengths : at_lengths + num_single],
                decode_pages=block[at_pages : at_pages + num_single * width].view(num_single, width),
                chunks=tuple(
                    Chunk(int(first), planned.count, planned.start, block[begin:stop])
                    for planned, first, (begin, stop) in zip(chunks, firsts[num_single:], spans, strict=True)
                ),
                sample_rows=None if num_sampled == num_tokens and not scored else block[at_sampled : at_sampled + num_logits],
                host=in_host,
            )

        batch = self._sent(host, end, batch_in)
        picks = decodes.picks
        if others:
            picks = picks.followed_by(Picks.of([rows[index].pick for index in others]))
        return FilledStep(
            batch=batch,
            row_slot=row_slot,
            picks=picks,
            scored=tuple(rows[index] for index in scored),
            decode_seats=on_device[at_seats : at_seats + num_decodes],
            pick_seats=on_device[at_seats : at_seats + num_sampled],
        )

    def fill_decodes(self, plan: Plan, kv: PagedKv, *, num_rows: int, spare_page: int) -> FilledStep:
        """Writes a plan that only decodes, with rows of nobody behind its own, for a captured step of `num_rows` rows.

        Rows of nobody have token 0, no adapter, and a context of one token in a page that is nobody's.
        """
        decodes, num = plan.decodes, len(plan.decodes)
        self._add_pages(plan)
        host = self._hosts[0]
        self._hosts.reverse()
        numbers = host.wait()
        at_ids, at_positions, at_rows, at_seats, at_lengths, _, at_pages = self._starts
        seats, starts = decodes.picks.seats, decodes.starts
        width = int(starts.max(initial=0)) // kv.page_size + 1

        def column(at: int, own: Integers, others: int) -> None:
            numbers[at : at + num] = own
            numbers[at + num : at + num_rows] = others

        pages = np.zeros((num_rows, width), dtype=np.int64)
        used = np.arange(width) <= starts[:, None] // kv.page_size
        pages[:num] = np.where(used, self._table[seats, :width], 0)
        pages[num:, 0] = spare_page
        last = pages[np.arange(num), starts // kv.page_size]
        column(at_ids, np.zeros(num, dtype=np.int64), 0)
        column(at_positions, starts, 0)
        column(at_rows, last * kv.rows_per_page + starts % kv.page_size, spare_page * kv.rows_per_page)
        column(at_lengths, starts + 1, 1)
        numbers[at_seats : at_seats + num] = seats
        end = at_pages + pages.size
        numbers[at_pages:end] = pages.ravel()

        def batch_in(block: torch.Tensor, in_host: Batch | None) -> Batch:
            return Batch(
                ids=block[at_ids : at_ids + num_rows],
                positions=block[at_positions : at_positions + num_rows],
                kv_rows=block[at_rows : at_rows + num_rows],
                num_decode=num_rows,
                decode_lengths=block[at_lengths : at_lengths + num_rows],
                decode_pages=block[at_pages:end].view(num_rows, width),
                chunks=(),
                sample_rows=None,
                host=in_host,
            )

        row_slot = np.full(num_rows, BASE, dtype=np.int32)
        row_slot[:num] = decodes.slots
        batch, own_seats = self._sent(host, end, batch_in), self._device[at_seats : at_seats + num]
        return FilledStep(batch, row_slot, decodes.picks, scored=(), decode_seats=own_seats, pick_seats=own_seats)

    def _sent(self, host: PinnedBlock, count: int, batch_in: Callable[[torch.Tensor, Batch | None], Batch]) -> Batch:
        """Returns a step's batch where the model reads it, with the host's beside it if that is another."""
        if self._device is host.data:
            return batch_in(host.data, None)
        host.send(self._device, count)
        return batch_in(self._device, batch_in(host.data, None))

    def _add_pages(self, plan: Plan) -> None:
        """Enters new pages into the tables of their seats."""
        for seat, place, page in plan.decodes.new_pages:
            self._table[seat, place] = page
        for planned in plan.rows:
            if planned.new_pages:
                before = planned.num_pages_before
                self._table[planned.seat, before : before + len(planned.new_pages)] = planned.new_pages


def _column(numbers: Iterable[int]) -> Integers:
    return np.fromiter(numbers, dtype=np.int64)
