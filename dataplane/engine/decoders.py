"""Sequences that decode, in columns: a step plans all of them with a few operations on whole arrays."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

import numpy as np

from dataplane.engine.accounts import Ledger
from dataplane.engine.limits import Limits
from dataplane.engine.messages import FinishReason
from dataplane.engine.plan import NO_DECODES, Decodes, Integers, Pick, Picks
from dataplane.engine.sequence import Sequence

NAME_AFTER = 8
"""Pages that a sequence fills before they are named, unless it leaves: what names a page is cold again for each one."""


class Decoders:
    """The sequences whose every known token is computed or planned, so that they take one row in each step.

    While a sequence is here, its `num_scheduled` is kept in a column, by seat; it goes back to the sequence when it leaves. The
    other columns stay as they are until the seat is another's, so that what is in flight can be taken. Owned by the seating.

    Args:
        limits: Limits of the scheduler.
        ledger: Where tenants are charged.
        page_size: Tokens in a KV page.
    """

    def __init__(self, limits: Limits, ledger: Ledger, *, page_size: int) -> None:
        size = limits.max_sequences
        self._ledger = ledger
        self._prices = limits.prices
        self._page_size = page_size
        self._members = np.full(size, None, dtype=np.object_)
        self._samplings = np.full(size, None, dtype=np.object_)
        self._request_ids = np.full(size, "", dtype=np.object_)
        self._tokens = np.full(size, None, dtype=np.object_)
        self._stops = np.full(size, None, dtype=np.object_)
        self._is_ready = np.zeros(size, dtype=np.bool_)
        self._is_special = np.zeros(size, dtype=np.bool_)
        self._position = np.zeros(size, dtype=np.int64)
        self._room = np.zeros(size, dtype=np.int64)
        self._last = np.zeros(size, dtype=np.int64)
        self._num_prompt = np.zeros(size, dtype=np.int64)
        self._slot = np.zeros(size, dtype=np.int32)
        self._rank_rows = np.zeros(size, dtype=np.int64)
        self._account = np.zeros(size, dtype=np.int64)

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence that has a seat and whose known tokens are all computed or planned."""
        seat = sequence.seat
        self._members[seat] = sequence
        self._samplings[seat] = sequence.submit.sampling
        self._request_ids[seat] = sequence.request_id
        self._tokens[seat] = sequence.tokens
        self._stops[seat] = sequence.stops
        self._is_special[seat] = not sequence.plain
        self._position[seat] = sequence.num_scheduled
        self._room[seat] = len(sequence.pages) * self._page_size
        self._last[seat] = sequence.last
        self._num_prompt[seat] = sequence.num_prompt
        self._slot[seat] = sequence.slot
        self._rank_rows[seat] = sequence.rank_rows
        self._account[seat] = sequence.account.row
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
        is_full = self._is_ready & (self._position >= self._room)
        new_pages = self._grow(is_full.nonzero()[0], grow)
        seats = (self._is_ready & (self._position < self._room)).nonzero()[0]
        if not seats.size:
            return NO_DECODES, []
        seats = seats[self._slot[seats].argsort(kind="stable")]
        starts = self._position[seats]
        self._position[seats] = starts + 1
        self._is_ready[seats] = starts + 2 < self._last[seats]
        sequences: list[Sequence] = self._members[seats].tolist()
        return Decodes(self._picks(seats, starts, sequences), self._slot[seats], starts, new_pages), sequences

    def charge(self, decodes: Decodes) -> float:
        """Charges planned rows, the rank rows of an adapter split among those that share it; returns what they cost."""
        if not decodes:
            return 0.0
        seats, slots = decodes.picks.seats, decodes.slots + 1
        shared = self._rank_rows[seats] / np.bincount(slots)[slots]
        costs = self._prices.decode_token + self._prices.rank_row * shared
        self._ledger.charge(self._account[seats], costs)
        return float(costs.sum())

    def append(self, decodes: Decodes, tokens: list[int]) -> dict[int, FinishReason]:
        """Appends a token to the sequence of each row; returns the rows that end with it, and why.

        A sequence may have left since the rows were planned, but none may have ended.
        """
        seats = decodes.picks.seats
        for known, token in zip(self._tokens[seats].tolist(), tokens, strict=True):
            known.append(token)
        last = (decodes.starts + 2 >= self._last[seats]).nonzero()[0].tolist()
        ends: dict[int, FinishReason] = dict.fromkeys(last, "length")
        stops = map(operator.contains, self._stops[seats].tolist(), tokens)
        return ends | dict.fromkeys(itertools.compress(itertools.count(), stops), "stop")

    def request_ids(self, decodes: Decodes) -> list[str]:
        """Returns whose each row is."""
        ids: list[str] = self._request_ids[decodes.picks.seats].tolist()
        return ids

    def prompt_tokens(self, decodes: Decodes) -> list[int]:
        """Returns how many tokens each row's prompt has."""
        counts: list[int] = self._num_prompt[decodes.picks.seats].tolist()
        return counts

    def filling_pages(self, decodes: Decodes) -> list[int]:
        """Returns the rows that are the last of a page, of one in `NAME_AFTER` pages."""
        rows: list[int] = ((decodes.starts + 1) % (NAME_AFTER * self._page_size) == 0).nonzero()[0].tolist()
        return rows

    def _grow(self, seats: Integers, grow: Callable[[Sequence], int | None]) -> tuple[tuple[int, int, int], ...]:
        """Gets pages for rows, the oldest sequences first; returns those that are still held in the end, as in `Decodes`."""
        new_pages = []
        for sequence in sorted(self._members[seats].tolist(), key=_order):
            seat = sequence.seat
            if self._members[seat] is not sequence:
                continue  # it gave way to an older one
            page = grow(sequence)
            if page is not None:
                new_pages.append((seat, int(self._room[seat]) // self._page_size, page))
                self._room[seat] += self._page_size
        return tuple(entry for entry in new_pages if self._members[entry[0]] is not None)

    def _picks(self, seats: Integers, starts: Integers, sequences: list[Sequence]) -> Picks:
        indexes = starts + 1 - self._num_prompt[seats]
        special = {}
        for row in self._is_special[seats].nonzero()[0].tolist():
            sequence = sequences[row]
            special[row] = Pick(sequence.seat, sequence.submit.sampling, int(indexes[row]), sequence.mask)
        return Picks(seats, self._samplings[seats].tolist(), indexes, special)


def _order(sequence: Sequence) -> int:
    return sequence.order
