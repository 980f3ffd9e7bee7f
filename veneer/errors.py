"""Error families of Veneer, each with the name of the gRPC status that a caller sees.

An error lives beside the code that raises it and inherits its family from here. One interceptor turns families into status codes
(`veneer.interceptors`). Standard library only: the engine and the kernels import this module too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONTENT_EXISTS = "CONTENT_EXISTS"
"""The tenant has a version with these files already."""
ALIAS_MOVED = "ALIAS_MOVED"
"""The alias is at another generation than its caller saw."""
TENANT_LIMIT = "TENANT_LIMIT"
"""An adapter alone takes more than its tenant may on a data plane."""
KEY_KIND = "KEY_KIND"
"""The method is not for this kind of key on this listener."""
ANSWERED = "ANSWERED"
"""A plane answered that something it needs is away: the plane itself is there."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing wrong with an input.

    Attributes:
        field: Path of the field, tensor or file that is wrong, e.g. `sampling.top_p` or `adapter_config.json: r`.
        description: What is wrong with it and what is allowed, for the person who sent it.
    """

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class VeneerError(Exception):
    """Root of all errors that may cross a service boundary.

    Attributes:
        status: Name of the gRPC status code.
        violations: Everything that is wrong with the input, if the input is at fault.
        retry_after_s: Seconds after which a retry makes sense; None when it does not, or when unknown.
        kind: What kind of error of this status it is, where callers act differently on one; empty for all others. It travels as
            the reason of `google.rpc.ErrorInfo`.
    """

    status = "INTERNAL"
    kind = ""

    def __init__(self, message: str, *, violations: Sequence[Violation] = (), retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s


class InvalidArgumentError(VeneerError):
    """The input is wrong whatever the state of the system."""

    status = "INVALID_ARGUMENT"

    @classmethod
    def of(cls, violations: Sequence[Violation]) -> InvalidArgumentError:
        """Builds the error from all that is wrong; the message lists every violation."""
        return cls("; ".join(str(violation) for violation in violations), violations=violations)


class UnauthenticatedError(VeneerError):
    """There is no valid credential."""

    status = "UNAUTHENTICATED"


class PermissionDeniedError(VeneerError):
    """The caller lacks a role on an object of its own."""

    status = "PERMISSION_DENIED"


class NotFoundError(VeneerError):
    """There is no such object for this caller; foreign objects answer the same."""

    status = "NOT_FOUND"


class AlreadyExistsError(VeneerError):
    """The same content or name exists already."""

    status = "ALREADY_EXISTS"


class AbortedError(VeneerError):
    """A compare-and-swap lost, or the same request is already in progress."""

    status = "ABORTED"


class FailedPreconditionError(VeneerError):
    """The state of the object forbids it: quarantined, retired, another base."""

    status = "FAILED_PRECONDITION"


class ResourceExhaustedError(VeneerError):
    """A quota, a queue or the memory for one request is used up."""

    status = "RESOURCE_EXHAUSTED"


class DeadlineExceededError(VeneerError):
    """The caller's deadline passed first."""

    status = "DEADLINE_EXCEEDED"


class UnavailableError(VeneerError):
    """The service, or something that it needs, is away for now."""

    status = "UNAVAILABLE"


class InternalError(VeneerError):
    """A fault limited to this request."""

    status = "INTERNAL"


class DataLossError(VeneerError):
    """Bytes are corrupt and there is no good copy."""

    status = "DATA_LOSS"
