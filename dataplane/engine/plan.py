"""The records between scheduler and runner: what one step computes, and what became of it. Integers only, many in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.engine.messages import Failed, Logprobs, NotFinite, Sampling, Tokens


class TokenMask(Protocol):
    """Which tokens one sequence's grammar allows next. Owned by the sequence; no method waits for the mask.

    The sampler calls `allowed` and `advance`, the scheduler the rest.
    """

    @property
    def is_ready(self) -> bool:
        """Whether the mask of the next output token is there, or the reason why there is none."""

    def begin(self) -> None:
        """Starts the work for the first mask, beside the steps. Calling it again does nothing."""

    def allowed(self, index: int) -> bytes | None:
        """Returns one bit a token for output token `index`, least significant first; None while that mask is not there.

        Raises:
            VeneerError: The grammar cannot go on; the request must end.
        """

    def advance(self, token: int) -> None:
        """Takes the chosen token; what is allowed after it is found meanwhile, not here."""

    def stop(self) -> None:
        """Ends the work, and frees what the matcher holds."""


Integers = npt.NDArray[np.int64]


class Pick(NamedTuple):
    """A row whose token is chosen.

    Attributes:
        seat: The sequence's row in per-sequence device state.
        sampling: How it is chosen.
        sample_index: Index of the token in the output.
        mask: What the sequence's grammar allows; None without a grammar.
    """

    seat: int
    sampling: Sampling
    sample_index: int
    mask: TokenMask | None = None


class PlannedRows(NamedTuple):
    """Consecutive rows of one sequence whose tokens are known: part of its prompt, or of what a preempted one lost.

    Attributes:
        seat: The sequence's row in per-sequence device state.
        slot: Its adapter's slot, -1 for the base.
        start: Position of the first row.
        count: Number of rows.
        ids: Token ids of the rows.
        new_pages: Pages added to the sequence's table with this step; all but the shared ones must be cleared first.
        num_pages_before: Entries of the table that were there already.
        num_shared_pages: The first so many of `new_pages` hold this very beginning already: they are shared, and neither cleared
            nor written.
        sampling: How to choose the token after the last row; None when the rows do not reach the end of the sequence.
        sample_index: Index of that token in the output.
        history: Prompt and output so far when the seat's state must be set up (first rows of a sampling that is not plain), else
            None.
        num_prompt: Tokens of the history that are the prompt.
        rules: The request's sampling, together with the history.
        plain: Whether `sampling.is_plain`.
        mask: What the sequence's grammar allows; None without a grammar.
        score_start: The first of these rows whose logits say how likely the prompt's next token was, counted from `start`.
        targets: The prompt tokens after that row and the rows that follow it; empty: no row is scored.
        num_top: Likeliest tokens to report beside each of the targets.
        num_base: The first so many rows stand before the adapter starts: they are the base's, whatever the slot.
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
    num_prompt: int = 0
    rules: Sampling | None = None
    plain: bool = True
    mask: TokenMask | None = None
    score_start: int = 0
    targets: tuple[int, ...] = ()
    num_top: int = 0
    num_base: int = 0

    @property
    def pick(self) -> Pick:
        """The last row as one whose token is chosen."""
        assert self.sampling is not None, "the rows reach the end of the sequence"
        return Pick(self.seat, self.sampling, self.sample_index, self.mask)


@dataclass(frozen=True, slots=True, eq=False)
class Picks:
    """The rows of a step whose tokens are chosen, in columns: most are plain, and nothing is made for each of these.

    Attributes:
        seats: int64 [S].
        settings: S settings.
        sample_indexes: int64 [S].
        special: By row, the picks whose sampling is not plain.
    """

    seats: Integers
    settings: Sequence[Sampling]
    sample_indexes: Integers
    special: Mapping[int, Pick]

    @staticmethod
    def of(picks: Sequence[Pick]) -> Picks:
        """Puts picks into columns."""
        return Picks(
            np.array([pick.seat for pick in picks], dtype=np.int64),
            [pick.sampling for pick in picks],
            np.array([pick.sample_index for pick in picks], dtype=np.int64),
            {row: pick for row, pick in enumerate(picks) if not pick.sampling.is_plain},
        )

    def __len__(self) -> int:
        return len(self.settings)

    @property
    def are_greedy(self) -> bool:
        """Whether each of them is plain and takes the likeliest token."""
        return not self.special and all(sampling.temperature == 0 for sampling in self.settings)

    def at(self, rows: Sequence[int]) -> Picks:
        """Returns some rows by themselves."""
        settings = [self.settings[row] for row in rows]
        special = {place: self.special[row] for place, row in enumerate(rows) if row in self.special}
        return Picks(self.seats[list(rows)], settings, self.sample_indexes[list(rows)], special)

    def followed_by(self, later: Picks) -> Picks:
        """Returns these and other rows as one."""
        first = len(self)
        return Picks(
            np.concatenate((self.seats, later.seats)),
            [*self.settings, *later.settings],
            np.concatenate((self.sample_indexes, later.sample_indexes)),
            {**self.special, **{first + row: pick for row, pick in later.special.items()}},
        )


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """Rows of sequences that decode, one each, in columns and ordered by slot. All of them sample.

    A row's token is the one that was sampled last for its seat. It may not be known yet when the step is planned, so it is taken
    from the device always.

    Attributes:
        picks: Their seats, and how the tokens that follow are chosen.
        slots: int32 [D], adapters' slots, -1 for the base.
        starts: int64 [D], positions.
        new_pages: (seat, place in its table, page) of pages that are added with this step; they must be cleared first.
    """

    picks: Picks
    slots: npt.NDArray[np.int32]
    starts: Integers
    new_pages: tuple[tuple[int, int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.starts)


NO_DECODES = Decodes(Picks.of(()), np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))
"""None."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What came of rows that ask for more than a token.

    Attributes:
        token: The chosen token; None when the rows do not sample, or there is a fault.
        logprobs: Of that token; None where not asked for.
        prompt: Of the rows' `targets`.
        fault: Status and message when the request's own rules leave no choice.
        is_held: No token was chosen, since the mask of the sequence's grammar is not there yet. The row is computed again.
    """

    token: int | None
    logprobs: Logprobs | None = None
    prompt: tuple[Logprobs, ...] = ()
    fault: tuple[str, str] | None = None
    is_held: bool = False


Result = int | Chosen | None
"""What came of a row that samples or is scored: a token; more than a token; or None, since logits were not finite."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step: the rows of sequences that decode come first, then single rows, then longer chunks; each group by slot.

    Attributes:
        rows: What to compute beside `decodes`.
        num_tokens: Rows in all.
        missed: Versions of waiting requests that are not on the device.
        decodes: The sequences that decode.
    """

    rows: tuple[PlannedRows, ...]
    num_tokens: int
    missed: frozenset[str]
    decodes: Decodes = NO_DECODES


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a committed step means for requests."""

    tokens: Tokens
    failed: tuple[Failed, ...]
    not_finite: tuple[NotFinite, ...]
