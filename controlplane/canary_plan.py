"""A canary and its schedule, and what is to be done next: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from itertools import pairwise
from typing import Final

from controlplane.regression import ALARM, NONE, Regression, Tally, Weighed
from veneer.errors import InvalidArgumentError, Violation

RUNNING: Final = "RUNNING"
PROMOTED: Final = "PROMOTED"
ROLLED_BACK: Final = "ROLLED_BACK"
STOPPED: Final = "STOPPED"

WINDOW: Final = 10
"""Least requests of each version in a window, but at the end of a step: each bound spends a little that later ones lack."""
_GROWTH: Final = 20
"""Part of the version's requests that are weighed by which a window is larger, one by this: so that windows stay few."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a schedule.

    Attributes:
        weight: Percent of the traffic that the version gets.
        duration_s: How long it takes at least.
        min_requests: Requests of the version that must have ended in it before the next one, and as many of the stable version,
            but of that no more than `WINDOW`.
    """

    weight: int
    duration_s: float
    min_requests: int


@dataclass(frozen=True, slots=True)
class Window:
    """Requests that both versions ended in the same time, as they were weighed.

    Attributes:
        place: Its place among all windows of the canary, from 0.
        version: What the version did.
        stable: What the stable one did.
        evidence: How much spoke for a regression then; see `controlplane.regression`.
    """

    place: int
    version: Tally
    stable: Tally
    evidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A step that has begun.

    Attributes:
        version: How requests of the version ended.
        stable: How those of the stable one did.
        windows: What of them was weighed.
    """

    version: Tally = NONE
    stable: Tally = NONE
    windows: tuple[Window, ...] = ()

    @property
    def unweighed(self) -> tuple[Tally, Tally]:
        """Requests of the version and of the stable one that were not weighed."""
        version = sum((window.version for window in self.windows), NONE)
        stable = sum((window.stable for window in self.windows), NONE)
        return self.version - version, self.stable - stable


class Move(Enum):
    """What is to be done with a canary."""

    WAIT = "wait"
    GO_ON = "go on"
    ROLL_BACK = "roll back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A version on its way to an alias's whole traffic.

    Attributes:
        generation: Generation of the alias in the first step; each step has the next one.
        version: Digest of the version.
        stable: Digest of the one that had all traffic before.
        steps: Its schedule.
        step: Index of the present or last step.
        state: RUNNING, PROMOTED, ROLLED_BACK or STOPPED.
        reason: Why it ended.
        progress: The steps that have begun.
        step_time: When the present or last step began.
        end_time: When it ended.
    """

    owner: str
    adapter: str
    alias: str
    generation: int
    version: str
    stable: str
    steps: tuple[Step, ...]
    step: int
    state: str
    reason: str
    progress: tuple[Progress, ...]
    create_time: datetime
    step_time: datetime
    end_time: datetime | None

    @property
    def alias_generation(self) -> int:
        """Generation of the alias while nobody else has moved it."""
        return self.generation + self.step

    @property
    def version_tally(self) -> Tally:
        """The version's requests in all steps."""
        return sum((one.version for one in self.progress), NONE)

    @property
    def stable_tally(self) -> Tally:
        """The stable version's requests in all steps."""
        return sum((one.stable for one in self.progress), NONE)

    @property
    def windows(self) -> list[Weighed]:
        """What was weighed, in the order in which it was."""
        placed = [(window, step) for step, one in enumerate(self.progress) for window in one.windows]
        placed.sort(key=lambda pair: pair[0].place)
        return [Weighed(step, window.version, window.stable) for window, step in placed]

    @property
    def evidence(self) -> float:
        """How much speaks for the version failing more often, after the last window; see `controlplane.regression`."""
        windows = [window for one in self.progress for window in one.windows]
        return max(windows, key=lambda window: window.place).evidence if windows else 0.0

    def is_due(self, elapsed_s: float) -> bool:
        """Whether the present step is over, this long after it began, and went well enough for more traffic.

        There is something to weigh, and to weigh it against, and not most requests of the version failed: nothing gets more
        traffic of which they did, evidence or not.
        """
        step, progress = self.steps[self.step], self.progress[self.step]
        version, stable = progress.version, progress.stable
        has_requests = version.total >= step.min_requests and stable.total >= min(step.min_requests, WINDOW)
        return elapsed_s >= step.duration_s and has_requests and 2 * version.failed <= version.total

    def weighed(self, *, is_due: bool) -> Canary:
        """The canary with every full window weighed; of a step that is over or due, what there is."""
        canary = self
        for step in range(len(self.progress)):
            version, stable = self.progress[step].unweighed
            is_open = step == self.step and not is_due
            windows = canary.windows
            least = max(WINDOW, sum(window.version.total for window in windows) // _GROWTH) if is_open else 1
            if version.total >= least and stable.total >= min(least, WINDOW):
                canary = canary._with(step, version, stable, windows)
        return canary

    def _with(self, step: int, version: Tally, stable: Tally, windows: Sequence[Weighed]) -> Canary:
        test = Regression(num_steps=len(self.steps))
        found = [test.add(one) for one in [*windows, Weighed(step, version, stable)]][-1]
        window = Window(len(windows), version, stable, found)
        progress = list(self.progress)
        progress[step] = replace(progress[step], windows=(*progress[step].windows, window))
        return replace(self, progress=tuple(progress))

    def next_move(self, *, is_due: bool) -> Move:
        """What its evidence and its schedule say."""
        if self.evidence >= ALARM:
            return Move.ROLL_BACK
        return Move.GO_ON if is_due else Move.WAIT

    def why_rolled_back(self) -> str:
        """What the counts were, for people."""
        version, stable = self.version_tally, self.stable_tally
        failed = f"{version.failed} of {version.total} requests failed on the version"
        return f"{failed}, {stable.failed} of {stable.total} on the stable one"


def check_steps(steps: Sequence[Step]) -> None:
    """Refuses a schedule in which a step gives no more weight than the one before.

    Raises:
        InvalidArgumentError: Names the steps.
    """
    faults = [
        Violation(f"steps[{place}].weight_percent", f"must be more than {before.weight}, which the step before gives")
        for place, (before, after) in enumerate(pairwise(steps), start=1)
        if after.weight <= before.weight
    ]
    if faults:
        raise InvalidArgumentError.of(faults)
