"""Whether a version fails more often than the one that it is to replace: a test that may be looked at as often as one likes.

Counts come in windows, each of requests that both versions ended in the same time. A window in which the version failed ka of na
requests and the stable one kb of nb multiplies, for each of a few alternatives (a, b) with a > b, its e-value by

    (a/c)^ka ((1-a)/(1-c))^(na-ka) (b/c)^kb ((1-b)/(1-c))^(nb-kb)    where c = (na a + nb b) / (na + nb)

Let A be the version's true rate and B the stable one's, and v = c (1-c). The mean of this factor is

    (1 + (A-c)(a-c)/v)^na (1 - (B-c)(c-b)/v)^nb

and its logarithm at most (na (A-c)(a-c) - nb (B-c)(c-b))/v, which is (A-B) na (a-c)/v, since na (a-c) = nb (c-b). So it is at
most 1 as long as A <= B, whatever the two are and however they change from window to window; and a and b may be chosen by what
came before the window. The product over windows, and any mixture of such products, is therefore a non-negative supermartingale
that starts at 1: it ever reaches 1/FALSE_ALARM with a probability of at most FALSE_ALARM, however often one looks and whenever
one stops.

Source: Turner, Ly and Grünwald, "Generic E-variables for exact sequential k-sample tests that allow for optional stopping", 2024;
Ville's inequality.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FALSE_ALARM: Final = 0.01
"""Most canaries that are rolled back of versions that are no worse than the stable one, over their whole schedule."""

_RISES = np.array([0.03, 0.05, 0.09, 0.2, 0.5, 0.9])
_SHARES = np.array([0.35, 0.35, 0.1, 0.1, 0.05, 0.05])
_GUESS, _GUESS_REQUESTS = 0.02, 30
"""Rate at which stable versions fail, and how many requests that guess counts for beside what is known."""
_LEAST, _MOST = 0.0005, 0.999
_MAX_LOG = 700.0

Evidence = NDArray[np.float64]
"""Logarithm of the e-value of each alternative."""


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


def no_evidence() -> Evidence:
    """Evidence before the first window."""
    return np.zeros(len(_RISES))


def weigh(version: Tally, stable: Tally, *, known: Tally) -> Evidence:
    """What one window adds to the evidence; nothing when one of the two ended no request in it.

    Args:
        version: What the version did in the window.
        stable: What the stable one did.
        known: What the stable one did before it.
    """
    na, nb = version.total, stable.total
    if not na or not nb:
        return no_evidence()
    learned = (known.failed + _GUESS * _GUESS_REQUESTS) / (known.total + _GUESS_REQUESTS)
    b = min(max(learned, _LEAST), 0.9)
    a = np.minimum(b + _RISES, _MOST)
    c = (na * a + nb * b) / (na + nb)
    gained: Evidence = (
        version.failed * np.log(a / c)
        + version.ok * np.log((1 - a) / (1 - c))
        + stable.failed * np.log(b / c)
        + stable.ok * np.log((1 - b) / (1 - c))
    )
    return gained


def e_value(begun: Sequence[Evidence], *, num_steps: int) -> float:
    """How much speaks for a regression: 1 is nothing, 1/FALSE_ALARM enough.

    A mixture over the steps of the schedule from which on the version may have become worse, so that what went well before does
    not hide it: half of it is that it always was.

    Args:
        begun: Evidence since the beginning of each step that has begun.
        num_steps: Steps of the whole schedule; those that have not begun count as no evidence.
    """
    later = 0.5 / (num_steps - 1) if num_steps > 1 else 0.0
    shares = np.array([1 - later * (num_steps - 1)] + [later] * (num_steps - 1))
    logs = np.stack([*begun, *(no_evidence() for _ in range(num_steps - len(begun)))])
    top = min(float(logs.max()), _MAX_LOG)
    return math.exp(top) * float(shares @ (np.exp(np.minimum(logs - top, 0.0)) @ _SHARES))
