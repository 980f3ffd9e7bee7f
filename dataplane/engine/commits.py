"""What the results of a step mean for requests: tokens, ends and failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from dataplane.engine.admission import Admission
from dataplane.engine.messages import Failed, FinishReason, Logprobs, NotFinite, Tokens
from dataplane.engine.pace import Pace
from dataplane.engine.plan import Outcome, Plan, Result
from dataplane.engine.prefix_cache import PrefixCache
from dataplane.engine.requests import Requests
from dataplane.engine.seating import Seating
from dataplane.engine.sequence import Phase, Sequence


class Flight(NamedTuple):
    """A plan that is not committed yet.

    Attributes:
        plan: The plan.
        decoding: The sequences of its decodes.
        others: Those of its other rows.
        cost: What is charged for it.
        work: What its rows cost, paid for or not.
        is_full: Whether requests wait that it could not take.
    """

    plan: Plan
    decoding: list[Sequence]
    others: list[Sequence]
    cost: float
    work: float
    is_full: bool


@dataclass(slots=True)
class _News:
    """What a step brought, as far as it is taken; the columns of `Tokens` first."""

    request_ids: list[str] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    finishes: list[tuple[int, FinishReason, int]] = field(default_factory=list)
    logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, tuple[Logprobs, ...]]] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    not_finite: list[NotFinite] = field(default_factory=list)

    def outcome(self) -> Outcome:
        """Returns it as a record."""
        tokens = Tokens(
            tuple(self.request_ids),
            tuple(self.indexes),
            tuple(self.ids),
            tuple(self.prompt_tokens),
            tuple(self.finishes),
            tuple(self.logprobs),
            tuple(self.prompt_logprobs),
        )
        return Outcome(tokens, tuple(self.failed), tuple(self.not_finite))


class Commits:
    """Owns the plans that are in flight and takes their results, oldest first. Owned by the scheduler."""

    def __init__(
        self, requests: Requests, seating: Seating, *, admission: Admission, prefix: PrefixCache, pace: Pace | None
    ) -> None:
        self._requests = requests
        self._seating = seating
        self._admission = admission
        self._prefix = prefix
        self._pace = pace
        self._flights: deque[Flight] = deque()
        self._unreported: set[Sequence] = (
            set()
        )  # held before their first token, so that the prompt's logprobs are still to be told

    def expect(self, flight: Flight) -> None:
        """Notes that a plan is in flight."""
        self._flights.append(flight)
        self._seating.take_off(flight.plan, flight.others)

    def take(self, plan: Plan, results: Seq[Result], *, seconds: float) -> Outcome:
        """Takes the results of the oldest plan in flight; see `Scheduler.commit`."""
        flight = self._flights.popleft()
        assert flight.plan is plan, "plans are committed in the order in which they were made"
        self._seating.land()
        self._admission.observe(flight.cost, seconds, is_full=flight.is_full)
        if self._pace is not None:
            self._pace.observe(flight.work, seconds)
        news = _News()
        num_decodes = len(plan.decodes)
        self._take_decodes(flight, results[:num_decodes], news)
        of_others = iter(results[num_decodes:])
        for sequence, rows in zip(flight.others, plan.rows, strict=True):
            if rows.sampling is not None or rows.targets:
                self._take(sequence, next(of_others), news, num_computed=rows.start + rows.count)
            elif sequence.is_ahead and sequence.phase is not Phase.ENDED:
                self._prefix.keep(sequence, rows.start + rows.count)
        self._seating.clear()
        return news.outcome()

    def _take_decodes(self, flight: Flight, results: Seq[Result], news: _News) -> None:
        """Takes the results of decode rows: together where each is just a token of a request that goes on."""
        decodes, sequences = flight.plan.decodes, flight.decoding
        self._unreported = {sequence for sequence in self._unreported if sequence.phase is not Phase.ENDED}
        if self._unreported or self._seating.has_ended_in_flight or not set(map(type, results)) <= {int}:
            for sequence, start, result in zip(sequences, decodes.starts.tolist(), results, strict=True):
                if start + 1 == len(sequence.tokens):  # else the row before it was held, and this one had no token to start from
                    self._take(sequence, result, news, num_computed=start + 1)
            return
        tokens = cast("list[int]", results)
        decoders = self._seating.decoders
        for row in decoders.filling_pages(decodes):
            self._prefix.keep(sequences[row], int(decodes.starts[row]) + 1)
        ends = decoders.append(decodes, tokens)
        news.request_ids += decoders.request_ids(decodes)
        news.indexes += decodes.picks.sample_indexes.tolist()
        news.ids += tokens
        news.prompt_tokens += decoders.prompt_tokens(decodes)
        news.finishes += ((row, finish, sequences[row].num_cached) for row, finish in ends.items())
        for row in ends:
            self._end(sequences[row])

    def _take(self, sequence: Sequence, result: Result, news: _News, *, num_computed: int) -> None:
        """Takes what came of one sequence's rows, of which `num_computed` positions are computed now."""
        request_id = sequence.request_id
        if sequence.phase is Phase.ENDED:
            return
        if isinstance(result, int):
            self._append(sequence, result, news, num_computed=num_computed)
        elif result is None:
            news.failed.append(Failed(request_id, "INTERNAL", "the model gave values that are not finite"))
            news.not_finite.append(NotFinite(sequence.submit.version, request_id))
            self._requests.end(sequence)
            self._prefix.distrust(sequence)
        elif result.fault is not None:
            news.failed.append(Failed(request_id, *result.fault))
            self._requests.end(sequence)
        else:
            sequence.prompt_scores += result.prompt
            if result.is_held:
                self._seating.hold(sequence, num_computed - 1)
                if sequence.prompt_scores and not sequence.num_output:
                    self._unreported.add(sequence)
            elif result.token is not None:
                if result.logprobs is not None:
                    news.logprobs.append((len(news.ids), result.logprobs))
                self._append(sequence, result.token, news, num_computed=num_computed)

    def _append(self, sequence: Sequence, token: int, news: _News, *, num_computed: int) -> None:
        """Takes a token whose row led to finite logits; names the pages that are full now, and ends what it ends."""
        self._prefix.keep(sequence, num_computed)
        finish: FinishReason | None = None
        if token in sequence.stops:
            finish = "stop"
        elif len(sequence.tokens) + 1 >= sequence.last:
            finish = "length"
        if finish is not None:
            news.finishes.append((len(news.ids), finish, sequence.num_cached))
        if sequence.prompt_scores and not sequence.num_output:
            news.prompt_logprobs.append((len(news.ids), tuple(sequence.prompt_scores)))
            self._unreported.discard(sequence)
        news.request_ids.append(sequence.request_id)
        news.indexes.append(sequence.num_output)
        news.ids.append(token)
        news.prompt_tokens.append(sequence.num_prompt)
        sequence.tokens.append(token)
        if finish is not None:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._prefix.keep(sequence, len(sequence.tokens) - 1)
        self._admission.finished(sequence.num_output)
        self._requests.end(sequence)
