from __future__ import annotations

import random
from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dataplane.lora.eviction import Recency, Usage, Victims

HALF_LIFE = 4


def held(victims: Victims, *versions: str) -> Victims:
    for version in versions:
        victims.add(version, size=1)
    return victims


def first(victims: Victims) -> str:
    with closing(victims.in_order()) as order:
        return next(order)


def test_what_is_used_often_outlives_a_scan() -> None:
    victims = held(Victims(Usage(half_life=1000)), "hot")
    for _ in range(5):
        victims.note("hot")
    for number in range(500):
        victims.add(f"scan{number}", size=1)
        victims.note(f"scan{number}")
        assert first(victims) != "hot"


def test_by_recency_a_scan_pushes_out_what_is_used_often() -> None:
    victims = Victims(Recency())
    for version in ("hot", "hot", "scan"):
        victims.add(version, size=1)
        victims.note(version)
    assert list(victims.in_order()) == ["hot", "scan"]
    victims.note("hot", uses=0)
    assert list(victims.in_order()) == ["scan", "hot"]


def test_uses_fade_so_that_what_was_popular_goes_when_others_are() -> None:
    victims = held(Victims(Usage(half_life=10)), "old", "new")
    for _ in range(20):
        victims.note("old")
    for _ in range(12):
        victims.note("new")
    assert first(victims) == "old"


def test_uses_of_a_version_without_a_copy_count_when_it_comes_back() -> None:
    victims = Victims(Usage(half_life=1000))
    for version in "aab":
        victims.note(version)
    held(victims, "a", "b")
    assert first(victims) == "b"
    victims.discard("b")
    victims.note("b")
    victims.note("b")
    held(victims, "b")
    assert first(victims) == "a"


def test_of_two_used_alike_the_larger_goes_first_and_what_is_cheap_to_bring_again() -> None:
    victims = Victims(Usage(half_life=1000))
    victims.add("large", size=3)
    victims.add("small", size=2)
    victims.add("far", size=3, cost=8)
    assert list(victims.in_order()) == ["large", "small", "far"]
    victims.add("far", size=3)
    assert list(victims.in_order()) == ["large", "far", "small"]


def test_of_equals_the_one_noted_longest_ago_goes_first() -> None:
    victims = held(Victims(Usage(half_life=1000)), "a", "b", "c")
    victims.note("a", uses=0)
    assert list(victims.in_order()) == ["b", "c", "a"]


def test_an_order_that_is_broken_off_loses_nothing() -> None:
    victims = held(Victims(Recency()), "a", "b", "c")
    assert first(victims) == "a"
    victims.discard("b")
    assert list(victims.in_order()) == ["a", "c"]
    assert len(victims) == 2


@pytest.mark.parametrize("policy", [Usage(half_life=1 << 20, max_versions=100), Recency(max_versions=100)])
def test_what_is_remembered_is_bounded_and_what_matters_is_kept(policy: Usage | Recency) -> None:
    for number in range(10_000):
        policy.note("hot")
        policy.note(f"once{number}")
    remembered = policy._scores if isinstance(policy, Usage) else policy._used_at
    assert len(remembered) <= 100
    assert "hot" in remembered


def test_entries_out_of_date_do_not_pile_up() -> None:
    victims = held(Victims(Usage(half_life=16)), *map(str, range(10)))
    source = random.Random(1)
    for _ in range(5000):
        victims.note(str(source.randrange(20)))
    assert len(victims._heap) <= 2 * 10 + 64 + 1
    assert len(list(victims.in_order())) == 10


@given(uses=st.lists(st.sampled_from("abcde"), max_size=1200))
def test_the_order_is_that_of_uses_each_halved_in_a_half_life(uses: list[str]) -> None:
    victims = held(Victims(Usage(half_life=HALF_LIFE)), *"abcde")
    exact = dict.fromkeys("abcde", 0)
    for number, version in enumerate(uses):
        victims.note(version)
        doublings, part = divmod(number, HALF_LIFE)
        exact[version] += (HALF_LIFE + part) << doublings
    eras = max(0, len(uses) - 1) // (32 * HALF_LIFE)
    blur = (eras + 1) << (32 * eras)
    order = [version for version in victims.in_order() if exact[version]]
    for one, other in pairwise(order):
        assert exact[one] <= exact[other] + blur


class AgainstAModel(RuleBasedStateMachine):
    """The order is that of a list sorted anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Usage(half_life=2)
        self.victims = Victims(self.policy)
        self.copies: dict[str, tuple[int, int, int]] = {}
        self.worths: dict[str, int] = {}
        self.clock = 0

    def put(self, version: str, size: int, cost: int) -> None:
        self.clock += 1
        self.copies[version] = (size, cost, self.clock)
        self.worths[version] = self.policy.worth(version, size=size, cost=cost)

    @rule(version=st.sampled_from("abcdef"), size=st.integers(1, 4), cost=st.integers(1, 8))
    def add(self, version: str, size: int, cost: int) -> None:
        self.victims.add(version, size=size, cost=cost)
        self.put(version, size, cost)

    @rule(version=st.sampled_from("abcdef"))
    def discard(self, version: str) -> None:
        self.victims.discard(version)
        self.copies.pop(version, None)

    @rule(version=st.sampled_from("abcdef"), times=st.integers(1, 40))
    def note(self, version: str, times: int) -> None:
        for _ in range(times):
            era = self.policy.era
            self.victims.note(version)
            if version in self.copies:
                self.put(version, *self.copies[version][:2])
            if self.policy.era != era:
                for other in sorted(self.copies, key=lambda other: self.copies[other][2]):
                    self.put(other, *self.copies[other][:2])

    @invariant()
    def the_order_is_the_models(self) -> None:
        expected = sorted(self.copies, key=lambda version: (self.worths[version], self.copies[version][2]))
        assert list(self.victims.in_order()) == expected
        assert len(self.victims) == len(expected)


TestAgainstAModel = AgainstAModel.TestCase
