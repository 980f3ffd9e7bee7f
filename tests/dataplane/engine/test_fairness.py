"""Shares of tenants: the accounts against a simple model, then what they do to scheduling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engine.fairness import Tenants
from dataplane.engine.limits import Prices
from dataplane.engine.messages import Sampling, Submit
from dataplane.engine.sequence import Phase, Sequence
from tests.dataplane.engine.driving import FakeAdapters, Loop, add, assert_idle, expected, make, submit

VERBS = st.lists(
    st.tuples(
        st.sampled_from(["push", "start", "finish", "preempt", "discard", "park", "unpark", "charge", "pause", "resume"]),
        st.integers(0, 9),
        st.sampled_from(["x", "y", "z"]),
    ),
    max_size=80,
)


def sequence(tenant: str, name: str, *, weight: int = 1, prompt: int = 10, version: str | None = None) -> Sequence:
    request = Submit(
        request_id=name, tenant=tenant, prompt=(1,) * prompt, sampling=Sampling(max_tokens=1), weight=weight, version=version
    )
    return Sequence(request, deadline=None, max_context=100)


class Model:
    """What the accounts must amount to, recomputed from plain sets."""

    def __init__(self) -> None:
        self.tenants = Tenants()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.since: dict[str, float] = {}
        self.count = 0

    def active(self) -> set[str]:
        in_line = [item for item in self.waiting if not item.is_parked and not item.paused]
        return {item.submit.tenant for item in (*self.running, *in_line)}

    def apply(self, verb: str, number: int, tenant: str) -> None:
        tenants = self.tenants
        if verb == "push":
            self.count += 1
            item = sequence(tenant, f"r{self.count}", weight=" xyz".index(tenant), prompt=number + 1, version=f"v{number % 3}")
            tenants.push(item)
            self.waiting.append(item)
        elif verb in ("start", "discard", "park") and self.waiting:
            item = self.waiting[number % len(self.waiting)]
            if verb == "park":
                if not item.is_parked and not item.paused:
                    version = str(item.submit.version)
                    if not any(other.is_parked and other.submit.version == version for other in self.waiting):
                        self.since[version] = tenants.least()
                    tenants.park(item)
                return
            if verb == "start" and (item.is_parked or item.paused):
                return
            self.waiting.remove(item)
            if verb == "discard":
                tenants.discard(item)
                return
            if item.order < 0:
                item.order = self.count + len(self.running)
            tenants.start(item)
            item.phase = Phase.RUNNING
            self.running.append(item)
        elif verb in ("finish", "preempt") and self.running:
            item = self.running.pop(number % len(self.running))
            tenants.stop(item, returns=verb == "preempt")
            if verb == "preempt":
                item.phase = Phase.WAITING
                self.waiting.append(item)
        elif verb in ("pause", "resume"):
            ran = [item for item in (*self.running, *self.waiting) if item.order >= 0 and item.paused is (verb == "resume")]
            if ran:
                item = ran[number % len(ran)]
                item.paused = verb == "pause"
                tenants.pause(item) if item.paused else tenants.resume(item)
                assert not item.is_parked, "who waits for its reader waits for no load"
        elif verb == "unpark":
            version = f"v{number % 3}"
            woken = {
                item.account: (item.account.service, item.account.is_active)
                for item in self.waiting
                if item.is_parked and item.submit.version == version
            }
            tenants.unpark(version)
            for account, (before, was_active) in woken.items():
                credit_from = before if was_active else max(before, self.since[version])
                assert account.service == credit_from, "one load's time is its credit, and none where it was served meanwhile"
        elif verb == "charge" and self.running:
            account = self.running[number % len(self.running)].account
            account.service += number / account.weight

    def check(self) -> None:
        tenants = self.tenants
        active = self.active()
        accounts = {account.name: account for account in tenants.active}
        assert set(accounts) == active
        assert tenants.num_waiting == len(self.waiting)
        assert sum(tenants.share(account) for account in accounts.values()) == pytest.approx(1.0 if active else 0.0)
        if accounts:
            assert tenants.least() == min(account.service for account in accounts.values())
        for name in "xyz":
            mine = [item for item in self.waiting if item.submit.tenant == name]
            assert tenants.queue_of(name) == (len(mine), sum(len(item.submit.prompt) for item in mine))
        order = list(tenants.in_order([0], max_scan=100))
        firsts = list(dict.fromkeys(item.submit.tenant for item in order))
        services = [accounts[name].service for name in firsts]
        assert services == sorted(services), "fairest first"
        assert not any(item.is_parked or item.paused for item in order if item.phase is Phase.WAITING)
        in_line = [item for item in self.waiting if not item.is_parked and not item.paused]
        assert sorted(item.submit.request_id for item in order if item.phase is Phase.WAITING) == sorted(
            item.submit.request_id for item in in_line
        ) or any(account.unfinished for account in accounts.values())


@settings(max_examples=5 * settings.default.max_examples)
@given(VERBS)
def test_accounts_equal_a_simple_model(verbs: list[tuple[str, int, str]]) -> None:
    model = Model()
    for verb, number, tenant in verbs:
        active, least = model.active(), model.tenants.least()
        model.apply(verb, number, tenant)
        model.check()
        for account in model.tenants.active:
            if account.name not in active and verb == "push":
                assert account.service >= least, "who comes back has no credit"
    for item in list(model.running):
        model.tenants.stop(item, returns=False)
    for item in list(model.waiting):
        model.tenants.discard(item)
    assert (model.tenants.num_waiting, model.tenants._num_active, model.tenants.weights) == (0, 0, 0)
    assert not model.tenants._parked


def test_idle_tenants_are_forgotten() -> None:
    tenants = Tenants()
    for i in range(3000):
        item = sequence(f"t{i}", f"r{i}")
        tenants.push(item)
        item.account.service += 3000 - i
        tenants.discard(item)
    assert len(tenants._accounts) < 2100


def service_of(scheduler: Any, tenant: str) -> float:
    return float(scheduler._tenants._accounts[tenant].service)


def flood(scheduler: Any, tenant: str, count: int, *, prompt: int = 8, **fields: Any) -> None:
    for i in range(count):
        name = f"{tenant}{scheduler._requests._count}"
        tokens = tuple((i * 7 + j) % 50 for j in range(prompt))
        add(scheduler, submit(name, tokens, tenant=tenant, cache_salt=tenant, **({"max_tokens": 8} | fields)))


@given(
    weights=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    prompts=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    outputs=st.tuples(st.integers(1, 10), st.integers(1, 10)),
)
def test_backlogged_tenants_are_served_by_weight(weights: Any, prompts: Any, outputs: Any) -> None:
    scheduler = make(num_pages=64, max_sequences=8, max_waiting=2000)
    loop = Loop(scheduler)
    for tenant, weight, prompt, output in zip("xy", weights, prompts, outputs, strict=True):
        for i in range(250):
            add(scheduler, submit(f"{tenant}{i}", prompt, tenant=tenant, weight=weight, max_tokens=output))
    for _ in range(120):
        loop.turn()
        if min(scheduler._tenants.queue_of(tenant)[0] for tenant in "xy") == 0:
            break
        gap = abs(service_of(scheduler, "x") - service_of(scheduler, "y"))
        assert gap <= 2 * (16 + 2 * 8 * 32) / min(weights), "no tenant falls behind without bound"


def test_weights_decide_who_gets_the_steps() -> None:
    scheduler = make(num_pages=64, max_sequences=4)
    loop = Loop(scheduler)
    flood(scheduler, "x", 40, weight=3)
    flood(scheduler, "y", 40)
    for _ in range(60):
        loop.turn()
    done = [name[0] for name in loop.finished]
    assert done.count("x") / max(1, done.count("y")) == pytest.approx(3, rel=0.35)


def test_a_pause_banks_no_credit() -> None:
    scheduler = make(num_pages=64, max_sequences=2)
    loop = Loop(scheduler)
    flood(scheduler, "y", 1)
    loop.run()
    flood(scheduler, "x", 30)
    for _ in range(60):
        loop.turn()
    flood(scheduler, "y", 10)
    gap = service_of(scheduler, "x") - service_of(scheduler, "y")
    assert gap == 0, "lifted to the least active"


def test_cached_and_recomputed_tokens_are_free() -> None:
    scheduler = make(num_pages=10, max_sequences=2)
    loop = Loop(scheduler)
    costs = []
    for name in ("cold", "warm"):
        before = service_of(scheduler, "t") if "t" in scheduler._tenants._accounts else scheduler._tenants.least()
        add(scheduler, submit(name, 12, max_tokens=1, cache_salt="s"))
        loop.turn()
        costs.append(scheduler._tenants.least() - before)
    assert costs == [12, 4]
    preempted, roomy = (run_two(num_pages) for num_pages in (10, 32))
    assert preempted.device.num_computed > roomy.device.num_computed
    assert preempted.scheduler._tenants.least() == roomy.scheduler._tenants.least()


def run_two(num_pages: int) -> Loop:
    loop = Loop(make(num_pages=num_pages, max_sequences=2))
    for name in "ab":
        add(loop.scheduler, submit(name, (ord(name), *range(1, 8)), max_tokens=16))
    loop.run()
    return loop


def test_decode_rank_rows_and_cold_loads_cost_what_the_prices_say() -> None:
    prices = Prices(prefill_token=1, decode_token=10, rank_row=0.5, load_mib=100)
    adapters = FakeAdapters()
    adapters.load_bytes = 3 << 20
    scheduler = make(adapters=adapters, prices=prices)
    loop = Loop(scheduler)
    add(scheduler, submit("cold", 4, max_tokens=3, version="v1r3"))
    add(scheduler, submit("base", 4, max_tokens=3, tenant="u"))
    loop.run()
    assert scheduler._tenants.least() == 4 + 2 * 10
    adapters.resident.add("v1r3")
    loop.run()
    assert scheduler._tenants.least() == 300 + 4 + 2 * 10 + 3 * 0.5 * 16


def test_a_tenant_below_its_share_waits_three_steps_at_most_and_the_newest_give_way() -> None:
    scheduler = make(num_pages=64, max_sequences=4, max_step_tokens=64)
    loop = Loop(scheduler)
    flood(scheduler, "x", 30, max_tokens=20)
    for _ in range(3):
        loop.turn()
    assert scheduler.num_running == 4
    flood(scheduler, "v", 1, prompt=3, max_tokens=1)
    served = []
    for _ in range(3):
        loop.turn()
        served.append("v30" in loop.finished)
    assert served == [False, False, True]
    assert [item.submit.request_id for item in scheduler._seating.running] == ["x0", "x1", "x2"], "the newest gave way"
    loop.run()
    for i, name in enumerate(sorted((name for name in loop.finished if name[0] == "x"), key=lambda name: int(name[1:]))):
        assert loop.outputs[name] == expected(tuple((i * 7 + j) % 50 for j in range(8)), 20, ())
    assert_idle(scheduler)


def test_who_holds_no_more_than_its_share_is_not_disturbed() -> None:
    scheduler = make(num_pages=64, max_sequences=4)
    loop = Loop(scheduler)
    for tenant in "abcd":
        flood(scheduler, tenant, 1, max_tokens=24)
        loop.turn()
    flood(scheduler, "e", 3)
    for _ in range(12):
        loop.turn()
    assert {item.submit.tenant for item in scheduler._seating.running} == set("abcd"), "each has one, its oldest"
    loop.run()
    assert len(loop.finished) == 7


def test_more_than_one_request_is_not_more_than_a_share() -> None:
    scheduler = make(num_pages=64, max_sequences=4)
    loop = Loop(scheduler)
    for tenant, count in {"a": 2, "b": 1, "c": 1}.items():
        flood(scheduler, tenant, count, max_tokens=24, weight=10 if tenant == "a" else 1)
        loop.turn()
    flood(scheduler, "d", 1)
    for _ in range(12):
        loop.turn()
        assert [item.submit.tenant for item in scheduler._seating.running] == ["a", "a", "b", "c"], "a may have three"
    loop.run()
    assert len(loop.finished) == 5


def test_seats_are_shared_only_while_others_want_them() -> None:
    scheduler = make(num_pages=64, max_sequences=4)
    loop = Loop(scheduler)
    flood(scheduler, "x", 8)
    for _ in range(3):
        loop.turn()
    assert scheduler.num_running == 4, "alone it may take all"


def test_pages_too_are_shared() -> None:
    scheduler = make(num_pages=16, max_sequences=8, max_step_tokens=64)
    loop = Loop(scheduler)
    flood(scheduler, "x", 8, max_tokens=20)
    for _ in range(4):
        loop.turn()
    assert scheduler._seating.seats
    flood(scheduler, "v", 1, prompt=20, max_tokens=2)
    for _ in range(5):
        loop.turn()
    assert any(name[0] == "v" for name in loop.outputs)
    loop.run()
    assert_idle(scheduler)


def test_one_unfinished_prompt_a_tenant_while_others_wait() -> None:
    scheduler = make(num_pages=64, max_sequences=8, max_step_tokens=10, max_context=64)
    loop = Loop(scheduler)
    flood(scheduler, "x", 4, prompt=30, max_tokens=2)
    flood(scheduler, "y", 4, prompt=30, max_tokens=2)
    for _ in range(20):
        loop.turn()
        for account in scheduler._tenants.active:
            assert len(account.unfinished) <= 1
    loop.run()
    assert_idle(scheduler)


def test_a_prompt_that_may_not_use_a_whole_step_lets_others_in_and_none_of_its_own_tenant() -> None:
    scheduler = make(num_pages=300, max_sequences=8, max_step_tokens=256, max_context=200)
    scored = submit("scored", 130, tenant="x")
    scheduler.add(replace(scored, sampling=replace(scored.sampling, prompt_logprobs=0)), 0.0)
    flood(scheduler, "x", 2, prompt=100)
    flood(scheduler, "y", 3, prompt=100)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens == 256, "64 rows of the scored prompt, and two prompts of the other tenant"
    assert [(item.request_id[0], item.is_unfinished) for item in scheduler._seating.running] == [
        ("s", True), ("y", False), ("y", True),
    ]  # fmt: skip


def test_a_long_prompt_does_not_hold_up_another_tenants_short_one() -> None:
    scheduler = make(num_pages=64, max_sequences=4, max_step_tokens=8, max_context=200)
    loop = Loop(scheduler)
    flood(scheduler, "x", 2, prompt=150, max_tokens=2)
    for _ in range(4):
        loop.turn()
    flood(scheduler, "v", 1, prompt=6, max_tokens=1)
    loop.turn()
    loop.turn()
    assert any(name[0] == "v" for name in loop.finished)


def test_a_tenant_whose_every_request_loads_keeps_one_loads_credit_and_no_more() -> None:
    adapters = FakeAdapters()
    scheduler = make(num_pages=64, max_sequences=2, adapters=adapters)
    loop = Loop(scheduler)
    flood(scheduler, "x", 50)
    for _ in range(5):
        loop.turn()
    add(scheduler, submit("cold", tenant="y", version="v1r3"))
    for _ in range(5):
        loop.turn()
    (parked,) = scheduler._tenants._parked.values()
    since, later = parked.since, scheduler._tenants.least()
    assert since < later
    assert "y" not in {account.name for account in scheduler._tenants.active}
    adapters.resident.add("v1r3")
    scheduler._prefill.wake()
    assert service_of(scheduler, "y") == since, "what one load took is its credit"
    loop.run()
    assert_idle(scheduler, adapters)


def test_a_request_that_loads_is_not_in_the_way_of_many_others_of_its_tenant() -> None:
    adapters = FakeAdapters()
    scheduler = make(num_pages=64, adapters=adapters, max_scan=3)
    loop = Loop(scheduler)
    for i in range(20):
        add(scheduler, submit(f"cold{i}", version=f"v{i}r3"))
    add(scheduler, submit("base"))
    for _ in range(12):
        loop.turn()
    assert set(loop.finished) == {"base"}
    assert scheduler.num_waiting == 20
    adapters.resident.update(f"v{i}r3" for i in range(20))
    loop.run()
    assert len(loop.finished) == 21
    assert_idle(scheduler, adapters)
