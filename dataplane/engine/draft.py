"""One step while it is planned: which rows of which sequences, and what they cost. Integers only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from dataplane.engine.decoders import Decoders
from dataplane.engine.limits import Limits
from dataplane.engine.plan import NO_DECODES, Plan, PlannedRows
from dataplane.engine.sequence import MAX_SCORED_ROWS, Sequence


class Draft:
    """Collects rows; what is added counts as done. Made for each step by the scheduler.

    Args:
        limits: Limits of the scheduler.
        decoders: Where sequences go whose known tokens are all planned.
        active: How many sequences run with a version; read only.

    Attributes:
        budget: Rows that may still be added.
        missed: Versions of waiting requests that are not on the device.
        cost: What the rows cost, by `Prices`.
    """

    def __init__(self, limits: Limits, decoders: Decoders, *, active: Mapping[str, int]) -> None:
        self._prices = limits.prices
        self._decoders = decoders
        self._active = active
        self._max_tokens = limits.max_step_tokens
        self._scores_left = MAX_SCORED_ROWS
        self._decodes = NO_DECODES
        self._decoding: list[Sequence] = []
        self._planned: list[tuple[Sequence, PlannedRows]] = []
        self.budget = limits.max_step_tokens
        self.missed: set[str] = set()
        self.cost = 0.0

    def finish(self) -> tuple[Plan, list[Sequence], list[Sequence]]:
        """Returns the step, the sequences of its decodes, and those of its other rows."""
        self._planned.sort(key=_place_in_step)
        rows = tuple(item[1] for item in self._planned)
        plan = Plan(rows, self.num_rows, frozenset(self.missed), self._decodes)
        return plan, self._decoding, [item[0] for item in self._planned]

    @property
    def num_rows(self) -> int:
        """Rows added so far."""
        return self._max_tokens - self.budget

    def cap(self, budget: int) -> None:
        """Lets no more than so many rows be added."""
        self._max_tokens -= max(0, self.budget - budget)
        self.budget = min(self.budget, budget)

    def work(self, num_rank_rows: int) -> float:
        """Returns what all rows so far cost to compute, paid for or not, beside so many rank rows; see `Prices`."""
        prices = self._prices
        num_single = len(self._decodes) + sum(rows.count == 1 for _, rows in self._planned)
        num_chunk = self.num_rows - num_single
        return num_single * prices.decode_token + num_chunk * prices.prefill_token + num_rank_rows * prices.rank_row

    @property
    def may_score(self) -> bool:
        """Whether a prompt's tokens may still be scored in this step."""
        return self._scores_left > 0

    def room_for(self, sequence: Sequence) -> int:
        """Returns how many rows of a sequence may be added; none when it is scored and the step scores enough already."""
        count = min(self.budget, sequence.num_remaining)
        return min(count, self._scores_left) if sequence.is_scored else count

    def add_decodes(self, grow: Callable[[Sequence], int | None]) -> None:
        """Adds a row of each sequence that decodes; `grow` gets one a page more."""
        self._decodes, self._decoding = self._decoders.plan(grow)
        self.cost += self._decoders.charge(self._decodes)
        self.budget -= len(self._decodes)

    def add(self, sequence: Sequence, count: int, *, new_pages: Iterable[int] = (), num_shared: int = 0) -> None:
        """Adds the next rows of a sequence.

        Args:
            sequence: The sequence.
            count: Rows, at least one; at most `room_for` it.
            new_pages: Pages that it was given for them; they are the last of its own.
            num_shared: The first so many of them were filled by others.
        """
        self._planned.append((sequence, self._plan_rows(sequence, count, new_pages, num_shared=num_shared)))
        self.budget -= count

    def _plan_rows(self, sequence: Sequence, count: int, new_pages: Iterable[int], *, num_shared: int = 0) -> PlannedRows:
        """Counts the rows as done, charges them and describes them."""
        start = sequence.num_scheduled
        end = start + count
        submit, tokens = sequence.submit, sequence.tokens
        samples = end == len(tokens)
        pages = tuple(new_pages)
        sampling = submit.sampling
        num_before = len(sequence.pages) - len(pages)
        sets_up = not num_before and not sequence.plain
        score_start, targets = self._score(sequence, start, end) if sequence.is_scored else (0, ())
        num_base = min(max(sequence.active_from - start, 0), count)
        sequence.num_scheduled = end
        if sequence.is_ahead and end == sequence.num_ahead:
            sequence.preempting = True
        if end > sequence.num_charged:
            self._charge(sequence, start, end)
        if samples:
            sequence.is_unfinished = False
            sequence.account.unfinished.remove(sequence)
            self._decoders.add(sequence)
        return PlannedRows(
            seat=sequence.seat,
            slot=sequence.slot if num_base < count else -1,
            start=start,
            count=count,
            ids=submit.prompt[start:end] if end <= sequence.num_prompt else tuple(tokens[start:end]),
            new_pages=pages,
            num_pages_before=num_before,
            sampling=sampling if samples else None,
            sample_index=len(tokens) - len(submit.prompt),
            history=tuple(tokens) if sets_up else None,
            num_shared_pages=num_shared,
            num_prompt=sequence.num_prompt,
            rules=sampling if sets_up else None,
            plain=sequence.plain,
            mask=sequence.mask,
            score_start=score_start,
            targets=targets,
            num_top=sampling.prompt_logprobs or 0,
            num_base=num_base,
        )

    def _score(self, sequence: Sequence, start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Counts the prompt tokens after rows [start, end) as scored; returns the first such row, from `start` on, and them."""
        prompt = sequence.submit.prompt
        first, last = max(start, sequence.num_targets), min(end, len(prompt) - 1)
        targets = prompt[first + 1 : last + 1]
        sequence.num_targets = max(last, sequence.num_targets)
        sequence.is_scored = sequence.num_targets < len(prompt) - 1
        self._scores_left -= len(targets)
        return first - start, targets

    def _charge(self, sequence: Sequence, start: int, end: int) -> None:
        """Charges the positions that were neither computed before nor found in the cache, and their part of the rank rows."""
        prices, charged, lease = self._prices, sequence.num_charged, sequence.lease
        count = end - max(start, charged)
        cost = count * (prices.prefill_token if start < sequence.num_prompt else prices.decode_token)
        if lease is not None and end > sequence.active_from:
            cost += prices.rank_row * sequence.rank_rows / self._active[lease.version]
        sequence.num_charged = end
        sequence.account.service += cost / sequence.account.weight
        self.cost += cost


def _place_in_step(item: tuple[Sequence, PlannedRows]) -> tuple[bool, int]:
    return item[1].count > 1, item[1].slot
