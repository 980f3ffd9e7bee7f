"""Plans: what holds for each of them, and what a change may move."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.placement import Demand, Demands, Fleet, Plan, Policy, Replica
from controlplane.planning import revise

POLICY = Policy()
_HARD = max(POLICY.tolerance, 1 + POLICY.grain * POLICY.inertia) + 1e-6
"""What a replica of a fleet of equals has at most, over its fair share."""


def replicas(count: int, *, slots: int = 8, size_bytes: float = 800.0, rank_rows: float = 1e3) -> list[Replica]:
    return [Replica(id=f"r{number:03}", slots=slots, size_bytes=size_bytes, rank_rows=rank_rows) for number in range(count)]


def zipf(count: int, *, size_bytes: float = 100.0) -> list[Demand]:
    return [
        Demand(key=f"t{number % 7}/a{number:04}", rate=1000 / (number + 1), size_bytes=size_bytes, rank_rows=16)
        for number in range(count)
    ]


demands = st.lists(
    st.builds(
        Demand,
        key=st.integers(0, 400).map(lambda number: f"t{number % 5}/a{number}"),
        rate=st.one_of(st.just(0.0), st.floats(1e-3, 1e4)),
        size_bytes=st.sampled_from([0.0, 10.0, 100.0, 300.0, 5000.0]),
        rank_rows=st.sampled_from([0.0, 8.0, 64.0, 900.0]),
        slots=st.sampled_from([1.0, 2.0]),
    ),
    min_size=1,
    max_size=80,
)
fleets = st.lists(
    st.builds(
        Replica,
        id=st.integers(0, 40).map(lambda number: f"r{number}"),
        slots=st.sampled_from([0, 1, 8]),
        size_bytes=st.sampled_from([0.0, 100.0, 800.0]),
        rank_rows=st.sampled_from([64.0, 1e3, float("inf")]),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
    ),
    min_size=1,
    max_size=12,
)


def check(plan: Plan, of: list[Replica], asked: list[Demand]) -> None:
    """What is true of every plan."""
    room, need = {one.id: one for one in of}, {one.key: one for one in asked}
    homes = plan.homes()
    assert set(homes) == set(need), "every adapter has a home"
    assert all(len(set(one)) == len(one) and set(one) <= set(room) for one in homes.values())
    for replica, keys in plan.warm().items():
        known = room[replica]
        for column, most in (("slots", known.slots), ("size_bytes", known.size_bytes), ("rank_rows", known.rank_rows)):
            assert sum(getattr(need[key], column) for key in keys) <= POLICY.fill * most + 1e-6, "no replica over its memory"
    assert plan.loads().sum() == pytest.approx(sum(one.rate for one in need.values()))


@settings(max_examples=150, deadline=None)
@given(of=fleets, asked=demands, later=fleets, asked_later=demands)
def test_no_plan_is_over_memory_or_without_a_home_whatever_came_before(
    of: list[Replica], asked: list[Demand], later: list[Replica], asked_later: list[Demand]
) -> None:
    plan = revise(Plan(), Fleet.of(of), Demands.of(asked))
    check(plan, of, asked)
    after = revise(plan, Fleet.of(later), Demands.of(asked_later))
    check(after, later, asked_later)


@settings(max_examples=100, deadline=None)
@given(of=fleets, asked=demands, seed=st.integers(0, 99))
def test_equal_arguments_give_equal_plans_in_whatever_order_they_come(of: list[Replica], asked: list[Demand], seed: int) -> None:
    of, asked = list({one.id: one for one in of}.values()), list({one.key: one for one in asked}.values())
    plan = revise(Plan(), Fleet.of(of), Demands.of(asked))
    shuffle = random.Random(seed)
    shuffle.shuffle(of)
    shuffle.shuffle(asked)
    again = revise(Plan(), Fleet.of(of), Demands.of(asked))
    assert list(again.pairs()) == list(plan.pairs())
    assert again.warm() == plan.warm()


@settings(max_examples=150, deadline=None)
@given(count=st.integers(1, 12), asked=demands, gone=st.integers(0, 11), asked_later=demands)
def test_a_replica_of_equals_never_has_more_than_the_bound(
    count: int, asked: list[Demand], gone: int, asked_later: list[Demand]
) -> None:
    of = replicas(count)
    plan = revise(Plan(), Fleet.of(of), Demands.of(asked))
    even(plan, asked)
    rest = [one for number, one in enumerate(of) if number != gone] or of
    even(revise(plan, Fleet.of(rest), Demands.of(asked_later)), asked_later)


def even(plan: Plan, asked: list[Demand]) -> None:
    loads = plan.loads()
    everywhere = sum(max(plan.load[plan.rows.adapter == index]) for index in np.flatnonzero(counts_of(plan) == len(loads)))
    assert loads.max() <= max(_HARD * loads.mean(), everywhere + 1e-6)


def counts_of(plan: Plan) -> np.ndarray:
    return np.bincount(plan.rows.adapter, minlength=len(plan.keys))


@pytest.mark.parametrize("lost", [0, 7, 29])
def test_losing_a_replica_moves_what_was_there_and_hardly_more(lost: int) -> None:
    of, asked = replicas(30), zipf(1500)
    fleet, columns = Fleet.of(of), Demands.of(asked)
    before = revise(Plan(), fleet, columns)
    after = revise(before, Fleet.of([one for number, one in enumerate(of) if number != lost]), columns)
    check(after, of[:lost] + of[lost + 1 :], asked)
    gained = set(after.pairs()) - set(before.pairs())
    had = Counter(replica for _, replica in before.pairs())[of[lost].id]
    assert len(gained) <= 1.3 * had
    assert all(replica != of[lost].id for _, replica in after.pairs())


def test_a_replica_that_joins_draws_its_share_and_nothing_else_moves() -> None:
    of, asked = replicas(30), zipf(1500)
    columns = Demands.of(asked)
    before = revise(Plan(), Fleet.of(of[:-1]), columns)
    after = revise(before, Fleet.of(of), columns)
    check(after, of, asked)
    gained = set(after.pairs()) - set(before.pairs())
    assert {replica for _, replica in gained} == {of[-1].id}
    assert len(before.rows) / 30 * 0.7 <= len(gained) <= len(before.rows) / 30 + 1
    assert after.loads()[-1] <= POLICY.bound * after.loads().mean()
    assert len(after.warm()[of[-1].id]) == 7, "its memory is planned full"


def test_nothing_moves_where_nothing_changed() -> None:
    fleet, columns = Fleet.of(replicas(30)), Demands.of(zipf(1500))
    before = revise(Plan(), fleet, columns)
    after = revise(before, fleet, columns)
    assert list(after.pairs()) == list(before.pairs())


def test_a_little_more_or_less_traffic_moves_nothing() -> None:
    fleet, asked = Fleet.of(replicas(30)), zipf(1500)
    before = revise(Plan(), fleet, Demands.of(asked))
    noise = np.random.default_rng(5).uniform(0.95, 1.05, len(asked))
    shaken = [
        Demand(key=one.key, rate=one.rate * factor, size_bytes=one.size_bytes, rank_rows=one.rank_rows)
        for one, factor in zip(asked, noise.tolist(), strict=True)
    ]
    after = revise(before, fleet, Demands.of(shaken))
    assert len(set(after.pairs()) - set(before.pairs())) <= 0.01 * len(asked)


def test_popular_adapters_have_homes_by_their_traffic() -> None:
    plan = revise(Plan(), Fleet.of(replicas(30)), Demands.of(zipf(1500)))
    homes, fair = plan.homes(), plan.loads().mean()
    for one in zipf(1500):
        wanted = int(np.clip(np.ceil(one.rate / (POLICY.grain * fair)), 1, 30))
        assert len(homes[one.key]) == wanted


def test_what_becomes_popular_gets_more_homes_and_memory_at_once() -> None:
    fleet, asked = Fleet.of(replicas(30)), zipf(1500)
    before = revise(Plan(), fleet, Demands.of(asked))
    cold = next(key for key in before.homes() if not any(key in held for held in before.warm().values()))
    risen = [Demand(key=one.key, rate=500.0 if one.key == cold else one.rate, size_bytes=100, rank_rows=16) for one in asked]
    after = revise(before, fleet, Demands.of(risen))
    assert len(after.homes()[cold]) > 1
    assert all(cold in after.warm()[home] for home in after.homes()[cold])


def test_the_most_useful_adapters_are_the_warm_ones_and_stage_first() -> None:
    plan = revise(Plan(), Fleet.of(replicas(30)), Demands.of(zipf(1500)))
    held = {key for keys in plan.warm().values() for key in keys}
    rates = {one.key: one.rate for one in zipf(1500)}
    best = sum(sorted(rates.values(), reverse=True)[: 30 * 7])
    assert sum(rates[key] for key in held) >= 0.93 * best
    loads = dict(zip(zip(plan.rows.adapter.tolist(), plan.rows.replica.tolist(), strict=True), plan.load.tolist(), strict=True))
    for replica, keys in plan.warm().items():
        order = [loads[plan.keys.index(key), plan.replicas.index(replica)] for key in keys]
        assert order == sorted(order, reverse=True)


def test_without_replicas_or_adapters_there_is_nothing_to_plan() -> None:
    assert revise(Plan(), Fleet.of([]), Demands.of(zipf(3))).homes() == {}
    assert revise(Plan(), Fleet.of(replicas(2)), Demands.of([])).warm() == {"r000": (), "r001": ()}
