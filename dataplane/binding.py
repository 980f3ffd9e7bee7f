"""What answers a request: a version or the base, decided once for the request's whole life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dataplane.arms import draw_arm
from dataplane.fallback import FallbackMode, FallbackReason, on_refusal
from dataplane.invocation import find_start
from dataplane.resolution import Answer, Arm, Refusal, Resolution
from veneer.errors import FailedPreconditionError


@dataclass(frozen=True, slots=True)
class Served:
    """What answers a request; see `veneer.dataplane.v1.Served`. `version` is None when the base answers."""

    request_id: str
    base_digest: str
    version: str | None = None
    owner: str = ""
    adapter: str = ""
    version_number: int = 0
    alias: str = ""
    generation: int = 0
    arm: int = 0
    sticky: bool = False
    fallback: FallbackReason | None = None
    priority: int = 0

    def by_base(self, reason: FallbackReason) -> Served:
        """Returns what answers when the base takes the version's place."""
        return Served(self.request_id, self.base_digest, fallback=reason, priority=self.priority)


@dataclass(frozen=True, slots=True)
class Binding:
    """What answers, from which position of the prompt on, and with which rank; what stands before is the base's."""

    served: Served
    active_from: int = 0
    rank: int = 0


def bind(answer: Answer, *, request_id: str, base_digest: str, split_unit: str, mode: FallbackMode, priority: int) -> Served:
    """Says what answers.

    Args:
        answer: Who asks, and what the reference means.
        request_id: Of the request; the arm is drawn from it where there is no unit.
        base_digest: Of the base that is served.
        split_unit: Unit of a traffic split; may be empty.
        mode: What the request asks for when a version cannot be had.
        priority: What the request waits with.

    Raises:
        VeneerError: The reference is refused and the base must not answer.
    """
    base, outcome = Served(request_id, base_digest, priority=priority), answer.outcome
    if isinstance(outcome, Refusal):
        return base.by_base(on_refusal(outcome, mode))
    if not outcome.arms:
        return base
    sticky = bool(split_unit)
    weights, points = [arm.weight for arm in outcome.arms], [arm.points for arm in outcome.arms]
    index = draw_arm(weights, points, salt=outcome.split_salt, unit=split_unit or request_id, sticky=sticky)
    arm = outcome.arms[index]
    if arm.state != "READY":
        raise FailedPreconditionError("the version that the alias names for this request cannot be served now")
    return Served(
        request_id,
        base_digest,
        version=arm.version,
        owner=outcome.owner,
        adapter=outcome.adapter,
        version_number=arm.number,
        alias=outcome.alias,
        generation=outcome.generation,
        arm=index,
        sticky=sticky,
        priority=priority,
    )


def previous_of(served: Served, answer: Answer) -> Arm | None:
    """Returns the version that may answer in place of the one that `bind` chose."""
    if served.version is None or not isinstance(answer.outcome, Resolution):
        return None
    return answer.outcome.arms[served.arm].previous


def bind_previous(served: Served, previous: Arm, prompt: Sequence[int]) -> Binding:
    """Says what answers when an earlier version takes the place of the one that `bind` chose, and where it starts in a prompt."""
    start = find_start(prompt, previous.invocation_tokens)
    if start is None:
        return Binding(served.by_base(FallbackReason.NOT_INVOKED))
    instead = replace(served, version=previous.version, version_number=previous.number, fallback=FallbackReason.NOT_READY)
    return Binding(instead, start, previous.max_rank)


def activate(served: Served, answer: Answer, prompt: Sequence[int]) -> Binding:
    """Says where the version that `bind` chose starts in a prompt; one that the prompt does not invoke leaves it to the base."""
    if served.version is None or not isinstance(answer.outcome, Resolution):
        return Binding(served)
    arm = answer.outcome.arms[served.arm]
    start = find_start(prompt, arm.invocation_tokens)
    if start is None:
        return Binding(served.by_base(FallbackReason.NOT_INVOKED))
    return Binding(served, start, arm.max_rank)
