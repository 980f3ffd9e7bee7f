"""A scheduler driven in integers: no model, no torch, a fake device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from dataplane.engine.intake import Intake
from dataplane.engine.kv_cache import PagePool
from dataplane.engine.leases import Adapters
from dataplane.engine.limits import Limits
from dataplane.engine.messages import Sampling, Submit
from dataplane.engine.plan import Outcome, Picks, Plan, PlannedRows
from dataplane.engine.scheduler import Scheduler
from dataplane.lora.holdings import Budget, Lease, LoadPlan
from dataplane.lora.residency import Residency


class FakeAdapters:
    """`slots` adapters fit; a version is on the device when the test put it there. Rank = the number in its name."""

    def __init__(self, resident: set[str] | None = None) -> None:
        self.resident = set() if resident is None else resident
        self.starved: set[str] = set()
        self.dropped: set[str] = set()
        self.leases: dict[int, str] = {}
        self.users: dict[int, str] = {}
        self.weights: dict[str, int] = {}
        self.reserved: list[str] = []
        self.served = 0
        self.num_slots = 8
        self.withdrawn: list[str] = []
        self._next = 0
        self.seen = set(self.resident)
        self.load_bytes = 0

    def acquire(self, version: str, tenant: str = "", *, weight: int = 1, max_bytes: int = 0) -> Lease | None:
        self.weights[tenant] = weight
        if version not in self.resident:
            return None
        self._next += 1
        self.leases[self._next] = version
        self.users[self._next] = tenant
        return Lease(self._next, version, sorted(self.resident).index(version), int(version.split("r")[1]), 1)

    def release(self, lease: Lease, *, served: int = 0) -> None:
        self.served += served
        del self.leases[lease.lease_id], self.users[lease.lease_id]

    def withdraw(self, version: str) -> None:
        self.withdrawn.append(version)

    def arrived(self) -> dict[str, int]:
        arrived = self.resident - self.seen
        self.seen = set(self.resident)
        return dict.fromkeys(arrived, self.load_bytes)

    def is_starved(self, version: str) -> bool:
        return version in self.starved

    def budget(self, version: str, tenant: str, *, max_bytes: int) -> Budget | None:
        return None

    def is_pinned(self, version: str) -> bool:
        return False

    def reserve(self, version: str) -> None:
        self.reserved.append(version)

    def evict(self, version: str) -> None:
        self.resident.discard(version)

    def may_return(self, version: str) -> bool:
        return version not in self.dropped

    def yields(self, holder: str, *, version: str, loader: str) -> bool:
        return self.excess_of(holder) > 0 > self.excess_of(loader)

    def excess_of(self, tenant: str) -> float:
        held = len({version for lease, version in self.leases.items() if self.users[lease] == tenant})
        return held - self.num_slots * self.weights.get(tenant, 1) / sum(self.weights.values())


def rows_of(plan: Plan) -> tuple[PlannedRows, ...]:
    """All rows of a plan, those of sequences that decode spelled out; their ids are empty, since only the device knows them."""
    pages = {seat: (place, page) for seat, place, page in plan.decodes.new_pages}
    decodes = []
    columns = zip(plan.decodes.picks.seats.tolist(), plan.decodes.slots.tolist(), plan.decodes.starts.tolist(), strict=True)
    for row, (seat, slot, start) in enumerate(columns):
        place, page = pages.pop(seat, (-1, 0))
        decodes.append(
            PlannedRows(
                seat=seat, slot=slot, start=start, count=1, ids=(), new_pages=(page,) if page else (), num_pages_before=place,
                sampling=plan.decodes.picks.settings[row], sample_index=int(plan.decodes.picks.sample_indexes[row]), history=None,
            )
        )  # fmt: skip
    assert not pages, "every new page belongs to a row"
    return (*decodes, *plan.rows)


def picks(rows: Sequence[PlannedRows]) -> Picks:
    """The last rows of each, as the sampler takes them."""
    return Picks.of([planned.pick for planned in rows])


class Device:
    """Runs plans on integers: the KV "cache" holds the tokens themselves, and the next token is a hash of all of them.

    It checks what a step may rely on: pages are its own, positions are filled in order, nothing is read before it is written.
    """

    def __init__(self, page_size: int, *, stop_every: int = 0) -> None:
        self.page_size = page_size
        self.pages: dict[int, list[int | None]] = {}
        self.tables: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.stop_every = stop_every
        self.owners: dict[int, Submit] = {}
        self.computed_by: dict[tuple[int, int], object] = {}
        self.frozen: set[int] = set()
        self.num_computed = 0

    def run(self, plan: Plan) -> list[int | None]:
        out: list[int | None] = []
        assert plan.num_tokens == sum(rows.count for rows in rows_of(plan))
        for rows in rows_of(plan):
            table = self.tables.setdefault(rows.seat, [])
            if rows.new_pages or (rows.ids and not rows.start):
                del table[rows.num_pages_before :]
            table += rows.new_pages
            assert rows.num_shared_pages * self.page_size <= rows.start
            for page in rows.new_pages[: rows.num_shared_pages]:
                assert None not in self.pages[page], "only full pages are shared"
                self.frozen.add(page)
            for page in rows.new_pages[rows.num_shared_pages :]:
                self.pages[page] = [None] * self.page_size
                self.frozen.discard(page)
            assert rows.count > 0, "a step holds only sequences of which it computes something"
            owner = self.owners[rows.seat]
            self.num_computed += rows.count
            ids = list(rows.ids)
            if len(ids) < rows.count:
                ids.append(self.last[rows.seat])
            for position, token in enumerate(ids, rows.start):
                page, offset = table[position // self.page_size], position % self.page_size
                assert page not in self.frozen, "a shared page is never written"
                self.pages[page][offset] = token
                is_base = rows.slot < 0 or position - rows.start < rows.num_base
                self.computed_by[page, offset] = (owner.tenant, owner.cache_salt, None if is_base else owner.version)
            if rows.sampling is not None:
                end = rows.start + rows.count
                seen = [self.pages[table[i // self.page_size]][i % self.page_size] for i in range(end)]
                assert None not in seen, "every earlier position was written"
                for i in range(end):
                    whose = (owner.tenant, owner.cache_salt, owner.version if i >= owner.active_from else None)
                    by = self.computed_by[table[i // self.page_size], i % self.page_size]
                    assert by == whose, "what one tenant, salt and version computed serves nobody else"
                token = next_token([token for token in seen if token is not None])
                self.last[rows.seat] = token
                out.append(token)
        owners = [page for seat in {rows.seat for rows in rows_of(plan)} for page in self.tables[seat]]
        private = [page for page in owners if page not in self.frozen]
        assert len(private) == len(set(private)), "a page that is not shared has one owner"
        assert 0 not in owners, "page 0 is nobody's"
        return out


def next_token(tokens: list[int]) -> int:
    return (hash(tuple(tokens)) >> 3) % 50


def expected(prompt: tuple[int, ...], count: int, stops: tuple[int, ...]) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def limits(**changes: Any) -> Limits:
    values: dict[str, Any] = {
        "max_sequences": 4, "max_step_tokens": 16, "max_step_rank_rows": 64, "max_context": 32, "max_waiting": 100,
    }  # fmt: skip
    return Limits(**(values | changes))


def submit(name: str, prompt: int | tuple[int, ...] = 4, **fields: Any) -> Submit:
    tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    sampling = Sampling(max_tokens=fields.pop("max_tokens", 4), stop_token_ids=fields.pop("stops", ()), temperature=0.0)
    return Submit(request_id=name, tenant=fields.pop("tenant", "t"), prompt=tokens, sampling=sampling, **fields)


def add(scheduler: Scheduler, request: Submit, now: float = 0.0) -> None:
    """Adds a request as the engine's intake does."""
    intake = Intake(
        base_digest="base", page_size=scheduler._pool.page_size, vocab_size=1000, max_context=scheduler._limits.max_context
    )
    arrival = intake.prepare(request)
    assert arrival.fault is None
    scheduler.add(request, now, chain=arrival.chain, keys=arrival.keys)


