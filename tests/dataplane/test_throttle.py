"""What loads ahead may take, and that requests never wait for it."""

from __future__ import annotations

import pytest

from dataplane.throttle import Throttle


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_loads_ahead_take_the_burst_and_then_the_rate(clock: Clock) -> None:
    throttle = Throttle(100, clock=clock)
    taken, start_s = 0, clock.now_s
    while taken < 5000:
        if wait_s := throttle.wait_s():
            clock.now_s += wait_s
        throttle.take(30, ahead=True)
        taken += 30
    assert (taken - 100 - 30) / 100 <= clock.now_s - start_s <= taken / 100


def test_a_large_piece_is_owed_in_full(clock: Clock) -> None:
    throttle = Throttle(100, clock=clock)
    throttle.take(1100, ahead=True)
    assert throttle.wait_s() == pytest.approx(10)


def test_what_requests_took_is_waited_for_but_not_for_ever(clock: Clock) -> None:
    throttle = Throttle(100, clock=clock)
    throttle.take(10**9, ahead=False)
    assert throttle.wait_s() == pytest.approx(1)
    clock.now_s += 1
    assert throttle.wait_s() == 0


def test_what_requests_take_forgives_no_debt(clock: Clock) -> None:
    throttle = Throttle(100, clock=clock)
    throttle.take(1100, ahead=True)
    throttle.take(50, ahead=False)
    assert throttle.wait_s() == pytest.approx(10)


def test_without_a_rate_nothing_waits(clock: Clock) -> None:
    throttle = Throttle(0, clock=clock)
    throttle.take(10**12, ahead=True)
    assert throttle.wait_s() == 0
