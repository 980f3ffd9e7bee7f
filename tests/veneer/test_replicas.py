from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veneer.errors import InvalidArgumentError
from veneer.replicas import Replicas, read_addresses

ADDRESSES = [f"10.0.0.{number}:7700" for number in range(8)]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replicas(clock: Clock) -> Replicas:
    return Replicas(ADDRESSES, clock=clock)


def test_hinted_addresses_go_first_and_those_never_given_nowhere(replicas: Replicas) -> None:
    order = replicas.order("acme/tone", [ADDRESSES[5], "evil:1", ADDRESSES[2]])
    assert set(order[:2]) == {ADDRESSES[5], ADDRESSES[2]}
    assert sorted(order) == ADDRESSES


@given(st.lists(st.text(max_size=20), max_size=10), st.text(max_size=20))
def test_every_order_is_of_the_addresses_that_were_given(hinted: list[str], key: str) -> None:
    assert sorted(Replicas(ADDRESSES).order(key, hinted)) == ADDRESSES


def test_without_a_hint_an_adapter_keeps_its_place_and_adapters_spread(replicas: Replicas) -> None:
    first = Counter(replicas.order(f"acme/{number}")[0] for number in range(400))
    assert len(first) == len(ADDRESSES)
    assert max(first.values()) < 100
    with replicas.request(replicas.order("acme/tone")[0]):
        assert replicas.order("acme/tone") == Replicas(ADDRESSES).order("acme/tone")


def test_an_address_that_goes_moves_only_its_own_adapters() -> None:
    whole, rest = Replicas(ADDRESSES), Replicas(ADDRESSES[1:])
    for number in range(200):
        first = whole.order(f"acme/{number}")[0]
        assert first in (rest.order(f"acme/{number}")[0], ADDRESSES[0])


def test_of_hinted_addresses_the_one_with_least_to_do_goes_first(replicas: Replicas) -> None:
    hinted = ADDRESSES[:2]
    busy = replicas.order("acme/tone", hinted)[0]
    with replicas.request(busy):
        assert replicas.order("acme/tone", hinted)[:2] == [one for one in hinted if one != busy] + [busy]
    assert replicas.order("acme/tone", hinted)[0] == busy


def test_requests_of_the_base_go_where_least_is_to_do(replicas: Replicas) -> None:
    first = replicas.order("")[0]
    with replicas.request(first):
        assert replicas.order("")[0] != first


def test_what_failed_rests_longer_each_time_and_an_answer_ends_it(replicas: Replicas, clock: Clock) -> None:
    bad = ADDRESSES[3]
    for rest_s in (0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        replicas.failed(bad)
        assert replicas.order("acme/tone", [bad])[-1] == bad, "even if it is hinted"
        clock.now_s += rest_s - 0.01
        assert replicas.order("acme/tone", [bad])[-1] == bad
        clock.now_s += 0.02
        assert replicas.order("acme/tone", [bad])[0] == bad
    replicas.answered(bad, "acme/tone")
    replicas.failed(bad)
    clock.now_s += 0.51
    assert replicas.order("acme/tone", [bad])[0] == bad


def test_all_streams_of_a_process_that_ended_are_one_failure(replicas: Replicas, clock: Clock) -> None:
    bad = ADDRESSES[3]
    for _ in range(64):
        replicas.failed(bad)
    clock.now_s += 0.51
    assert replicas.order("acme/tone", [bad])[0] == bad


def test_what_cannot_serve_one_adapter_now_serves_the_others(replicas: Replicas, clock: Clock) -> None:
    cold = ADDRESSES[3]
    replicas.failed(cold, "acme/tone")
    assert replicas.order("acme/tone", [cold])[-1] == cold
    assert replicas.order("acme/other", [cold])[0] == cold
    replicas.answered(cold, "acme/other")
    assert replicas.order("acme/tone", [cold])[-1] == cold
    replicas.answered(cold, "acme/tone")
    assert replicas.order("acme/tone", [cold])[0] == cold


def test_what_is_known_of_failures_is_bounded(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veneer.replicas._MAX_KEYS", 10)
    for number in range(100):
        replicas.failed(ADDRESSES[0], f"acme/{number}")
    assert len(replicas._rests) <= 10


def test_addresses_are_a_list_with_commas() -> None:
    assert read_addresses("") == []
    assert read_addresses("a:1, b:2") == ["a:1", "b:2"]
    with pytest.raises(InvalidArgumentError, match="no list of addresses"):
        read_addresses("a:1,,b:2")