def make(num_pages: int = 32, page_size: int = 4, adapters: Adapters | None = None, **changes: Any) -> Scheduler:
    return Scheduler(limits(**changes), PagePool(num_pages, page_size), adapters or FakeAdapters())


class Loop:
    """Drives a scheduler, committing each plan `lag` steps late, and collects what requests see."""

    def __init__(self, scheduler: Scheduler, *, page_size: int = 4, lag: int = 0) -> None:
        self.scheduler = scheduler
        self.device = Device(page_size)
        self.lag = lag
        self.uncommitted: deque[tuple[Plan, list[int | None]]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.plans: list[Plan] = []

    def turn(self) -> bool:
        plan = self.scheduler.schedule()
        for refused in self.scheduler.refuse():
            self.failed[refused.request_id] = refused.status
        ran = plan is not None and plan.num_tokens > 0
        if plan is not None and ran:
            self.plans.append(plan)
            flight = self.scheduler._commits._flights[-1]
            for sequence in (*flight.decoding, *flight.others):
                self.device.owners[sequence.seat] = sequence.submit
            self.uncommitted.append((plan, self.device.run(plan)))
        if self.uncommitted and (len(self.uncommitted) > self.lag or not ran):
            done, tokens = self.uncommitted.popleft()
            self.take(self.scheduler.commit(done, tokens, seconds=self.seconds_of(done)))
            ran = True
        return ran

    def seconds_of(self, plan: Plan) -> float:
        """How long a plan ran; 0 says that it is not known."""
        return 0.0

    def take(self, outcome: Outcome) -> None:
        for delta in outcome.tokens.deltas():
            output = self.outputs.setdefault(delta.request_id, [])
            assert delta.request_id not in self.finished
            assert delta.index == len(output)
            output += delta.ids
            if delta.finish:
                self.finished[delta.request_id] = delta.finish
        for failed in outcome.failed:
            self.failed[failed.request_id] = failed.status

    def run(self, max_turns: int = 2000) -> None:
        for _ in range(max_turns):
            if not self.turn():
                return
        raise AssertionError("it does not come to an end")


def assert_idle(scheduler: Scheduler, adapters: FakeAdapters | None = None) -> None:
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_pages_used) == (0, 0, 0)
    assert scheduler.request_ids == ()
    assert not scheduler._seating.decoders._is_ready.any()
    assert set(scheduler._seating.decoders._members) == {None}
    assert scheduler._seating._leaving == []
    assert (scheduler._leases.active, scheduler._leases.num_rank_rows, scheduler._leases._awaited) == ({}, 0, {})
    assert scheduler._leases._budget._uses == {}
    tenants = scheduler._tenants
    assert (tenants._num_active, tenants.weights, tenants._parked, list(tenants.active)) == (0, 0, {}, [])
    assert all(tenants.queue_of(name) == (0, 0) for name in tenants._accounts)
    assert scheduler._pool.num_free == scheduler._pool.num_pages
    assert scheduler._pool.num_kept == len(scheduler._pool._index)
    assert sum(account.held for account in scheduler._pool._accounts.values()) == 0
    assert sorted(scheduler._seating.seats) == list(range(scheduler._limits.max_sequences))
    if adapters is not None:
        assert adapters.leases == {}


