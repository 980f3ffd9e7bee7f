"""What answers when a version cannot be had in time: the whole truth table, as pure functions.

| what happened                    | NONE, FAIL           | PREVIOUS              | NOT_READY           | ANY                 |
|----------------------------------|----------------------|-----------------------|---------------------|---------------------|
| the version cannot be loaded     | the load's own error | the one before it (*) | base, NOT_READY     | base, NOT_READY     |
| no such adapter for this caller  | NOT_FOUND            | NOT_FOUND             | NOT_FOUND           | base, NOT_FOUND     |
| the key lacks the role           | PERMISSION_DENIED    | PERMISSION_DENIED     | PERMISSION_DENIED   | PERMISSION_DENIED   |
| retired, quarantined, other base | FAILED_PRECONDITION  | FAILED_PRECONDITION   | FAILED_PRECONDITION | FAILED_PRECONDITION |
| the prompt does not invoke it    | base, NOT_INVOKED    | base, NOT_INVOKED     | base, NOT_INVOKED   | base, NOT_INVOKED   |

(*) With reason NOT_READY. Where there is none, or it cannot be loaded either, the row is that of NONE.

A version cannot be loaded in time that is not on the device within the patience of the node, because it does not come from the
store or because the device has no room. NONE waits for the version, up to the deadline; FAIL does not wait for the store: a
version that is neither on the device nor in host memory is UNAVAILABLE at once. A request that does not say asks for its
tenant's default. A mode that the tenant does not allow is NONE. Foreign and unknown adapters are one row: the control plane
answers them alike, and nothing here tells them apart. A version that was retired or quarantined after it was resolved, and
before it was loaded, is in the row of those. One that was deleted meanwhile is in the row of unknown adapters, unless the node
holds it: then the requests finish on it that were admitted before. The last row is no policy's matter: an adapter that tokens of
the prompt activate gives the base's own answer where they do not occur. It is of a version that could be served; what is refused
stays refused.
"""

from __future__ import annotations

from enum import Enum

from dataplane.resolution import Caller, Refusal
from veneer.errors import FailedPreconditionError, NotFoundError, PermissionDeniedError, VeneerError


class FallbackMode(Enum):
    """What the request, or its tenant's default, asks for."""

    NONE = "NONE"
    NOT_READY = "NOT_READY"
    ANY = "ANY"
    PREVIOUS = "PREVIOUS"
    FAIL = "FAIL"


class FallbackReason(Enum):
    """Why something else answers than what was asked for."""

    NOT_FOUND = "not_found"
    NOT_READY = "not_ready"
    NOT_INVOKED = "not_invoked"


class Substitute(Enum):
    """What answers in place of a version."""

    BASE = "base"
    PREVIOUS = "previous"


_BY_BASE = frozenset({FallbackMode.NOT_READY, FallbackMode.ANY})


def mode_of(asked: FallbackMode | None, caller: Caller) -> FallbackMode:
    """Returns the mode of a request: its own, or its tenant's default where it does not say; NONE where the tenant forbids it."""
    mode = asked or FallbackMode(caller.default_fallback)
    if (mode in _BY_BASE and not caller.fallback_allowed) or (mode is FallbackMode.PREVIOUS and not caller.previous_allowed):
        return FallbackMode.NONE
    return mode


def on_refusal(refusal: Refusal, mode: FallbackMode) -> FallbackReason:
    """Returns why the base answers although the reference was refused.

    Raises:
        VeneerError: It must not; the error is the request's answer.
    """
    if refusal is Refusal.NOT_FOUND and mode is FallbackMode.ANY:
        return FallbackReason.NOT_FOUND
    raise refusal_error(refusal)


def on_not_ready(mode: FallbackMode, *, has_previous: bool) -> Substitute | None:
    """Returns what answers in place of a version that cannot be loaded in time; None when nothing may."""
    if mode in _BY_BASE:
        return Substitute.BASE
    if mode is FallbackMode.PREVIOUS and has_previous:
        return Substitute.PREVIOUS
    return None


def refusal_error(refusal: Refusal) -> VeneerError:
    """Returns the error of a refusal; its text names nothing that the caller did not write."""
    match refusal:
        case Refusal.NOT_FOUND:
            return NotFoundError("no such adapter, alias or version")
        case Refusal.ROLE:
            return PermissionDeniedError("the key lacks the role `caller`")
        case Refusal.BASE_MISMATCH:
            return FailedPreconditionError("the version is for another base than this node serves")
        case Refusal.RETIRED:
            return FailedPreconditionError("the version was retired")
        case Refusal.QUARANTINED:
            return FailedPreconditionError("the version is quarantined")
