"""When the base may answer in place of an adapter: the whole truth table, as pure functions.

| what happened                      | NONE                | NOT_READY           | ANY                 |
|------------------------------------|---------------------|---------------------|---------------------|
| the version cannot be loaded       | the load's own error| base, NOT_READY     | base, NOT_READY     |
| no such adapter for this caller    | NOT_FOUND           | NOT_FOUND           | base, NOT_FOUND     |
| the key lacks the role             | PERMISSION_DENIED   | PERMISSION_DENIED   | PERMISSION_DENIED   |
| retired, quarantined, other base   | FAILED_PRECONDITION | FAILED_PRECONDITION | FAILED_PRECONDITION |
| the prompt does not invoke it      | base, NOT_INVOKED   | base, NOT_INVOKED   | base, NOT_INVOKED   |

A tenant whose policy forbids fallback is treated as NONE. Foreign and unknown adapters are one row: the control plane answers
them alike, and nothing here tells them apart. The last row is no policy's matter: an adapter that tokens of the prompt activate
gives the base's own answer where they do not occur. It is of a version that could be served; what is refused stays refused.
"""

from __future__ import annotations

from enum import Enum

from dataplane.resolution import Caller, Refusal
from veneer.errors import FailedPreconditionError, NotFoundError, PermissionDeniedError, VeneerError


class FallbackMode(Enum):
    """What the request allows."""

    NONE = "none"
    NOT_READY = "not ready"
    ANY = "any"


class FallbackReason(Enum):
    """Why the base answers in place of the adapter."""

    NOT_FOUND = "not_found"
    NOT_READY = "not_ready"
    NOT_INVOKED = "not_invoked"


def on_refusal(refusal: Refusal, mode: FallbackMode, caller: Caller) -> FallbackReason:
    """Returns why the base answers although the reference was refused.

    Raises:
        VeneerError: It must not; the error is the request's answer.
    """
    if refusal is Refusal.NOT_FOUND and mode is FallbackMode.ANY and caller.fallback_allowed:
        return FallbackReason.NOT_FOUND
    raise refusal_error(refusal)


def on_not_ready(mode: FallbackMode, caller: Caller) -> FallbackReason | None:
    """Returns why the base answers in place of a version that cannot be loaded in time; None when it must not."""
    if mode is not FallbackMode.NONE and caller.fallback_allowed:
        return FallbackReason.NOT_READY
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
