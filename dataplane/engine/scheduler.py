"""Decides what each step computes: who runs, how far, on which pages. Integers only; no torch, no clock of its own, no I/O."""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from dataplane.engine.admission import Admission
from dataplane.engine.fairness import Tenants
from dataplane.engine.kv_cache import PagePool
from dataplane.engine.limits import Limits
from dataplane.engine.messages import Delta, Failed, FinishReason, NotFinite, Submit
from dataplane.engine.plan import Chosen, Outcome, Plan, PlannedRows, Result, TokenMask
from dataplane.engine.prefix import PageKeys
from dataplane.engine.prefix_cache import PrefixCache
from dataplane.engine.relief import Relief
from dataplane.engine.sequence import MAX_SCORED_ROWS, Phase, Sequence
from dataplane.lora.residency import Lease
from kernels.rows import aligned_rank
from veneer.errors import InvalidArgumentError, Violation


class Adapters(Protocol):
    """What the scheduler needs to know of adapters on the device."""

    def acquire(self, version: str) -> Lease | None:
        """Takes a lease, or returns None when the version is not on the device; then it is remembered as wanted."""

    def release(self, lease: Lease) -> None:
        """Gives a lease back."""

    def withdraw(self, version: str) -> None:
        """Notes that nobody waits for a version any more."""

    def arrived(self) -> Mapping[str, int]:
        """Returns the versions that may have come to the device since the last call, with the bytes that were copied."""

    def is_starved(self, version: str) -> bool:
        """Whether the version could be loaded but for the slots and bytes that leases hold."""


_MIB = 1 << 20
_MAX_STARVED = 8


