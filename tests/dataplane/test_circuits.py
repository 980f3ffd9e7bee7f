"""A version that fails again and again is refused at once, and tried again one probe at a time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from dataplane.circuits import Circuits, CircuitState
from dataplane.transfer import CorruptVersionError
from tests.dataplane.test_throttle import Clock
from veneer.errors import UnavailableError

AWAY = UnavailableError("the store cannot be read")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, **more: Any) -> Circuits:
    return Circuits(max_failures=3, clock=clock, **more)


def states(circuits: Circuits) -> dict[str, CircuitState]:
    return {circuit.version: circuit.state for circuit in circuits.all()}


def test_it_opens_after_so_many_failures_and_not_before(clock: Clock) -> None:
    circuits = make(clock)
    for _ in range(2):
        circuits.failed("v", AWAY, for_good=False)
        assert circuits.refusal("v") is None
        assert states(circuits) == {"v": CircuitState.FAILING}
    circuits.failed("v", AWAY, for_good=False)
    refusal = circuits.refusal("v")
    assert isinstance(refusal, UnavailableError)
    assert (refusal.message, refusal.retry_after_s) == (AWAY.message, pytest.approx(1))
    assert states(circuits) == {"v": CircuitState.OPEN}
    assert circuits.refusal("other") is None


def test_what_can_never_be_loaded_opens_at_once_and_says_why(clock: Clock) -> None:
    circuits = make(clock)
    circuits.failed("v", CorruptVersionError("bad bytes"), for_good=True)
    assert isinstance(circuits.refusal("v"), CorruptVersionError)


def test_a_success_forgets_and_a_failed_probe_doubles_the_pause_up_to_its_limit(clock: Clock) -> None:
    circuits = make(clock)
    pauses = []
    circuits.failed("v", AWAY, for_good=True)
    for _ in range(8):
        refusal = circuits.refusal("v")
        assert refusal is not None
        assert refusal.retry_after_s is not None
        pauses.append(round(refusal.retry_after_s))
        clock.now_s += refusal.retry_after_s
        assert circuits.refusal("v") is None
        assert circuits.is_probe("v")
        assert states(circuits) == {"v": CircuitState.HALF_OPEN}
        circuits.failed("v", AWAY, for_good=False)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    circuits.forget("v")
    assert circuits.refusal("v") is None
    assert not circuits.is_probe("v")
    assert circuits.all() == []


def test_only_so_many_are_remembered(clock: Clock) -> None:
    circuits = make(clock, max_versions=2)
    for version in ("a", "b", "a", "c"):
        circuits.failed(version, AWAY, for_good=True)
    assert set(states(circuits)) == {"a", "c"}


class _Held:
    """What a frame of a failed load refers to."""


def test_nothing_of_a_failed_load_is_held(clock: Clock) -> None:
    def load(held: _Held) -> None:
        raise UnavailableError("the store cannot be read")

    circuits = make(clock)
    held = _Held()
    left = weakref.ref(held)
    try:
        load(held)
    except UnavailableError as error:
        circuits.failed("v", error, for_good=True)
    del held
    gc.collect()
    assert left() is None
    assert circuits.refusal("v") is not None
