"""A request from the moment it comes until it is bound to what answers it, and the parts of its answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dataplane.binding import Binding, Served, bind_previous
from dataplane.choices import Choice
from dataplane.engine.messages import Logprobs, Submit
from dataplane.fallback import FallbackMode, FallbackReason, Substitute, on_not_ready
from dataplane.frontend.prompts import Prompt
from dataplane.metering import Meter
from dataplane.outcomes import Ending
from dataplane.resolution import Arm, Caller, Target
from dataplane.token_stream import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request.

    Attributes:
        key_digest: SHA-256 of the caller's key; the tenant follows from it and from nothing else.
        target: What to generate with.
        prompt: What to continue.
        choice: How tokens are chosen.
        fallback: What happens when the version cannot be had in time; None: the tenant's default.
        request_id: Caller's own identifier; empty: one is made.
        split_unit: Unit of a traffic split; empty: the arm is drawn from the request's identifier.
        sub_salt: Mixed into the cache key beside the tenant's own secret.
        deadline_s: Seconds that are left; None for no limit.
        priority: Place among the waiting requests of the caller's tenant; capped by the key's role.
    """

    key_digest: bytes
    target: Target
    prompt: Prompt
    choice: Choice = field(default_factory=Choice)
    fallback: FallbackMode | None = None
    request_id: str = ""
    split_unit: str = ""
    sub_salt: bytes = b""
    deadline_s: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, sent back: ids and text with `echo`, logprobs of all tokens but the first with `prompt_logprobs`."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One message of the answer.

    Attributes:
        served: What answers; in the first message only.
        piece: The next tokens of a choice.
        choice: Which one.
        echo: In the first message of choice 0, where asked for.
    """

    served: Served | None
    piece: Piece
    choice: int = 0
    echo: Echo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that is bound.

    Attributes:
        request: The request, with what is left of its deadline.
        caller: Who asks.
        mode: What happens when the version cannot be had in time.
        bound: What is to answer.
        previous: The version that may answer in its place.
        submits: What the engine is told of each choice.
        started_s: When the request came, in monotonic seconds.
        submitted_s: When what is left of the deadline was measured.
        ending: Counts how it ends.
        meter: Counts what it uses.
    """

    request: GenerationRequest
    caller: Caller
    mode: FallbackMode
    bound: Binding
    previous: Arm | None
    submits: Sequence[Submit]
    started_s: float
    submitted_s: float
    ending: Ending
    meter: Meter

    def patience_s(self, limit_s: float) -> float | None:
        """How long to wait for the version; None to the end."""
        if self._substitute is None and self.mode is not FallbackMode.FAIL:
            return None
        deadline_s = self.request.deadline_s
        return limit_s if deadline_s is None else min(limit_s, deadline_s / 2)

    def instead(self) -> Binding | None:
        """What answers in place of the version, if anything may."""
        match self._substitute:
            case Substitute.BASE:
                return Binding(self.bound.served.by_base(FallbackReason.NOT_READY))
            case Substitute.PREVIOUS:
                assert self.previous is not None
                return bind_previous(self.bound.served, self.previous, self.submits[0].prompt)
        return None

    def instead_of_deleted(self) -> Binding | None:
        """What answers in place of a version that was deleted meanwhile: as where there never was such an adapter."""
        if self.mode is not FallbackMode.ANY:
            return None
        return Binding(self.bound.served.by_base(FallbackReason.NOT_FOUND))

    def submits_for(self, bound: Binding) -> Sequence[Submit]:
        """What the engine is told when this answers."""
        if bound is self.bound:
            return self.submits
        left_s = self.request.deadline_s
        if left_s is not None:
            left_s = max(left_s - (time.monotonic() - self.submitted_s), 0.0)
        version = bound.served.version
        return [
            replace(
                submit,
                request_id=uuid.uuid4().hex,
                version=version,
                active_from=bound.active_from,
                rank=bound.rank,
                deadline_s=left_s,
            )
            for submit in self.submits
        ]

    @property
    def _substitute(self) -> Substitute | None:
        return on_not_ready(self.mode, has_previous=self.previous is not None)
