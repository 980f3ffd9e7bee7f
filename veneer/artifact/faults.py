"""Collecting everything that is wrong with an adapter before refusing it once."""

from __future__ import annotations

from collections.abc import Sequence

from veneer.errors import InvalidArgumentError, Violation


class ArtifactError(InvalidArgumentError):
    """The adapter cannot be served; `violations` lists every fault that was found."""

    @classmethod
    def of(cls, violations: Sequence[Violation]) -> ArtifactError:
        """Builds the error from all that is wrong; the message lists every violation."""
        return cls("; ".join(str(violation) for violation in violations), violations=violations)


class Faults:
    """Faults in the order in which they were found. Owned by one check; not shared between threads.

    Args:
        max_faults: Faults to spell out; more are only counted, so that a hostile file cannot make the answer large.
    """

    def __init__(self, max_faults: int) -> None:
        self._max_faults = max_faults
        self._violations: list[Violation] = []
        self._num_more = 0

    def __len__(self) -> int:
        return len(self._violations) + self._num_more

    def add(self, field: str, description: str) -> None:
        """Notes one fault."""
        if len(self._violations) < self._max_faults:
            self._violations.append(Violation(field=field, description=description))
        else:
            self._num_more += 1

    @property
    def violations(self) -> tuple[Violation, ...]:
        """All that is spelled out; a last entry counts the rest."""
        if not self._num_more:
            return tuple(self._violations)
        return (*self._violations, Violation(field="adapter", description=f"and {self._num_more} more faults like these"))

    def raise_if_any(self) -> None:
        """Ends the check when something is wrong.

        Raises:
            ArtifactError: At least one fault was noted.
        """
        if self._violations:
            raise ArtifactError.of(self.violations)


def quote(text: object, *, max_chars: int = 160) -> str:
    """Shows a value from the file in a message: printable ASCII only, and short.

    Args:
        text: Any value; strings are quoted.
        max_chars: Length after which the rest is left out.
    """
    shown = ascii(text[: max_chars + 1] if isinstance(text, str) else text)
    return shown if len(shown) <= max_chars else shown[:max_chars] + "..."
