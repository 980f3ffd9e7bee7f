"""The test of a canary: how often it is wrong, how soon it is right, and that looking often does not change that."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.regression import FALSE_ALARM, Evidence, Tally, e_value, no_evidence, weigh

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
) -> float:
    """Requests of the version until the alarm; infinite without one.

    Windows end when each of the two has ten requests. The rate swings with time, for both alike.
    """
    begun: list[Evidence] = []
    known, done = Tally(), 0
    while done < num_requests:
        while len(begun) <= done * STEPS // num_requests:
            begun.append(no_evidence())
        na, nb = WINDOW, max(WINDOW, int(random.negative_binomial(WINDOW, weight)))
        rate = stable * (1 + swing * math.sin(done / 30))
        ka = int(random.binomial(na, rate + (rise if done >= rise_from else 0.0)))
        kb = int(random.binomial(nb, rate))
        window = Tally(nb - kb, kb)
        gained = weigh(Tally(na - ka, ka), window, known=known)
        begun = [one + gained for one in begun]
        known, done = known + window, done + na
        if e_value(begun, num_steps=STEPS) >= 1 / FALSE_ALARM:
            return done
    return math.inf


def alarms(num_canaries: int, *, seed: int = 1, within: int, **world: float) -> float:
    """Part of the canaries in which there was one."""
    random = np.random.default_rng(seed)
    found = [requests_until_alarm(random, num_requests=within, **world) for _ in range(num_canaries)]  # type: ignore[arg-type]
    return sum(one <= within + WINDOW for one in found) / num_canaries


@pytest.mark.parametrize(("stable", "weight"), [(0.001, 0.5), (0.02, 0.05), (0.3, 0.2)])
def test_of_versions_that_are_no_worse_at_most_one_in_a_hundred_is_rolled_back(stable: float, weight: float) -> None:
    assert alarms(200, within=1000, stable=stable, weight=weight) <= FALSE_ALARM


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stable", "weight"), list(itertools.product([0.001, 0.01, 0.05, 0.3], [0.05, 0.5])))
def test_of_thousands_too_however_long_they_run(stable: float, weight: float) -> None:
    assert alarms(2000, within=3000, stable=stable, weight=weight) <= FALSE_ALARM


@pytest.mark.parametrize(("swing", "rise"), [(0.9, 0.0), (0.0, -0.02)])
def test_neither_a_rate_that_swings_for_both_nor_a_better_version_raises_more_alarms(swing: float, rise: float) -> None:
    assert alarms(200, within=1000, stable=0.05, weight=0.2, swing=swing, rise=rise) <= FALSE_ALARM


@pytest.mark.parametrize(
    ("stable", "weight", "power"),
    [(0.0, 0.1, 0.99), (0.01, 0.1, 0.97), (0.02, 0.1, 0.93), (0.01, 0.25, 0.94), (0.02, 0.25, 0.87), (0.01, 0.5, 0.8)],
)
def test_five_points_more_are_found_within_five_hundred_requests(stable: float, weight: float, power: float) -> None:
    assert alarms(200, within=500, stable=stable, rise=0.05, weight=weight) >= power


def test_a_version_that_always_fails_is_found_at_once() -> None:
    assert alarms(50, within=20, stable=0.01, rise=0.98, weight=0.1) == 1.0


def test_what_went_well_before_does_not_hide_a_regression_that_begins_with_a_later_step() -> None:
    assert alarms(100, within=1500, stable=0.01, rise=0.05, rise_from=1000, weight=0.25) >= 0.85


@given(
    na=st.integers(1, 6),
    nb=st.integers(1, 6),
    rate=st.floats(0, 1),
    less=st.floats(0, 1),
    known=st.builds(Tally, st.integers(0, 500), st.integers(0, 500)),
)
def test_the_mean_of_a_windows_e_values_is_at_most_one_while_the_version_is_no_worse(
    na: int, nb: int, rate: float, less: float, known: Tally
) -> None:
    version = rate * less
    mean = no_evidence()
    for ka, kb in itertools.product(range(na + 1), range(nb + 1)):
        chance = math.comb(na, ka) * version**ka * (1 - version) ** (na - ka)
        chance *= math.comb(nb, kb) * rate**kb * (1 - rate) ** (nb - kb)
        mean += chance * np.exp(weigh(Tally(na - ka, ka), Tally(nb - kb, kb), known=known))
    assert (mean <= 1 + 1e-9).all()


def test_a_window_in_which_one_of_the_two_has_no_request_says_nothing() -> None:
    for version, stable in ((Tally(0, 9), Tally()), (Tally(), Tally(3, 1))):
        assert not weigh(version, stable, known=Tally()).any()


def test_without_evidence_the_e_value_is_one_and_with_very_much_it_is_finite() -> None:
    assert e_value([], num_steps=1) == pytest.approx(1.0)
    assert e_value([no_evidence()], num_steps=10) == pytest.approx(1.0)
    assert 100 < e_value([no_evidence() + 1e6], num_steps=2) < math.inf
    assert e_value([no_evidence() - 1e6], num_steps=2) == pytest.approx(0.5)
