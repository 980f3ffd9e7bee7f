"""The records between scheduler and runner: what one step computes, and what became of it. Integers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dataplane.engine.messages import Delta, Failed, NotFinite, Sampling


class PlannedRows(NamedTuple):
    """Consecutive rows of one sequence in a step.

    A named tuple, since a step makes one for each running sequence: a frozen dataclass of this size takes 1.4 µs more.

    Attributes:
        seat: The sequence's row in per-sequence device state.
        slot: Its adapter's slot, -1 for the base.
        start: Position of the first row.
        count: Number of rows.
        ids: Token ids of the rows that are known; when one is missing, the last row's id is the token sampled last for this seat.
        new_pages: Pages added to the sequence's table with this step; all but the shared ones must be cleared first.
        num_pages_before: Entries of the table that were there already.
        num_shared_pages: The first so many of `new_pages` hold this very beginning already: they are shared, and neither cleared
            nor written.
        sampling: How to choose the token after the last row; None when the rows do not reach the end of the sequence.
        sample_index: Index of that token in the output.
        history: Prompt and output so far when the seat's seen tokens must be set up (a repetition penalty, first rows), else
            None.
    """

    seat: int
    slot: int
    start: int
    count: int  # type: ignore[assignment]  # hides `tuple.count`, which nobody wants of a record
    ids: tuple[int, ...]
    new_pages: tuple[int, ...]
    num_pages_before: int
    sampling: Sampling | None
    sample_index: int
    history: tuple[int, ...] | None
    num_shared_pages: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Single rows come first, then longer chunks; each group is ordered by slot.

    Attributes:
        rows: What to compute.
        num_tokens: Rows in all.
        missed: Versions of waiting requests that are not on the device.
    """

    rows: tuple[PlannedRows, ...]
    num_tokens: int
    missed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a committed step means for requests."""

    deltas: tuple[Delta, ...]
    failed: tuple[Failed, ...]
    not_finite: tuple[NotFinite, ...]