class _Lack(enum.Enum):
    """What a waiting sequence lacks: pages; rank rows or a slot; its image on the device; or only its turn."""

    PAGES = "pages"
    ROOM = "room"
    IMAGE = "image"
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
        self._tenants = Tenants()
        self._admission = Admission(limits, self._tenants)
        self._prices = limits.prices
        self._cost = 0.0
        self._running: list[Sequence] = []
        self._seats = list(range(limits.max_sequences - 1, -1, -1))
        self._relief = Relief(limits, pool, self._tenants, seats=self._seats, running=self._running)
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._active: dict[str, int] = {}
        self._active_rows = 0
        self._awaited: dict[str, int] = {}
        self._barrier: Sequence | None = None
        self._scores_left = 0
        self._num_submitted = 0
        self._num_admitted = 0
        self._in_flight: deque[tuple[Plan, tuple[Sequence, ...]]] = deque()
        self.prefix = PrefixCache(pool)

    @property
    def num_running(self) -> int:
        """Sequences that hold a seat."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, the preempted ones included."""
        return self._tenants.num_waiting

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

    def add(
        self,
        submit: Submit,
        now: float,
        *,
        chain: PageKeys | None = None,
        keys: Iterable[bytes] = (),
        mask: TokenMask | None = None,
    ) -> None:
        """Queues a request.

        Args:
            submit: The request.
            now: When it came, by the engine's clock.
            chain: What computes the keys of its pages; None when none of them is shared.
            keys: Keys of the full pages of its prompt, computed before.
            mask: What its grammar allows.

        Raises:
            InvalidArgumentError: The id is in use, or the prompt does not leave room for one token.
            ResourceExhaustedError: Too many requests wait, or it would wait longer than its deadline allows.
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
        self._admission.check(submit)
        deadline = None if submit.deadline_s is None else now + submit.deadline_s
        sequence = Sequence(submit, deadline=deadline, max_context=limit, chain=chain, keys=keys, mask=mask)
        self._sequences[submit.request_id] = sequence
        self._tenants.push(sequence)
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
        """Keeps a request out of steps, or lets it run again. Ids that are unknown or have not run yet are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.order < 0 or sequence.paused is paused:
            return
        sequence.paused = paused
        if paused:
            self._tenants.pause(sequence)
        else:
            self._tenants.resume(sequence)

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
        self._wake()
        self._scores_left = MAX_SCORED_ROWS
        favoured = self._relief.make_room(self._preempt, self._has_pages)
        planned: list[tuple[Sequence, PlannedRows]] = []
        self._plan_single(planned)
        num_single = len(planned)
        missed: set[str] = set()
        num_more = self._fill(planned, self._limits.max_step_tokens - num_single, favoured, missed)
        self._relief.note_hunger()
        if not planned:
            return None if not missed else Plan((), 0, frozenset(missed))
        planned.sort(key=_place_in_step)
        rows = tuple([item[1] for item in planned])
        plan = Plan(rows, num_single + num_more, frozenset(missed))
        self._in_flight.append((plan, tuple([item[0] for item in planned])))
        return plan

    def _plan_single(self, planned: list[tuple[Sequence, PlannedRows]]) -> None:
        """Plans the sequences that lack one row: nearly always those that decode.

        This and `commit` go over every running sequence in every step, so they reach into it directly: 256 calls of
        `_plan_rows` take as long as all the rest of a step's planning together.
        """
        running, prices, active, page_size = Phase.RUNNING, self._prices, self._active, self._pool.page_size
        decode, rank_row, total = prices.decode_token, prices.rank_row, 0.0
        make, append = tuple.__new__, planned.append
        for sequence in tuple(self._running):
            tokens, start = sequence.tokens, sequence.num_scheduled
            num_known = len(tokens) + sequence.pending
            if num_known - start != 1 or num_known >= sequence.last or sequence.phase is not running or sequence.preempting:
                continue
            if sequence.paused or sequence.is_scored:
                continue
            if start >= len(sequence.pages) * page_size:
                pages = self._grow(sequence)
                if pages is not None:
                    append((sequence, self._plan_rows(sequence, 1, pages)))
                continue
            if sequence.is_unfinished:
                append((sequence, self._plan_rows(sequence, 1, ())))
                continue
            lease, account = sequence.lease, sequence.account
            if start >= sequence.num_charged:
                sequence.num_charged = num_known
                cost = decode if lease is None else decode + rank_row * sequence.rank_rows / active[lease.version]
                account.service += cost / account.weight
                total += cost
            sequence.num_scheduled = num_known
            sequence.in_flight += 1
            sequence.pending += 1
            row = (
                sequence.seat, -1 if lease is None else lease.slot, start, 1, tuple(tokens[start:]), (), len(sequence.pages),
                sequence.submit.sampling, num_known - sequence.num_prompt, None, 0,
                sequence.num_prompt, None, sequence.plain, sequence.mask, 0, (), 0,
            )  # fmt: skip
            append((sequence, make(PlannedRows, row)))
        self._cost += total

    def commit(self, plan: Plan, tokens: Seq[Result], *, seconds: float = 0.0) -> Outcome:
        """Takes the results of the oldest plan that is not committed.

        Args:
            plan: That plan.
            tokens: What came of each of its rows that sample or are scored, in order.
            seconds: How long it ran; 0 when that is not known.
        """
        committed, sequences = self._in_flight.popleft()
        assert committed is plan, "plans are committed in the order in which they were made"
        self._admission.observe(self._cost, seconds)
        self._cost = 0.0
        deltas: list[Delta] = []
        failed: list[Failed] = []
        not_finite: list[NotFinite] = []
        results = iter(tokens)
        ended = Phase.ENDED
        for sequence, rows in zip(sequences, plan.rows, strict=True):
            sequence.in_flight -= 1
            if rows.sampling is not None or rows.targets:
                result = next(results)
                sequence.pending -= rows.sampling is not None
                if sequence.phase is ended:
                    pass
                elif isinstance(result, int):
                    deltas.append(self._append(sequence, rows, result))
                elif result is None:
                    request_id = sequence.submit.request_id
                    failed.append(Failed(request_id, "INTERNAL", "the model gave values that are not finite"))
                    not_finite.append(NotFinite(sequence.submit.version, request_id))
                    self._end(sequence)
                    self.prefix.distrust(sequence)
                elif result.fault is not None:
                    failed.append(Failed(sequence.submit.request_id, *result.fault))
                    self._end(sequence)
                else:
                    sequence.prompt_scores += result.prompt
                    if result.token is not None:
                        deltas.append(self._append(sequence, rows, result.token, more=result))
            if sequence.in_flight == 0:
                if sequence.phase is ended:
                    self._give_back(sequence)
                elif sequence.preempting:
                    self._requeue(sequence)
        return Outcome(tuple(deltas), tuple(failed), tuple(not_finite))

    def _forget_ended_deadlines(self) -> None:
        """Keeps no more ended requests than live ones: a distant deadline outlives its request by hours."""
        if len(self._deadlines) > 2 * len(self._sequences) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].phase is not Phase.ENDED]
            heapq.heapify(self._deadlines)

    def _append(self, sequence: Sequence, rows: PlannedRows, token: int, *, more: Chosen | None = None) -> Delta:
        """Takes a token whose row led to finite logits; names the pages that are full now, and ends what it ends."""
        page_size, num_computed = self._pool.page_size, rows.start + rows.count
        if num_computed - sequence.num_named * page_size >= page_size:
            self.prefix.keep(sequence, num_computed)
        submit, known = sequence.submit, sequence.tokens
        index = len(known) - sequence.num_prompt
        known.append(token)
        finish: FinishReason | None = None
        if token in submit.sampling.stop_token_ids:
            finish = "stop"
        elif len(known) >= sequence.last:
            finish = "length"
        if finish is not None:
            self._admission.finished(index + 1)
            self._end(sequence)
        if more is None:
            return Delta(submit.request_id, index, (token,), finish, sequence.num_prompt)
        logprobs = () if more.logprobs is None else (more.logprobs,)
        scores = () if index else tuple(sequence.prompt_scores)
        return Delta(submit.request_id, index, (token,), finish, sequence.num_prompt, logprobs, scores)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Returns how many rows of it a step takes; none when it is scored and the step scores enough already."""
        count = min(budget, sequence.num_remaining)
        return min(count, self._scores_left) if sequence.is_scored else count

    def _plan_rows(self, sequence: Sequence, count: int, new_pages: Iterable[int], *, num_shared: int = 0) -> PlannedRows:
        """Counts the rows as done, charges them and describes them."""
        start = sequence.num_scheduled
        end = start + count
        submit, tokens = sequence.submit, sequence.tokens
        num_known = len(tokens) + sequence.pending
        samples = end == num_known
        pages = tuple(new_pages)
        sampling = submit.sampling
        num_before = len(sequence.pages) - len(pages)
        sets_up = not num_before and not sequence.plain
        score_start, targets = self._score(sequence, start, end) if sequence.is_scored else (0, ())
        sequence.num_scheduled = end
        sequence.in_flight += 1
        if samples:
            sequence.pending += 1
            if sequence.is_unfinished:
                sequence.is_unfinished = False
                sequence.account.unfinished.remove(sequence)
        if end > sequence.num_charged:
            self._charge(sequence, start, end)
        return PlannedRows(
            seat=sequence.seat,
            slot=sequence.slot,
            start=start,
            count=count,
            ids=tuple(tokens[start:end]),
            new_pages=pages,
            num_pages_before=num_before,
            sampling=sampling if samples else None,
            sample_index=num_known - len(submit.prompt),
            history=tuple(tokens) if sets_up else None,
            num_shared_pages=num_shared,
            num_prompt=sequence.num_prompt,
            rules=sampling if sets_up else None,
            plain=sequence.plain,
            mask=sequence.mask,
            score_start=score_start,
            targets=targets,
            num_top=sampling.prompt_logprobs or 0,
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
        prices, submit, charged = self._prices, sequence.submit, sequence.num_charged
        count = end - max(start, charged)
        cost = count * (prices.prefill_token if start < len(submit.prompt) else prices.decode_token)
        if submit.version is not None:
            cost += prices.rank_row * sequence.rank_rows / self._active[submit.version]
        sequence.num_charged = end
        sequence.account.service += cost / sequence.account.weight
        self._cost += cost

    def _wake(self) -> None:
        """Lets requests be tried again whose adapter came, or cannot come while others hold leases."""
        for version, num_bytes in self._adapters.arrived().items():
            account = self._tenants.unpark(version)
            if account is not None:
                account.service += num_bytes / _MIB * self._limits.prices.load_mib / account.weight
        starved = [
            version
            for version in itertools.islice(self._tenants.parked_versions, _MAX_STARVED)
            if self._adapters.is_starved(version)
        ]
        for version in starved:
            self._tenants.unpark(version)

    def _fill(self, planned: list[tuple[Sequence, PlannedRows]], budget: int, favoured: list[Sequence], missed: set[str]) -> int:
        """Goes on with prompts, starts waiting ones while seats, budget, pages and adapters allow; returns the rows planned.

        Who lacks something is passed over, but not for ever: past `max_passes` it becomes the barrier, which is tried first and
        behind which nobody takes what it lacks (pages: nobody at all; rank rows or a slot: no other adapter).
        """
        passed: list[Sequence] = []
        allowed = budget
        num_before = self._num_admitted
        barrier = self._barrier if self._barrier is not None and self._barrier.phase is Phase.WAITING else None
        self._barrier = None
        first = [barrier, *favoured] if barrier is not None and barrier not in favoured else favoured
        for sequence in itertools.chain(first, self._tenants.in_order(self._seats, max_scan=self._limits.max_scan)):
            if not budget:
                break
            if sequence.phase is Phase.RUNNING:
                if sequence.is_unfinished and not sequence.preempting and (count := self._chunk(sequence, budget)):
                    planned.append((sequence, self._plan_rows(sequence, count, ())))
                    budget -= count
                continue
            if sequence.phase is Phase.ENDED or sequence.paused or not self._seats:
                continue
            lack = self._lack(sequence, missed)
            if lack is None:
                budget -= self._start(sequence, planned, budget)
            elif lack is _Lack.IMAGE:
                self._tenants.park(sequence)
            elif lack is not _Lack.TURN:
                sequence.account.lacks_pages = lack is _Lack.PAGES
                passed.append(sequence)
                if sequence.passes >= self._limits.max_passes:
                    self._barrier = sequence
                    if lack is _Lack.PAGES:
                        break
        if self._num_admitted > num_before:
            for sequence in passed:
                sequence.passes += 1
        return allowed - budget

    def _lack(self, sequence: Sequence, missed: set[str]) -> _Lack | None:
        """Says what keeps a waiting sequence from starting; when nothing does, it holds its lease."""
        version = None if sequence.lease is not None else sequence.submit.version
        if version is not None:
            if version in missed:
                return _Lack.TURN if self._adapters.is_starved(version) else _Lack.IMAGE
            if self._barrier is not None:
                return _Lack.TURN
        if sequence.is_scored and not self._scores_left:
            return _Lack.TURN
        if not self._has_pages(sequence):
            return _Lack.PAGES
        if version is None or self._lease(sequence, version, missed):
            return None
        if version in missed and not self._adapters.is_starved(version):
            return _Lack.IMAGE
        return _Lack.ROOM

    def _has_pages(self, sequence: Sequence) -> bool:
        """Whether all known tokens and one more fit while every running sequence can still get a page."""
        spare = len(self._running)
        num_free = self._pool.num_free
        needed = self._pool.pages_for(len(sequence.tokens) + 1) + spare
        if needed > num_free and sequence.keys:
            shared = self.prefix.find(sequence)
            needed -= len(shared) - self._pool.num_kept_of(shared)
        return needed <= num_free or (spare == 0 and self._pool.pages_for(len(sequence.tokens)) <= num_free)

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
        sequence.rank_rows = rows
        return True

    def _start(self, sequence: Sequence, planned: list[tuple[Sequence, PlannedRows]], budget: int) -> int:
        """Seats a sequence, gives it pages for all its known tokens, plans its first rows and returns how many."""
        if sequence.order < 0:
            self._await_no_more(sequence.submit.version)
            sequence.order = self._num_admitted
            self._num_admitted += 1
        self._tenants.start(sequence)
        sequence.account.lacks_pages = False
        sequence.phase = Phase.RUNNING
        sequence.is_unfinished = True
        sequence.seat = self._seats.pop()
        bisect.insort(self._running, sequence, key=_order)
        submit, num_tokens = sequence.submit, len(sequence.tokens)
        num_shared = self.prefix.share(sequence)
        sequence.pages += self._pool.take(self._pool.pages_for(num_tokens) - num_shared, submit.tenant, weight=submit.weight)
        count = self._chunk(sequence, budget)
        planned.append((sequence, self._plan_rows(sequence, count, sequence.pages, num_shared=num_shared)))
        return count

    def _grow(self, sequence: Sequence) -> list[int] | None:
        """Gets the page for one more row; returns the new pages, or None when the sequence must stand back in this step."""
        missing = self._pool.pages_for(sequence.num_scheduled + 1) - len(sequence.pages)
        while missing > self._pool.num_free:
            if any(other.preempting or other.phase is Phase.ENDED for other in self._running):
                return None
            idle = [other for other in self._running if other.paused]
            victim = idle[-1] if idle else self._relief.page_victim(sequence)
            if victim is self._running[0] and not idle:
                return None
            self._preempt(victim)
            if victim is sequence:
                return None
        submit = sequence.submit
        taken = self._pool.take(missing, submit.tenant, weight=submit.weight)
        sequence.pages += taken
        return taken

    def _preempt(self, sequence: Sequence) -> None:
        sequence.preempting = True
        if sequence.in_flight == 0:
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Sends a preempted sequence back: it keeps its lease and recomputes later what the cache does not have."""
        self._leave(sequence, returns=True)
        sequence.preempting = False
        sequence.num_scheduled = 0
        sequence.phase = Phase.WAITING

    def _end(self, sequence: Sequence) -> None:
        """Ends a sequence; what it holds goes back at once, or when its last rows are committed."""
        del self._sequences[sequence.submit.request_id]
        if sequence.phase is Phase.WAITING:
            self._tenants.discard(sequence)
            if sequence.order < 0:
                version = sequence.submit.version
                if self._await_no_more(version) and version is not None:
                    self._adapters.withdraw(version)
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
            self._leave(sequence, returns=False)
        lease, version = sequence.lease, sequence.submit.version
        if lease is not None and version is not None:
            sequence.lease = None
            self._active[version] -= 1
            if not self._active[version]:
                del self._active[version]
                self._active_rows -= aligned_rank(lease.rank)
            self._adapters.release(lease)

    def _leave(self, sequence: Sequence, *, returns: bool) -> None:
        """Frees pages and seat."""
        self._running.remove(sequence)
        self._tenants.stop(sequence, returns=returns)
        sequence.is_unfinished = False
        self._pool.give_back(sequence.pages)
        self._seats.append(sequence.seat)
        sequence.seat = -1


def _order(sequence: Sequence) -> int:
    return sequence.order


def _place_in_step(item: tuple[Sequence, PlannedRows]) -> tuple[bool, int]:
    return item[1].count > 1, item[1].slot
