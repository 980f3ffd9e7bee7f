"""The records between scheduler and runner: what one step computes, and what became of it. Integers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dataplane.engine.messages import Delta, Failed, Logprobs, NotFinite, Sampling


class TokenMask(Protocol):
    """Which tokens one sequence's grammar allows next. Owned by the sequence; the sampler alone calls it."""

    def allowed(self) -> bytes:
        """Returns one bit a token, least significant first; waits if they are not known yet.

        Raises:
            VeneerError: The grammar cannot go on; the request must end.
        """

    def advance(self, token: int) -> None:
        """Takes the chosen token; what is allowed after it is found meanwhile, not here."""


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


@dataclass(frozen=True, slots=True)
class Chosen:
    """What came of rows that ask for more than a token.

    Attributes:
        token: The chosen token; None when the rows do not sample, or there is a fault.
        logprobs: Of that token; None where not asked for.
        prompt: Of the rows' `targets`.
        fault: Status and message when the request's own rules leave no choice.
    """

    token: int | None
    logprobs: Logprobs | None = None
    prompt: tuple[Logprobs, ...] = ()
    fault: tuple[str, str] | None = None


Result = int | Chosen | None
"""What came of rows that sample or are scored: a token; more than a token; or None, since logits were not finite."""


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
