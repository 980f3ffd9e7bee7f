"""Decides what each step computes: who runs, how far, on which pages. Integers only; no torch, no clock of its own, no I/O."""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from dataplane.engine.fairness import FairQueue
from dataplane.engine.kv_cache import PagePool
from dataplane.engine.limits import Limits
from dataplane.engine.messages import Delta, Failed, FinishReason, NotFinite, Submit
from dataplane.engine.plan import Chosen, Outcome, Plan, PlannedRows, Result, TokenMask
from dataplane.engine.sequence import MAX_SCORED_ROWS, Phase, Sequence
from dataplane.lora.residency import Lease
from kernels.rows import aligned_rank
from veneer.errors import InvalidArgumentError, ResourceExhaustedError, Violation


class Adapters(Protocol):
    """What the scheduler needs to know of adapters on the device."""

    def acquire(self, version: str) -> Lease | None:
        """Takes a lease, or returns None when the version is not on the device; then it is remembered as wanted."""

    def release(self, lease: Lease) -> None:
        """Gives a lease back."""

    def withdraw(self, version: str) -> None:
        """Notes that nobody waits for a version any more."""

    def is_starved(self, version: str) -> bool:
        """Whether the version could be loaded but for the slots and bytes that leases hold."""


class _Lack(enum.Enum):
    """What a waiting sequence lacks: pages; rank rows or a slot; or only that its image comes, or the barrier goes."""

    PAGES = "pages"
    ROOM = "room"
    TURN = "turn"


