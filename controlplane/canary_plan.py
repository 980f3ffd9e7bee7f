"""A canary and its schedule, and what is to be done next: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from itertools import pairwise
from typing import Final

import numpy as np

from controlplane.regression import FALSE_ALARM, NONE, Tally, e_value, no_evidence, weigh
from veneer.errors import InvalidArgumentError, Violation

RUNNING: Final = "RUNNING"
PROMOTED: Final = "PROMOTED"
ROLLED_BACK: Final = "ROLLED_BACK"
STOPPED: Final = "STOPPED"

WINDOW: Final = 10
"""Requests of each version in a window, but at the end of a step: fewer would say less, since weights are told from counts."""
_NO_EVIDENCE: Final = tuple(no_evidence().tolist())


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A step that has begun.

    Attributes:
        version: How requests of the version ended.
        stable: How those of the stable one did.
        weighed_version: What of the first was weighed.
        weighed_stable: What of the second was.
        evidence: What was weighed since this step began, in it and in later ones.
    """

    version: Tally = NONE
    stable: Tally = NONE
    weighed_version: Tally = NONE
    weighed_stable: Tally = NONE
    evidence: tuple[float, ...] = _NO_EVIDENCE


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
    def evidence(self) -> float:
        """How much speaks for the version failing more often; see `controlplane.regression`."""
        return e_value([np.array(one.evidence) for one in self.progress], num_steps=len(self.steps))

    def is_due(self, elapsed_s: float) -> bool:
        """Whether the present step is over, this long after it began: there is something to weigh, and to weigh it against."""
        step, progress = self.steps[self.step], self.progress[self.step]
        has_requests = progress.version.total >= step.min_requests and progress.stable.total >= min(step.min_requests, WINDOW)
        return elapsed_s >= step.duration_s and has_requests

    def weighed(self, *, is_due: bool) -> Canary:
        """The canary with every full window weighed; of a step that is over or due, what there is."""
        progress = list(self.progress)
        for index, one in enumerate(progress):
            version, stable = one.version - one.weighed_version, one.stable - one.weighed_stable
            least = WINDOW if index == self.step and not is_due else 1
            if min(version.total, stable.total) < least:
                continue
            known = sum((other.weighed_stable for other in progress), NONE)
            gained = weigh(version, stable, known=known)
            progress[index] = replace(one, weighed_version=one.version, weighed_stable=one.stable)
            for begun in range(index + 1):
                summed = tuple((np.array(progress[begun].evidence) + gained).tolist())
                progress[begun] = replace(progress[begun], evidence=summed)
        return replace(self, progress=tuple(progress))

    def next_move(self, *, is_due: bool) -> Move:
        """What its evidence and its schedule say. Nothing gets more traffic of which most requests failed, evidence or not."""
        if self.evidence >= 1 / FALSE_ALARM:
            return Move.ROLL_BACK
        version = self.progress[self.step].version
        return Move.GO_ON if is_due and 2 * version.failed <= version.total else Move.WAIT

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
