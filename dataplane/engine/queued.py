"""Steps on a device: the next one is launched before the one in front of it is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from dataplane.engine.plan import Plan, Result
from dataplane.engine.stepping import Done

Launched = TypeVar("Launched")


class Launcher(Protocol[Launched]):
    """What runs steps in the order in which they are launched."""

    def launch(self, plan: Plan) -> Launched:
        """Queues a step on the device and returns at once."""

    def finish(self, launched: Launched) -> list[Result]:
        """Waits for a step and returns what came of it."""


class _Flight(NamedTuple, Generic[Launched]):
    plan: Plan
    launched: Launched
    at: float


class QueuedStepping(Generic[Launched]):
    """Each turn launches the plan that it brings, then waits for the step before and returns that.

    So the device has the next step before it ends one, and a step is planned and committed while another runs. All in one
    thread: the device is the other one. To the scheduler it is what `OverlappedStepping` is.
    """

    def __init__(self, launcher: Launcher[Launched]) -> None:
        self._launcher = launcher
        self._flight: _Flight[Launched] | None = None
        self._ended = 0.0

    def drive(self, loop: Callable[[], None]) -> None:
        """Calls the loop."""
        loop()

    def turn(self, plan: Plan | None) -> Done | None:
        """Launches the plan, and finishes the step before."""
        before = self._flight
        self._flight = None if plan is None else _Flight(plan, self._launcher.launch(plan), time.monotonic())
        if before is None:
            return None
        results = self._launcher.finish(before.launched)
        begun, self._ended = max(before.at, self._ended), time.monotonic()
        return Done(before.plan, results, self._ended - begun)
