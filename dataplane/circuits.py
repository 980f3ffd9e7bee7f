"""A circuit for each version: what fails again and again is not tried for every request."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from veneer.errors import VeneerError


class CircuitState(Enum):
    """Closed circuits are those of all other versions."""

    FAILING = "failing"
    """It failed, but is tried for every request."""
    OPEN = "open"
    """Requests are answered with the failure."""
    HALF_OPEN = "half_open"
    """The next load, or the one under way, is a probe."""


@dataclass(frozen=True, slots=True)
class Circuit:
    """What operators see of one.

    Attributes:
        version: Whose it is.
        state: Its state.
        failures: Loads that failed in a row.
        status: Status of the last failure.
        retry_after_s: How long it stays open; 0 when it is not.
    """

    version: str
    state: CircuitState
    failures: int
    status: str
    retry_after_s: float


@dataclass(slots=True)
class _Record:
    error: VeneerError
    failures: int = 0
    pause_s: float = 0.0
    open_until_s: float | None = None


class Circuits:
    """The versions whose last load failed. Owned by the event loop.

    Args:
        max_failures: Loads in a row that fail before a circuit opens.
        pause_s: How long it stays open at first; each failed probe doubles it.
        max_pause_s: How long at most.
        max_versions: Versions remembered; beyond, the one that failed longest ago is forgotten.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_failures: int,
        pause_s: float = 1.0,
        max_pause_s: float = 60.0,
        max_versions: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = max_failures
        self._pause_s, self._max_pause_s = pause_s, max_pause_s
        self._max_versions = max_versions
        self._clock = clock
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def refusal(self, version: str) -> VeneerError | None:
        """Returns the error that answers requests for a version without a load; None when it may be loaded."""
        record = self._records.get(version)
        if record is None or (rest_s := self._rest_s(record)) <= 0:
            return None
        return _bare(record.error, retry_after_s=rest_s)

    def is_probe(self, version: str) -> bool:
        """Whether a load of the version would be a probe, which is tried once."""
        record = self._records.get(version)
        return record is not None and record.open_until_s is not None

    def failed(self, version: str, error: VeneerError, *, for_good: bool) -> None:
        """Notes a failed load.

        Args:
            version: Of which version.
            error: Why it failed.
            for_good: Whether trying again soon is in vain: the circuit opens at once.
        """
        bare = _bare(error)
        record = self._records.setdefault(version, _Record(bare))
        self._records.move_to_end(version)
        record.error = bare
        record.failures += 1
        if for_good or record.open_until_s is not None or record.failures >= self._max_failures:
            record.pause_s = min(record.pause_s * 2, self._max_pause_s) if record.pause_s else self._pause_s
            record.open_until_s = self._clock() + record.pause_s
        if len(self._records) > self._max_versions:
            self._records.popitem(last=False)

    def forget(self, version: str) -> None:
        """Closes a version's circuit: it was loaded, or the catalogue changed something about it."""
        self._records.pop(version, None)

    def all(self) -> list[Circuit]:
        """Returns all that are not closed."""
        return [self._shown(version, record) for version, record in self._records.items()]

    def _shown(self, version: str, record: _Record) -> Circuit:
        rest_s = self._rest_s(record)
        state = CircuitState.FAILING
        if record.open_until_s is not None:
            state = CircuitState.OPEN if rest_s > 0 else CircuitState.HALF_OPEN
        return Circuit(version, state, record.failures, record.error.status, rest_s)

    def _rest_s(self, record: _Record) -> float:
        return 0.0 if record.open_until_s is None else max(0.0, record.open_until_s - self._clock())


def _bare(error: VeneerError, *, retry_after_s: float | None = None) -> VeneerError:
    """Returns an error without its traceback, which holds all of the load that failed: tasks, calls and buffers."""
    return type(error)(error.message, violations=error.violations, retry_after_s=retry_after_s)
