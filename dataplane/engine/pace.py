"""How long a step will take, learned from those that ran, and how much of a prompt fits into one. Floats in, integers out."""

from __future__ import annotations

_FADE = 0.98
_SCALE = 100.0  # work is counted in hundreds, so that both unknowns weigh alike
_VAGUE = 1e3
_MAX_VAGUENESS = 2 * _VAGUE
_STALL = 4.0


class Pace:
    """Fits seconds ≈ a + b · work by recursive least squares that forget; work is what the step's rows cost by `Prices`.

    Owned by the scheduler. Steps of the same work tell nothing of a and b apart, so what is forgotten is bounded, else one odd
    step after many equal ones would turn the estimate over. A step that takes four times what was expected was held up by
    something else (a stopped process, a busy machine) and counts as no more than that.

    Source: recursive least squares with exponential forgetting; see any book on adaptive filters.

    Args:
        max_step_s: Seconds that a step may take.
    """

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self._a = self._b = 0.0
        self._p00, self._p01, self._p11 = _VAGUE, 0.0, _VAGUE
        self._num_seen = 0

    def observe(self, work: float, seconds: float) -> None:
        """Hears how long a step took; 0 when that is not known."""
        if seconds <= 0:
            return
        predicted = self.predict(work)
        if self._num_seen > 1 and predicted > 0:
            seconds = min(seconds, _STALL * predicted)
        self._num_seen += 1
        x = work / _SCALE
        g0, g1 = self._p00 + self._p01 * x, self._p01 + self._p11 * x
        norm = _FADE + g0 + g1 * x
        error = (seconds - predicted) / norm
        self._a += g0 * error
        self._b += g1 * error
        p00, p01, p11 = self._p00 - g0 * g0 / norm, self._p01 - g0 * g1 / norm, self._p11 - g1 * g1 / norm
        fade = _FADE if (p00 + p11) / _FADE <= _MAX_VAGUENESS else 1.0
        self._p00, self._p01, self._p11 = p00 / fade, p01 / fade, p11 / fade

    def predict(self, work: float) -> float:
        """Returns how long a step with so much work takes, in seconds; 0 before any was seen."""
        return self._a + self._b * work / _SCALE

    def room_for(self, work: float, *, price: float, at_least: int, at_most: int) -> int:
        """Returns how many rows more a step may hold.

        Args:
            work: Its work so far.
            price: Work of a row.
            at_least: Rows that it may hold however long it takes, so that prompts go on.
            at_most: Rows that it holds at most.
        """
        if not self._num_seen or self._b <= 0:
            return at_most
        left = self._max_step_s - self.predict(work)
        return min(at_most, max(at_least, int(left / (self._b * price / _SCALE))))