class Scheduler:
    """Owns all sequences and the page pool. Called by the step loop's thread only.

    A step is `plan = schedule(now)`, run, `commit(plan, tokens)`. `schedule` counts what it plans as done, so the next step may
    be planned before this one is committed: its decode rows then take the token that the device sampled last. A sequence that
    ends while rows of it are still in flight keeps pages, seat and lease until they are committed; their token is dropped.
    """

    def __init__(self, limits: Limits, pool: PagePool, adapters: Adapters) -> None:
        assert limits.max_step_tokens >= limits.max_sequences, "every running sequence decodes in every step"
        assert pool.num_pages >= pool.pages_for(limits.max_context), "one sequence always fits"
        self._limits = limits
        self._pool = pool
        self._adapters = adapters
        self._sequences: dict[str, Sequence] = {}
        self._waiting = FairQueue()
        self._preempted: list[Sequence] = []
        self._running: list[Sequence] = []
        self._seats = list(range(limits.max_sequences - 1, -1, -1))
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._active: dict[str, int] = {}
        self._active_rows = 0
        self._awaited: dict[str, int] = {}
        self._barrier: Sequence | None = None
        self._scores_left = 0
        self._num_submitted = 0
        self._num_admitted = 0
        self._in_flight: deque[tuple[Plan, tuple[Sequence, ...]]] = deque()

    @property
    def num_running(self) -> int:
        """Sequences that hold a seat."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, the preempted ones included."""
        return len(self._waiting) + len(self._preempted)

    @property
    def num_pages_used(self) -> int:
        """Pages that sequences hold."""
        return self._pool.num_pages - self._pool.num_free

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of an unfinished request."""
        while self._deadlines and self._deadlines[0][2].phase is Phase.ENDED:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that have not ended, oldest first."""
        return tuple(self._sequences)

    def fail_waiting(self, version: str, *, status: str, message: str) -> list[Failed]:
        """Ends every request that waits for a version and has not run yet."""
        waiting = [
            sequence
            for sequence in self._sequences.values()
            if sequence.submit.version == version and sequence.phase is Phase.WAITING and sequence.lease is None
        ]
        for sequence in waiting:
            self._end(sequence)
        return [Failed(sequence.submit.request_id, status, message) for sequence in waiting]

    def add(self, submit: Submit, now: float, *, mask: TokenMask | None = None) -> None:
        """Queues a request; `mask` is what its grammar allows.

        Raises:
            InvalidArgumentError: The id is in use, or the prompt does not leave room for one token.
            ResourceExhaustedError: Too many requests wait.
        """
        limit = self._limits.max_context
        if submit.request_id in self._sequences:
            raise InvalidArgumentError.of([Violation("request_id", "is in use by a running request")])
        if not 1 <= len(submit.prompt) < limit:
            raise InvalidArgumentError.of(
                [Violation("prompt", f"must have 1 to {limit - 1} tokens (context of {limit}), has {len(submit.prompt)}")]
            )
        if submit.sampling.max_tokens < 1:
            raise InvalidArgumentError.of([Violation("sampling.max_tokens", "must be at least 1")])
        if self.num_waiting >= self._limits.max_waiting:
            raise ResourceExhaustedError(f"{self.num_waiting} requests wait already", retry_after_s=1.0)
        deadline = None if submit.deadline_s is None else now + submit.deadline_s
        sequence = Sequence(submit, deadline=deadline, max_context=limit, mask=mask)
        self._sequences[submit.request_id] = sequence
        self._waiting.push(sequence)
        if submit.version is not None:
            self._awaited[submit.version] = self._awaited.get(submit.version, 0) + 1
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, self._num_submitted, sequence))
            self._forget_ended_deadlines()
        self._num_submitted += 1

    def abort(self, request_id: str) -> bool:
        """Ends a request without an event; returns whether it was there."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def pause(self, request_id: str, *, paused: bool) -> None:
        """Keeps a request out of steps, or lets it run again. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.paused = paused

    def expire(self, now: float) -> list[Failed]:
        """Ends every request whose deadline has passed."""
        failed = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            where = "waiting" if sequence.phase is Phase.WAITING else f"generating token {sequence.num_output}"
            failed.append(Failed(sequence.submit.request_id, "DEADLINE_EXCEEDED", f"the deadline passed while {where}"))
            self._end(sequence)
        return failed

    def schedule(self) -> Plan | None:
        """Plans a step, or returns None when nothing can run."""
        planned: list[tuple[Sequence, PlannedRows]] = []
        budget = self._limits.max_step_tokens
        self._scores_left = MAX_SCORED_ROWS
        for sequence in tuple(self._running):
            if sequence.num_remaining == 1 and not sequence.is_scored and sequence.may_run:
                pages = self._grow(sequence)
                if pages is not None:
                    planned.append((sequence, self._plan_rows(sequence, 1, pages)))
                    budget -= 1
        for sequence in self._running:
            wants = sequence.num_remaining > 1 or sequence.is_scored
            if budget and wants and sequence.may_run:
                count = self._chunk(sequence, budget)
                if count:
                    planned.append((sequence, self._plan_rows(sequence, count, ())))
                    budget -= count
        missed: set[str] = set()
        self._admit(planned, budget, missed)
        if not planned:
            return None if not missed else Plan((), 0, frozenset(missed))
        planned.sort(key=lambda item: (item[1].count > 1, item[1].slot))
        rows = tuple(item[1] for item in planned)
        plan = Plan(rows, sum(item.count for item in rows), frozenset(missed))
        self._in_flight.append((plan, tuple(item[0] for item in planned)))
        return plan

    def commit(self, plan: Plan, tokens: Seq[Result]) -> Outcome:
        """Takes the results of the oldest plan that is not committed.

        Args:
            plan: That plan.
            tokens: What came of each of its rows that sample or are scored, in order.
        """
        committed, sequences = self._in_flight.popleft()
        assert committed is plan, "plans are committed in the order in which they were made"
        deltas: list[Delta] = []
        failed: list[Failed] = []
        not_finite: list[NotFinite] = []
        results = iter(tokens)
        for sequence, rows in zip(sequences, plan.rows, strict=True):
            sequence.in_flight -= 1
            if rows.sampling is not None or rows.targets:
                token = next(results)
                sequence.pending -= rows.sampling is not None
                if sequence.phase is Phase.ENDED:
                    pass
                elif token is None:
                    request_id = sequence.submit.request_id
                    failed.append(Failed(request_id, "INTERNAL", "the model gave values that are not finite"))
                    not_finite.append(NotFinite(sequence.submit.version, request_id))
                    self._end(sequence)
                elif isinstance(token, int):
                    deltas.append(self._append(sequence, token))
                elif token.fault is not None:
                    failed.append(Failed(sequence.submit.request_id, *token.fault))
                    self._end(sequence)
                else:
                    sequence.prompt_scores += token.prompt
                    if token.token is not None:
                        deltas.append(self._append(sequence, token.token, more=token))
            if sequence.in_flight == 0:
                if sequence.phase is Phase.ENDED:
                    self._give_back(sequence)
                elif sequence.preempting:
                    self._requeue(sequence)
        return Outcome(tuple(deltas), tuple(failed), tuple(not_finite))

    def _forget_ended_deadlines(self) -> None:
        """Keeps no more ended requests than live ones: a distant deadline outlives its request by hours."""
        if len(self._deadlines) > 2 * len(self._sequences) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].phase is not Phase.ENDED]
            heapq.heapify(self._deadlines)

    def _append(self, sequence: Sequence, token: int, *, more: Chosen | None = None) -> Delta:
        index = sequence.num_output
        sequence.tokens.append(token)
        self._waiting.charge(sequence, 1)
        finish: FinishReason | None = None
        if token in sequence.submit.sampling.stop_token_ids:
            finish = "stop"
        elif index + 1 >= sequence.max_new:
            finish = "length"
        if finish is not None:
            self._end(sequence)
        submit = sequence.submit
        if more is None:
            return Delta(submit.request_id, index, (token,), finish, len(submit.prompt))
        logprobs = () if more.logprobs is None else (more.logprobs,)
        scores = () if index else tuple(sequence.prompt_scores)
        return Delta(submit.request_id, index, (token,), finish, len(submit.prompt), logprobs, scores)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Returns how many rows of it a step takes."""
        count = min(budget, sequence.num_remaining)
        return min(count, self._scores_left) if sequence.is_scored else count

    def _plan_rows(self, sequence: Sequence, count: int, new_pages: Iterable[int]) -> PlannedRows:
        """Counts the rows as done and describes them."""
        start = sequence.num_scheduled
        end = start + count
        samples = end == len(sequence.tokens) + sequence.pending
        sample_index = sequence.num_output + sequence.pending
        pages = tuple(new_pages)
        sampling = sequence.submit.sampling
        sets_up = start == 0 and not sequence.plain
        prompt, first = sequence.submit.prompt, start
        targets: tuple[int, ...] = ()
        if sequence.is_scored:
            first, last = max(start, sequence.num_targets), min(end, len(prompt) - 1)
            targets = prompt[first + 1 : last + 1]
            sequence.num_targets = max(last, sequence.num_targets)
            self._scores_left -= len(targets)
        sequence.num_scheduled = end
        sequence.in_flight += 1
        sequence.pending += samples
        return PlannedRows(
            seat=sequence.seat,
            slot=sequence.slot,
            start=start,
            count=count,
            ids=tuple(sequence.tokens[start:end]),
            new_pages=pages,
            num_pages_before=len(sequence.pages) - len(pages),
            sampling=sampling if samples else None,
            sample_index=sample_index,
            history=tuple(sequence.tokens) if sets_up else None,
            num_prompt=len(prompt),
            rules=sampling if sets_up else None,
            plain=sequence.plain,
            mask=sequence.mask,
            score_start=first - start,
            targets=targets,
            num_top=sampling.prompt_logprobs or 0,
        )

    def _grow(self, sequence: Sequence) -> list[int] | None:
        """Gets the page for one more row; returns the new pages, or None when the sequence must stand back in this step."""
        missing = self._pool.pages_for(sequence.num_scheduled + 1) - len(sequence.pages)
        while missing > self._pool.num_free:
            if any(other.preempting or other.phase is Phase.ENDED for other in self._running):
                return None
            idle = [other for other in self._running if other.paused]
            victim = idle[-1] if idle else self._running[-1]
            if victim is self._running[0] and not idle:
                return None
            self._preempt(victim)
            if victim is sequence:
                return None
        taken = self._pool.take(missing) if missing > 0 else []
        sequence.pages += taken
        return taken

    def _preempt(self, sequence: Sequence) -> None:
        sequence.preempting = True
        if sequence.in_flight == 0:
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Sends a preempted sequence back: it keeps its lease and recomputes all its tokens later."""
        self._leave(sequence)
        sequence.preempting = False
        sequence.num_scheduled = 0
        sequence.phase = Phase.WAITING
        bisect.insort(self._preempted, sequence, key=lambda other: other.order)

    def _admit(self, planned: list[tuple[Sequence, PlannedRows]], budget: int, missed: set[str]) -> None:
        """Moves waiting sequences to the running ones while seats, budget, pages and adapters allow.

        Who lacks something is passed over, but not for ever: past `max_passes` it becomes the barrier, which is tried first and
        behind which nobody takes what it lacks (pages: nobody at all; rank rows or a slot: no other adapter).
        """
        while self._preempted and self._seats and budget:
            sequence = next((other for other in self._preempted if not other.paused), None)
            if sequence is None:
                break
            if not self._has_pages(sequence) or not self._chunk(sequence, budget):
                return
            self._preempted.remove(sequence)
            budget -= self._start(sequence, planned, budget)
        passed: list[Sequence] = []
        num_before = self._num_admitted
        barrier = self._barrier if self._barrier is not None and self._barrier.phase is Phase.WAITING else None
        self._barrier = None
        candidates = itertools.chain([barrier] if barrier else [], self._waiting.in_order())
        for sequence in itertools.islice(candidates, self._limits.max_scan):
            if not self._seats or not budget:
                break
            if sequence.phase is not Phase.WAITING:
                continue
            lack = self._lack(sequence, missed)
            if lack is None:
                self._waiting.admit(sequence)
                self._await_no_more(sequence.submit.version)
                sequence.order = self._num_admitted
                self._num_admitted += 1
                budget -= self._start(sequence, planned, budget)
            elif lack is not _Lack.TURN:
                passed.append(sequence)
                if sequence.passes >= self._limits.max_passes:
                    self._barrier = sequence
                    if lack is _Lack.PAGES:
                        break
        if self._num_admitted > num_before:
            for sequence in passed:
                sequence.passes += 1

    def _lack(self, sequence: Sequence, missed: set[str]) -> _Lack | None:
        """Says what keeps a waiting sequence from starting; when nothing does, it holds its lease."""
        version = sequence.submit.version
        if version in missed or (version is not None and self._barrier is not None):
            return _Lack.TURN
        if sequence.is_scored and not self._scores_left:
            return _Lack.TURN
        if not self._has_pages(sequence):
            return _Lack.PAGES
        if version is None or self._lease(sequence, version, missed):
            return None
        if version in missed and not self._adapters.is_starved(version):
            return _Lack.TURN
        return _Lack.ROOM

    def _has_pages(self, sequence: Sequence) -> bool:
        """Whether all known tokens and one more fit while every running sequence can still get a page."""
        spare = len(self._running)
        return self._pool.pages_for(len(sequence.tokens) + 1) + spare <= self._pool.num_free or (
            spare == 0 and self._pool.pages_for(len(sequence.tokens)) <= self._pool.num_free
        )

    def _lease(self, sequence: Sequence, version: str, missed: set[str]) -> bool:
        lease = self._adapters.acquire(version)
        if lease is None:
            missed.add(version)
            return False
        rows = aligned_rank(lease.rank)
        if version not in self._active:
            if self._active_rows + rows > self._limits.max_step_rank_rows:
                self._adapters.release(lease)
                return False
            self._active_rows += rows
        self._active[version] = self._active.get(version, 0) + 1
        sequence.lease = lease
        return True

    def _start(self, sequence: Sequence, planned: list[tuple[Sequence, PlannedRows]], budget: int) -> int:
        """Seats a sequence, gives it pages for all its known tokens, plans its first rows and returns how many."""
        sequence.phase = Phase.RUNNING
        sequence.seat = self._seats.pop()
        bisect.insort(self._running, sequence, key=lambda other: other.order)
        sequence.pages += self._pool.take(self._pool.pages_for(len(sequence.tokens)))
        count = self._chunk(sequence, budget)
        planned.append((sequence, self._plan_rows(sequence, count, sequence.pages)))
        return count

    def _end(self, sequence: Sequence) -> None:
        """Ends a sequence; what it holds goes back at once, or when its last rows are committed."""
        del self._sequences[sequence.submit.request_id]
        if sequence.phase is Phase.WAITING:
            if sequence.order < 0:
                self._waiting.discard(sequence)
                version = sequence.submit.version
                if self._await_no_more(version) and version is not None:
                    self._adapters.withdraw(version)
            else:
                self._preempted.remove(sequence)
        sequence.phase = Phase.ENDED
        if sequence.in_flight == 0:
            self._give_back(sequence)

    def _await_no_more(self, version: str | None) -> bool:
        """Counts one request less that waits for a version; returns whether it was the last."""
        if version is None:
            return False
        self._awaited[version] -= 1
        if self._awaited[version]:
            return False
        del self._awaited[version]
        return True

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.seat >= 0:
            self._leave(sequence)
        lease, version = sequence.lease, sequence.submit.version
        if lease is not None and version is not None:
            sequence.lease = None
            self._active[version] -= 1
            if not self._active[version]:
                del self._active[version]
                self._active_rows -= aligned_rank(lease.rank)
            self._adapters.release(lease)

    def _leave(self, sequence: Sequence) -> None:
        """Frees pages and seat."""
        self._running.remove(sequence)
        self._pool.give_back(sequence.pages)
        self._seats.append(sequence.seat)
        sequence.seat = -1
