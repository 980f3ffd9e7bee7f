"""Whether a version fails more often than the one that it is to replace: an exact test that may be looked at after every window.

Counts come in windows, each of requests that both versions ended in the same time: the version na of them and the stable one nb.
If both fail at one rate, whatever it is, then of the k that failed in a window the version's part is hypergeometric: as if k of
na + nb had been drawn, and na of these were the version's. So how many failures of the version there may be in all windows by
chance is known exactly, though rates are not and may change from window to window: the convolution of these distributions. A
version that fails less often has fewer yet.

After each window a bound is set on the version's failures: the least number that by chance is reached there, and no bound was
before, in no more cases than may be spent by now. What may be spent grows with the requests n of the version to n³/(n³ + c³) of
the whole. Over all windows that is less than the whole, however long a canary runs and whenever it ends; nothing is spent where
counts are too few to reach a bound, and what is not spent is there for later windows.

Most of what may be spent in all is for the version that always was worse; the rest is divided among the later steps of the
schedule, each of which has such a test of its own that begins with it, so that what went well before does not hide what comes.

Source: Lan and DeMets, "Discrete sequential boundaries for clinical trials", 1983; Jennison and Turnbull, "Group Sequential
Methods", 2000, chapters 7 and 12 (exact boundaries); Mantel and Haenszel, 1959 (windows as strata).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FALSE_ALARM: Final = 0.01
"""Most canaries that are rolled back of versions that are no worse than the stable one, over their whole schedule."""
ALARM: Final = 1 / FALSE_ALARM
"""Evidence at which there is a regression."""

_FIRST, _LATER = 0.75, 0.1
"""Parts of the false alarms that are for the first step on, and for all later ones. The rest is for requests that are not as
independent of each other as the test takes them to be."""
_HALF = 250
"""Requests of the version by which half of the false alarms may have been given."""
_SIGMAS, _FEW = 12.0, 40
"""What is farther than this from its mean has a chance of less than 1e-30."""
_NEGLIGIBLE = 1e-13
"""Chance of the smallest numbers that are dropped after each window."""
_MOST = 1e300

_Chances = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tally:
    """Requests of one version, by how they ended."""

    ok: int = 0
    failed: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.ok + other.ok, self.failed + other.failed)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.ok - other.ok, self.failed - other.failed)

    @property
    def total(self) -> int:
        """All of them."""
        return self.ok + self.failed


NONE: Final = Tally()
"""No request."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """What both versions did in one window.

    Attributes:
        step: Index of the step in which it was.
        version: What the version did.
        stable: What the stable one did.
    """

    step: int
    version: Tally
    stable: Tally


class Regression:
    """The test of one canary, as far as its windows were added. Owned by whoever made it."""

    def __init__(self, *, num_steps: int) -> None:
        self._later = _LATER / max(num_steps - 1, 1)
        self._begun: list[_Bounds] = []

    def add(self, window: Weighed) -> float:
        """How much speaks for a regression with this window: from `ALARM` on enough.

        It is the ratio of what chance may have, by now, to the chance of as many failures of a version that is no worse, times
        `ALARM`; and stays where it was once it was enough.
        """
        while len(self._begun) <= window.step:
            self._begun.append(_Bounds(FALSE_ALARM * (self._later if self._begun else _FIRST)))
        return max(bounds.add(window) for bounds in self._begun[: window.step + 1])


class _Bounds:
    """The test that begins with one step. `chances[i]` is that of `least + i` failures with no bound reached before."""

    def __init__(self, false_alarm: float) -> None:
        self._false_alarm = false_alarm
        self._chances, self._least = np.ones(1), 0
        self._version = NONE
        self._spent = self._found = 0.0

    def add(self, window: Weighed) -> float:
        if self._found >= ALARM:
            return self._found
        fewest, gained = _hypergeometric(window)
        self._version += window.version
        self._least += fewest
        self._chances = np.convolve(self._chances, gained)
        of_more = np.cumsum(self._chances[::-1])[::-1]
        allowed = self._false_alarm * _spendable(self._version.total) - self._spent
        place = max(self._version.failed - self._least, 0)
        chance = float(of_more[place]) if place < len(of_more) else 0.0
        self._found = min(ALARM * allowed / max(chance, 1 / _MOST), _MOST)
        if chance <= allowed:
            self._found = max(self._found, ALARM)
        self._bound(of_more, allowed)
        return self._found

    def _bound(self, of_more: _Chances, allowed: float) -> None:
        bound = int(np.searchsorted(-of_more, -allowed))
        if bound < len(of_more):
            self._spent += float(of_more[bound])
            self._chances = self._chances[:bound]
        dropped = int(np.searchsorted(np.cumsum(self._chances), _NEGLIGIBLE))
        self._chances, self._least = self._chances[dropped:], self._least + dropped


def _spendable(num_requests: int) -> float:
    """Part of the false alarms that may have been given after so many requests of the version."""
    return num_requests**3 / (num_requests**3 + _HALF**3)


def _hypergeometric(window: Weighed) -> tuple[int, _Chances]:
    """Chances of how many of a window's failures are the version's, and the number that the first is of."""
    na, nb, k = window.version.total, window.stable.total, window.version.failed + window.stable.failed
    total = na + nb
    mean = k * na / total
    reach = _FEW + _SIGMAS * math.sqrt(mean * (nb / total) * (total - k) / max(total - 1, 1))
    fewest, most = max(0, k - nb, math.floor(mean - reach)), min(na, k, math.ceil(mean + reach))
    x = np.arange(fewest, most, dtype=np.float64)
    ratios = np.log((na - x) * (k - x)) - np.log((x + 1) * (nb - k + x + 1))
    logs = np.concatenate([np.zeros(1), np.cumsum(ratios)])
    chances: _Chances = np.exp(logs - logs.max())
    return fewest, chances / chances.sum()
