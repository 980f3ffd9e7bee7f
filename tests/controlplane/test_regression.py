"""The test of a canary: how often it is wrong, how soon it is right, and that looking often does not change that."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.regression import ALARM, FALSE_ALARM, Regression, Tally, Weighed

STEPS = 3
WINDOW = 10


def requests_until_alarm(
    random: np.random.Generator,
    *,
    stable: float,
    rise: float = 0.0,
    weight: float,
    num_requests: int,
    swing: float = 0.0,
    rise_from: int = 0,
    retries: int = 0,
) -> float:
    """Requests of the version until the alarm; infinite without one.

    Windows end when each of the two has ten requests and the version a twentieth of what it has. The rate swings with time, for
    both alike. A request that failed comes again, some times, with another prompt and to the same version.
    """
    test, done = Regression(num_steps=STEPS), 0
    while done < num_requests:
        step = done * STEPS // num_requests
        na = max(WINDOW, done // 20)
        nb = max(WINDOW, int(random.negative_binomial(na, weight)))
        rate = stable * (1 + swing * math.sin(done / 30))
        version = tally(random, na, rate + (rise if done >= rise_from else 0.0), retries)
        done += version.total
        if test.add(Weighed(step, version, tally(random, nb, rate, retries))) >= ALARM:
            return done
    return math.inf


def tally(random: np.random.Generator, num_requests: int, rate: float, retries: int) -> Tally:
    failed = int(random.binomial(num_requests, rate))
    found = Tally(num_requests - failed, failed)
    return found + tally(random, failed, rate, retries - 1) if retries and failed else found


def at_most(num_canaries: int) -> float:
    """What the part of false alarms stays below, with three standard deviations for so few simulated canaries."""
    return FALSE_ALARM + 3 * math.sqrt(FALSE_ALARM / num_canaries)


def alarms(num_canaries: int, *, seed: int = 1, within: int, **world: float) -> float:
    """Part of the canaries in which there was one."""
    random = np.random.default_rng(seed)
    found = [requests_until_alarm(random, num_requests=within, **world) for _ in range(num_canaries)]  # type: ignore[arg-type]
    return sum(one <= within + WINDOW for one in found) / num_canaries


@pytest.mark.parametrize(("stable", "weight"), [(0.001, 0.5), (0.02, 0.05), (0.3, 0.2)])
def test_of_versions_that_are_no_worse_at_most_one_in_a_hundred_is_rolled_back(stable: float, weight: float) -> None:
    assert alarms(200, within=1000, stable=stable, weight=weight) <= at_most(200)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stable", "weight"), list(itertools.product([0.001, 0.05, 0.3], [0.05, 0.5])))
def test_of_thousands_too_however_long_they_run(stable: float, weight: float) -> None:
    assert alarms(2000, within=3000, stable=stable, weight=weight) <= at_most(2000)


@pytest.mark.parametrize(("swing", "rise", "retries"), [(0.9, 0.0, 0), (0.0, -0.02, 0), (0.0, 0.0, 3)])
def test_neither_rates_that_swing_for_both_nor_repeats_nor_a_better_version_raise_more_alarms(
    swing: float, rise: float, retries: int
) -> None:
    assert alarms(200, within=1000, stable=0.05, weight=0.2, swing=swing, rise=rise, retries=retries) <= at_most(200)


@pytest.mark.parametrize(
    ("stable", "weight", "power"),
    [
        *[(0.0, 0.1, 0.99), (0.01, 0.1, 0.99), (0.02, 0.1, 0.97), (0.05, 0.1, 0.84), (0.1, 0.1, 0.57)],
        *[(0.01, 0.25, 0.98), (0.02, 0.25, 0.92), (0.05, 0.25, 0.74), (0.01, 0.5, 0.94), (0.05, 0.5, 0.47)],
    ],
)
def test_five_points_more_are_found_within_five_hundred_requests(stable: float, weight: float, power: float) -> None:
    assert alarms(200, within=500, stable=stable, rise=0.05, weight=weight) >= power


def test_a_version_that_always_fails_is_found_at_once() -> None:
    assert alarms(50, within=20, stable=0.01, rise=0.98, weight=0.1) == 1.0


def test_what_went_well_before_does_not_hide_a_regression_that_begins_with_a_later_step() -> None:
    assert alarms(100, within=1500, stable=0.01, rise=0.05, rise_from=1000, weight=0.25) >= 0.95


@settings(max_examples=40)
@given(
    windows=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 400), st.integers(1, 400), st.integers(0, 4)), min_size=1, max_size=3
    )
)
def test_by_chance_the_version_has_so_many_of_all_failures_in_at_most_one_of_a_hundred_cases(
    windows: list[tuple[int, int, int, int]],
) -> None:
    """Every way in which the failures of each window may be divided, each with its chance."""
    cases = []
    for step, na, nb, k in sorted(windows):
        parts = range(max(0, k - nb), min(na, k) + 1)
        cases.append([(Weighed(step, Tally(na - ka, ka), Tally(nb - k + ka, k - ka)), chance(na, nb, ka, k)) for ka in parts])
    wrong = 0.0
    for case in itertools.product(*cases):
        test = Regression(num_steps=STEPS)
        if max(test.add(window) for window, _ in case) >= ALARM:
            wrong += math.prod(part for _, part in case)
    assert wrong <= FALSE_ALARM * (1 + 1e-9)


def chance(na: int, nb: int, ka: int, k: int) -> float:
    return math.comb(na, ka) * math.comb(nb, k - ka) / math.comb(na + nb, k)


def test_what_may_be_given_to_chance_is_given_nearly_all() -> None:
    """One window of very many requests: the first bound is the quantile of the normal distribution."""
    for failed, is_enough in ((5175, True), (5105, False)):
        test = Regression(num_steps=1)
        window = Weighed(0, Tally(50_000 - failed, failed), Tally(40_000 + failed, 10_000 - failed))
        assert (test.add(window) >= ALARM) == is_enough


def test_windows_without_failures_say_nothing_and_very_many_are_told_in_finite_numbers() -> None:
    test = Regression(num_steps=2)
    assert 0 < test.add(Weighed(0, Tally(10), Tally(90))) < ALARM
    assert ALARM <= test.add(Weighed(1, Tally(0, 10**7), Tally(10**7, 0))) < math.inf
    assert test.add(Weighed(1, Tally(10**7), Tally(0, 10**7))) >= ALARM, "what was enough once is enough"
