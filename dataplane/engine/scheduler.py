"""Decides what each step computes: who runs, how far, on which pages. Integers only; no torch, no clock of its own, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from dataplane.engine.admission import Admission
from dataplane.engine.commits import Commits, Flight
from dataplane.engine.draft import Draft
from dataplane.engine.fairness import Tenants
from dataplane.engine.kv_cache import PagePool
from dataplane.engine.leases import Adapters, Leases
from dataplane.engine.limits import Limits
from dataplane.engine.messages import Failed, Submit
from dataplane.engine.pace import Pace
from dataplane.engine.plan import Outcome, Plan, Result, TokenMask
from dataplane.engine.prefill import Prefill
from dataplane.engine.prefix import PageKeys
from dataplane.engine.prefix_cache import PrefixCache
from dataplane.engine.requests import Requests
from dataplane.engine.seating import Seating
from dataplane.engine.sequence import Phase, Sequence
from dataplane.lora.holdings import TenantLimitError
from veneer.errors import InvalidArgumentError, Violation


class Scheduler:
    """Owns all sequences and the page pool. Called by the step loop's thread only.

    A step is `plan = schedule()`, run, `commit(plan, tokens)`. `schedule` counts what it plans as done, so the next step may
    be planned before this one is committed: its decode rows then take the token that the device sampled last. A sequence that
    ends while rows of it are still in flight keeps pages, seat and lease until they are committed; their token is dropped.

    Its parts, each the one owner of its state: `Requests` that have not ended, `Tenants` and their shares, `Admission` to the
    queue, `Seating` of those that run, their `Leases`, the `PrefixCache`, `Prefill`, which fills the `Draft` of a step, and
    `Commits`.
    """

    def __init__(self, limits: Limits, pool: PagePool, adapters: Adapters) -> None:
        assert limits.max_step_tokens >= limits.max_sequences, "every running sequence decodes in every step"
        assert pool.num_pages >= pool.pages_for(limits.max_context), "one sequence always fits"
        self._limits = limits
        self._pool = pool
        self._tenants = Tenants()
        self._admission = Admission(limits, self._tenants)
        self.prefix = PrefixCache(pool)
        self._leases = Leases(adapters, max_rank_rows=limits.max_step_rank_rows)
        self._seating = Seating(limits, pool, self._tenants, leases=self._leases, prefix=self.prefix)
        self._prefill = Prefill(limits, self._tenants, self._seating, leases=self._leases)
        self._pace = Pace(limits.max_step_ms / 1000) if limits.max_step_ms else None
        self._requests = Requests(self._tenants, self._seating, leases=self._leases)
        self._commits = Commits(self._requests, self._seating, admission=self._admission, prefix=self.prefix, pace=self._pace)

    @property
    def num_running(self) -> int:
        """Sequences that hold a seat."""
        return len(self._seating.running)

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
        """When `expire` has to be called: the earliest deadline of an unfinished request, or of a mask that one waits for."""
        waits = [since + self._limits.max_mask_wait_s for since in self._seating.held.values() if since is not None]
        deadline = self._requests.next_deadline
        return min([*waits, *([] if deadline is None else [deadline])], default=None)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that have not ended, oldest first."""
        return self._requests.ids

    def waiting_by_reason(self) -> dict[str, int]:
        """Returns how many sequences wait for what, as of the last step; see `State`."""
        tenants, counts = self._tenants, self._prefill.count_lacking()
        in_line = tenants.num_waiting - tenants.num_aside
        rest = in_line - sum(counts.values())
        counts |= {"image": tenants.num_loading, "paused": tenants.num_aside - tenants.num_loading}
        has_seats = bool(self._seating.seats)
        return counts | {"capacity": 0 if has_seats else rest, "turn": rest if has_seats else 0}

    def take_admitted(self) -> list[float]:
        """Returns when those came that ran for the first time since the last call."""
        admitted, self._seating.admitted = self._seating.admitted, []
        return admitted

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
            TenantLimitError: Its adapter alone exceeds a limit of its tenant.
            InvalidArgumentError: The id is in use, or the prompt does not leave room for one token.
            ResourceExhaustedError: Too many requests wait, or it would wait longer than its deadline allows.
        """
        limit = self._limits.max_context
        if submit.request_id in self._requests:
            raise InvalidArgumentError.of([Violation("request_id", "is in use by a running request")])
        if not 1 <= len(submit.prompt) < limit:
            raise InvalidArgumentError.of(
                [Violation("prompt", f"must have 1 to {limit - 1} tokens (context of {limit}), has {len(submit.prompt)}")]
            )
        if submit.sampling.max_tokens < 1:
            raise InvalidArgumentError.of([Violation("sampling.max_tokens", "must be at least 1")])
        self._leases.check(submit)
        self._admission.check(submit)
        deadline = None if submit.deadline_s is None else now + submit.deadline_s
        sequence = Sequence(submit, deadline=deadline, max_context=limit, chain=chain, keys=keys, mask=mask)
        sequence.came = now
        self._requests.add(sequence)
        self._tenants.push(sequence)
        self._leases.expect(submit.version)

    def abort(self, request_id: str) -> bool:
        """Ends a request without an event; returns whether it was there."""
        sequence = self._requests.get(request_id)
        if sequence is None:
            return False
        self._requests.end(sequence)
        return True

    def pause(self, request_id: str, *, paused: bool) -> None:
        """Keeps a request out of steps, or lets it run again. Ids that are unknown or have not run yet are ignored."""
        sequence = self._requests.get(request_id)
        if sequence is None or sequence.order < 0 or sequence.is_ahead or sequence.paused is paused:
            return
        sequence.paused = paused
        waits = sequence.phase is Phase.WAITING
        if paused:
            self._tenants.pause(sequence)
            self._seating.decoders.remove(sequence)
            if waits:
                self._leases.stand_aside(sequence)
        else:
            self._tenants.resume(sequence)
            self._seating.resume(sequence)
            if waits and sequence.lease is None:
                self._leases.expect(sequence.submit.version)

    def has_to_return(self, version: str) -> bool:
        """Whether a request that has begun waits for a version again."""
        return any(sequence.num_output for sequence in self._requests.waiting_for(version))

    def fail_waiting(self, version: str, *, status: str, message: str) -> list[Failed]:
        """Ends every request that waits for a version."""
        waiting = self._requests.waiting_for(version)
        for sequence in waiting:
            self._requests.end(sequence)
        return [Failed(sequence.submit.request_id, status, message) for sequence in waiting]

    def charge_grammars(self, seconds: Mapping[str, float]) -> None:
        """Charges tenants for the seconds of a core that their grammars took beside the steps."""
        for tenant, spent in seconds.items():
            self._tenants.charge(tenant, spent * 1000 * self._limits.prices.grammar_ms)

    def expire(self, now: float) -> list[Failed]:
        """Ends every request whose deadline has passed, or whose grammar's mask has not come in time."""
        failed = self._expire_held(now)
        while (sequence := self._requests.pop_expired(now)) is not None:
            where = "waiting" if sequence.phase is Phase.WAITING else f"generating token {sequence.num_output}"
            failed.append(Failed(sequence.submit.request_id, "DEADLINE_EXCEEDED", f"the deadline passed while {where}"))
            self._requests.end(sequence)
        return failed

    def _expire_held(self, now: float) -> list[Failed]:
        failed = []
        limit = self._limits.max_mask_wait_s
        for sequence, since in list(self._seating.held.items()):
            if since is None:
                self._seating.held[sequence] = now
            elif now - since >= limit and not (sequence.mask is not None and sequence.mask.is_ready):
                message = (
                    f"structured_outputs: the mask for output token {sequence.num_output} was not found within {limit:g} s "
                    "(GRAMMAR_TIMEOUT_S): this grammar, or others of the tenant, take too much work"
                )
                failed.append(Failed(sequence.submit.request_id, "RESOURCE_EXHAUSTED", message))
                self._requests.end(sequence)
        return failed

    def refuse(self) -> list[Failed]:
        """Ends every request that the last plan found to exceed a limit of its tenant for good."""
        failed = []
        for sequence, fault in self._prefill.take_refused():
            if sequence.phase is Phase.WAITING:
                failed.append(Failed(sequence.submit.request_id, TenantLimitError.status, fault, is_tenants_limit=True))
                self._requests.end(sequence)
        return failed

    def schedule(self) -> Plan | None:
        """Plans a step, or returns None when nothing can run."""
        self._prefill.wake()
        seating = self._seating
        seating.release()
        favoured = seating.make_room()
        draft = Draft(self._limits, seating.decoders, active=self._leases.active)
        draft.add_decodes(seating.grow)
        if not draft.num_rows:  # who gave way to itself may have left pages for one that stood back before it
            draft.add_decodes(seating.grow)
        if self._pace is not None and draft.num_rows:
            draft.cap(self._rows_in_time(draft))
        self._prefill.fill(draft, favoured)
        seating.relief.note_hunger(self._prefill.lacking)
        plan, decoding, others = draft.finish()
        if plan.num_tokens:
            work = draft.work(self._leases.num_rank_rows)
            is_full = self._tenants.num_waiting > self._tenants.num_aside
            self._commits.expect(Flight(plan, decoding, others, cost=draft.cost, work=work, is_full=is_full))
        return plan if plan.num_tokens or plan.missed else None

    def commit(self, plan: Plan, results: Seq[Result], *, seconds: float = 0.0) -> Outcome:
        """Takes the results of the oldest plan that is not committed.

        Args:
            plan: That plan.
            results: What came of each of its rows that sample or are scored, in order.
            seconds: How long it ran; 0 when that is not known.
        """
        return self._commits.take(plan, results, seconds=seconds)

    def _rows_in_time(self, draft: Draft) -> int:
        """Returns how many rows of prompts may join those that decode, at least a page of them."""
        assert self._pace is not None, "asked only where steps have a time"
        return self._pace.room_for(
            draft.work(self._leases.num_rank_rows),
            price=self._limits.prices.prefill_token,
            at_least=self._pool.page_size,
            at_most=draft.budget,
        )
