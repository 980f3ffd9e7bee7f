"""Runs steps: in the loop's own thread, or in another one so that the loop plans the next step meanwhile."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from dataplane.engine.plan import Plan, Result

Run = Callable[[Plan], list[Result]]
"""Runs one step and returns what came of it; called by one thread only."""


class Done(NamedTuple):
    """A step that ran.

    Attributes:
        plan: Its plan.
        results: What came of it.
        seconds: How long it ran.
    """

    plan: Plan
    results: list[Result]
    seconds: float


class Stepping(Protocol):
    """Runs plans in the order in which they come."""

    def drive(self, loop: Callable[[], None]) -> None:
        """Runs the step loop to its end; steps run in the calling thread, the one that made the runner.

        Raises:
            BaseException: What the loop raised.
        """

    def turn(self, plan: Plan | None) -> Done | None:
        """Takes the next plan, if there is one, and returns a step that is done, if there is one. For the loop.

        Raises:
            BaseException: What running the step raised.
        """


class SerialStepping:
    """Each turn runs the plan that it brings."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def drive(self, loop: Callable[[], None]) -> None:
        """Calls the loop."""
        loop()

    def turn(self, plan: Plan | None) -> Done | None:
        """Runs the plan and returns it."""
        return None if plan is None else _run(self._run, plan)


class OverlappedStepping:
    """Each turn waits for the step before, sets the plan that it brings going and returns the step before.

    So a plan is made while the step before it runs, and that step is committed while the plan runs. At most one step runs.

    The loop has a thread of its own, and steps stay in the one that loaded the model: OpenMP keeps a team of threads for each
    thread that ever computed, and once the teams are more threads than there are processors it puts idle ones to sleep at once,
    which halved the speed of a single stream (SmolLM2-135M, 2 cores).

    Args:
        run: Runs one step.
        wake: Ends what the loop waits for outside of `turn`, so that it hears of a signal that ends the drive.
    """

    def __init__(self, run: Run, *, wake: Callable[[], None]) -> None:
        self._run = run
        self._wake = wake
        self._plans: queue.SimpleQueue[Plan | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done | BaseException] = queue.SimpleQueue()
        self._is_running = False
        self._interruption: BaseException | None = None

    def drive(self, loop: Callable[[], None]) -> None:
        """Runs the loop in another thread and steps in this one.

        What is raised in this thread, as by the handler of a signal, is raised in the loop too: it has ended when this returns.
        """
        raised: list[BaseException] = []

        def run_loop() -> None:
            try:
                loop()
            except BaseException as error:  # noqa: BLE001 - raised again below
                raised.append(error)
            finally:
                self._plans.put(None)

        thread = threading.Thread(target=run_loop, name="engine-loop", daemon=True)
        try:
            thread.start()
            while (plan := self._plans.get()) is not None:
                try:
                    self._done.put(_run(self._run, plan))
                except BaseException as error:  # noqa: BLE001 - raised again where the step is asked for
                    self._done.put(error)
        except BaseException as error:
            self._interruption = error
            self._done.put(error)
            self._wake()
            raise
        finally:
            thread.join()
        if raised:
            raise raised[0]

    def turn(self, plan: Plan | None) -> Done | None:
        """Waits for the step before, if one runs, and starts the plan."""
        if self._interruption is not None:
            raise self._interruption
        done = self._done.get() if self._is_running else None
        self._is_running = False
        if isinstance(done, BaseException):
            raise done
        if plan is not None:
            self._is_running = True
            self._plans.put(plan)
        return done


def _run(run: Run, plan: Plan) -> Done:
    started = time.monotonic()
    results = run(plan)
    return Done(plan, results, time.monotonic() - started)
