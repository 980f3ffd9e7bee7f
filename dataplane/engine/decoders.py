"""Sequences that decode, in columns: a step plans all of them with a few operations on whole arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dataplane.engine.limits import Limits
from dataplane.engine.plan import NO_DECODES, Decodes, Integers, Pick, Picks
from dataplane.engine.sequence import Sequence


class Decoders:
    """The sequences whose every known token is computed or planned, so that they take one row in each step.

    While a sequence is here, its `num_scheduled` is kept in a column, by seat; it goes back to the sequence when it leaves. Owned
    by the seating.

    Args:
        limits: Limits of the scheduler.
        page_size: Tokens in a KV page.
    """

    def __init__(self, limits: Limits, *, page_size: int) -> None:
        size = limits.max_sequences
        self._prices = limits.prices
        self._page_size = page_size
        self._members: list[Sequence | None] = [None] * size
        self._is_ready = np.zeros(size, dtype=np.bool_)
        self._is_special = np.zeros(size, dtype=np.bool_)
        self._position = np.zeros(size, dtype=np.int64)
        self._room = np.zeros(size, dtype=np.int64)
        self._last = np.zeros(size, dtype=np.int64)
        self._num_prompt = np.zeros(size, dtype=np.int64)
        self._slot = np.zeros(size, dtype=np.int32)
        self._rank_rows = np.zeros(size, dtype=np.int64)

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence that has a seat and whose known tokens are all computed or planned."""
        seat = sequence.seat
        self._members[seat] = sequence
        self._is_special[seat] = not sequence.plain
        self._position[seat] = sequence.num_scheduled
        self._room[seat] = len(sequence.pages) * self._page_size
        self._last[seat] = sequence.last
        self._num_prompt[seat] = sequence.num_prompt
        self._slot[seat] = sequence.slot
        self._rank_rows[seat] = sequence.rank_rows
        self._is_ready[seat] = sequence.num_scheduled + 1 < sequence.last

    def remove(self, sequence: Sequence) -> None:
        """Lets a sequence go, if it is here."""
        seat = sequence.seat
        if seat >= 0 and self._members[seat] is sequence:
            self._members[seat] = None
            self._is_ready[seat] = False
            sequence.num_scheduled = sequence.num_charged = int(self._position[seat])

    def plan(self, grow: Callable[[Sequence], int | None]) -> tuple[Decodes, list[Sequence]]:
        """Plans a row of each, and returns the rows and their sequences.

        A row whose page is full needs another; where there is none, its sequence stands back in this step, or gives way.

        Args:
            grow: Gets a sequence one page more; may make others leave, or itself.
        """
        seats = np.flatnonzero(self._is_ready)
        new_pages: dict[int, tuple[int, int, int]] = {}
        full = seats[self._position[seats] >= self._room[seats]]
        if full.size:
            new_pages = self._grow(full, grow)
            stays = self._is_ready.copy()
            stays[[seat for seat in full.tolist() if seat not in new_pages]] = False
            seats = np.flatnonzero(stays)
        if not seats.size:
            return NO_DECODES, []
        seats = seats[np.argsort(self._slot[seats], kind="stable")]
        starts = self._position[seats]
        self._position[seats] = starts + 1
        self._is_ready[seats] = starts + 2 < self._last[seats]
        members = self._members
        sequences = [member for seat in seats.tolist() if (member := members[seat]) is not None]
        assert len(sequences) == len(seats), "only members are ready"
        pages = tuple(page for seat, page in new_pages.items() if self._members[seat] is not None)
        return Decodes(self._picks(seats, starts, sequences), self._slot[seats], starts, pages), sequences

    def charge(self, decodes: Decodes, sequences: list[Sequence]) -> float:
        """Charges planned rows, the rank rows of an adapter split among those that share it; returns what they cost."""
        if not sequences:
            return 0.0
        slots = decodes.slots + 1
        shared = self._rank_rows[decodes.picks.seats] / np.bincount(slots)[slots]
        costs = self._prices.decode_token + self._prices.rank_row * shared
        for sequence, cost in zip(sequences, costs.tolist(), strict=True):
            account = sequence.account
            account.service += cost / account.weight
        return float(costs.sum())

    def reaching_last(self, decodes: Decodes) -> list[int]:
        """Returns the rows whose token is the last that their sequences may have."""
        rows: list[int] = np.flatnonzero(decodes.starts + 2 >= self._last[decodes.picks.seats]).tolist()
        return rows

    def filling_page(self, decodes: Decodes) -> list[int]:
        """Returns the rows that are the last of their page."""
        rows: list[int] = np.flatnonzero((decodes.starts + 1) % self._page_size == 0).tolist()
        return rows

    def _grow(self, seats: Integers, grow: Callable[[Sequence], int | None]) -> dict[int, tuple[int, int, int]]:
        """Gets pages for rows, the oldest sequences first; returns by seat what was got."""
        new_pages: dict[int, tuple[int, int, int]] = {}
        oldest_first = sorted((member for seat in seats.tolist() if (member := self._members[seat]) is not None), key=_order)
        for sequence in oldest_first:
            seat = sequence.seat
            if seat < 0 or not self._is_ready[seat]:
                continue  # it gave way to an older one
            page = grow(sequence)
            if page is not None:
                place = int(self._position[seat]) // self._page_size
                new_pages[seat] = (seat, place, page)
                self._room[seat] += self._page_size
        return new_pages

    def _picks(self, seats: Integers, starts: Integers, sequences: list[Sequence]) -> Picks:
        indexes = starts + 1 - self._num_prompt[seats]
        special = {}
        for row in np.flatnonzero(self._is_special[seats]).tolist():
            sequence = sequences[row]
            special[row] = Pick(sequence.seat, sequence.submit.sampling, int(indexes[row]), sequence.mask)
        return Picks(seats, [sequence.submit.sampling for sequence in sequences], indexes, special)


def _order(sequence: Sequence) -> int:
    return sequence.order
