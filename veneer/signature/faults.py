"""Why a signature does not hold."""

from __future__ import annotations

from enum import StrEnum

from veneer.errors import FailedPreconditionError, InvalidArgumentError, Violation


class Reason(StrEnum):
    """Why a signature does not hold; numbered in the API by the names."""

    MISSING = "MISSING"
    """There is none, and the policy requires one."""
    MALFORMED = "MALFORMED"
    """It is not a bundle around a statement."""
    UNSUPPORTED = "UNSUPPORTED"
    """It is of a kind that is not verified here."""
    UNKNOWN_KEY = "UNKNOWN_KEY"
    """The tenant does not trust its key."""
    NOT_BY_KEY = "NOT_BY_KEY"
    """Its value was not made by the key that it names, or not over what it says."""
    CERTIFICATE = "CERTIFICATE"
    """Its certificate leads to no authority that the tenant trusts, was not valid then, or is not for signing."""
    FILE_MISSING = "FILE_MISSING"
    """It does not list a file of the version."""
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    """It lists a file of the version with another digest."""


class SignatureError(Exception):
    """A signature does not hold; raised as one of the two below.

    Attributes:
        reason: Why.
        message: The same in words.
        violations: The same, with the file of the version that it is about.
    """

    reason: Reason
    message: str
    violations: tuple[Violation, ...]


class BadSignatureError(InvalidArgumentError, SignatureError):
    """It is no good whomever one trusts: malformed, unsupported, not over these files."""

    def __init__(self, reason: Reason, description: str, *, file: str = "") -> None:
        violation = _violation(description, file)
        super().__init__(str(violation), violations=[violation])
        self.reason = reason


class UntrustedSignatureError(FailedPreconditionError, SignatureError):
    """It is none of those that the tenant trusts, or there is none."""

    def __init__(self, reason: Reason, description: str) -> None:
        violation = _violation(description, "")
        super().__init__(str(violation), violations=[violation])
        self.reason = reason


def _violation(description: str, file: str) -> Violation:
    return Violation(f"signature: {file}" if file else "signature", description)
