"""What may answer when a version that a tenant's callers ask for cannot be had in time."""

from __future__ import annotations

from dataclasses import dataclass

from veneer.errors import InvalidArgumentError, Violation

_BY_BASE = frozenset({"NOT_READY", "ANY"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackPolicy:
    """What a tenant's callers may ask for, and what a request asks for that does not say.

    Attributes:
        by_base: The base may answer.
        by_previous: The version that the alias served before may answer; so it may where the base may.
        default: Name of a fallback mode: NONE, NOT_READY, ANY, PREVIOUS or FAIL.
    """

    by_base: bool = True
    by_previous: bool = True
    default: str = "NONE"

    def check(self) -> None:
        """Refuses a default that the policy itself does not allow.

        Raises:
            InvalidArgumentError: It is such a one.
        """
        if (self.default in _BY_BASE and not self.by_base) or (self.default == "PREVIOUS" and not self.by_previous):
            raise InvalidArgumentError.of([Violation("default_fallback", f"is {self.default}, which the policy does not allow")])

    def columns(self) -> dict[str, object]:
        """Returns it as columns of the tenant's row."""
        return {
            "fallback_allowed": self.by_base,
            "previous_allowed": self.by_previous,
            "default_fallback": self.default,
        }