class ArenaAdapters:
    """A real residency whose images all lie in host memory; a load takes one turn. Rank = the number in a version's name."""

    def __init__(self, num_units: int, *, versions: dict[str, int], max_slots: int = 9, quantum_tokens: int = 8) -> None:
        self.residency = Residency(max_slots, num_units=num_units, unit_bytes=1, quantum_tokens=quantum_tokens)
        self.acquire, self.want = self.residency.acquire, self.residency.want
        self.release, self.withdraw = self.residency.release, self.residency.withdraw
        self.reserve, self.evict, self.excess_of = self.residency.reserve, self.residency.evict, self.residency.excess_of
        self.yields, self.may_return = self.residency.yields, self.residency.may_return
        self.budget, self.is_pinned = self.residency.budget, self.residency.is_pinned
        for version, units in versions.items():
            self.residency.stage(version, rank=int(version.split("r")[1]), blocks=[1] * units)
        self._loading: LoadPlan | None = None
        self._blocked = False

    def arrived(self) -> dict[str, int]:
        plan = self._loading
        if plan is not None:
            self.residency.commit(plan)
        self._loading = self.residency.next_load()
        self._blocked = self._loading is None
        return {} if plan is None else {plan.version: 0}

    def is_starved(self, version: str) -> bool:
        return self._blocked and version in self.residency.wanted()

    @property
    def resident(self) -> set[str]:
        return {holding.version for holding in self.residency.holdings() if holding.place == "device"}

    @property
    def num_leases(self) -> int:
        return sum(holding.leases for holding in self.residency.holdings())
