"""Where a version comes from, as its publisher states it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a version comes from; kept with it for good, and never changed.

    Attributes:
        labels: Names and values of your choice: at most 32, of at most 63 and 200 characters.
        training_run: The run that trained it; at most 200 characters.
        data_digest: SHA-256 of what it was trained on, 64 lower-case hex digits; empty: not stated.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    training_run: str = ""
    data_digest: str = ""

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a `PublishHeader`."""
        return {"labels": dict(self.labels), "training_run": self.training_run, "data_digest": self.data_digest}


NO_ORIGIN: Final = Origin()
"""Nothing is stated."""
