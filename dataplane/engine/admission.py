"""Whether a request may queue: bounded queues, and an estimate of the wait against its deadline. Integers and floats only."""

from __future__ import annotations

from dataplane.engine.fairness import Tenants
from dataplane.engine.limits import Limits
from dataplane.engine.messages import Submit
from veneer.errors import ResourceExhaustedError

_FADE = 0.995
_WARM_UP_STEPS = 32
_MAX_RETRY_S = 60.0


class Admission:
    """Refuses early what would only wait in vain. Owned by the scheduler.

    The estimate is what the tenant's own waiting requests cost, over the tenant's share of the speed at which the engine served
    lately: the best of it, slowly fading. A step shows at least how fast the engine is, so any step may raise the speed; only a
    full step, which left requests waiting because it could take no more, may lower it: a step with little to do says nothing. An
    engine is slow in its first steps (compilation, cold caches, memory that is touched for the first time), so nothing is refused
    for its deadline until 32 steps were full. A request behind which nothing of its tenant waits is always taken.
    """

    def __init__(self, limits: Limits, tenants: Tenants) -> None:
        self._limits = limits
        self._tenants = tenants
        self._speed = 0.0
        self._num_full = 0
        self._mean_output = 0.0

    def check(self, submit: Submit) -> None:
        """Refuses a request that must not queue.

        Raises:
            ResourceExhaustedError: A queue is full, or the deadline would pass while it waits; says when to try again.
        """
        limits = self._limits
        num_waiting, _ = self._tenants.queue_of(submit.tenant)
        wait_s = self.estimate_s(submit)
        if self._tenants.num_waiting >= limits.max_waiting:
            raise ResourceExhaustedError(
                f"{self._tenants.num_waiting} requests wait already, at most {limits.max_waiting} may",
                retry_after_s=_retry(wait_s),
            )
        if limits.max_waiting_per_tenant and num_waiting >= limits.max_waiting_per_tenant:
            raise ResourceExhaustedError(
                f"{num_waiting} requests of the tenant wait already, at most {limits.max_waiting_per_tenant} may",
                retry_after_s=_retry(wait_s),
            )
        if submit.deadline_s is not None and num_waiting and wait_s > submit.deadline_s:
            raise ResourceExhaustedError(
                f"the wait would be about {wait_s:.1f} s, longer than the deadline of {submit.deadline_s:.1f} s",
                retry_after_s=_retry(wait_s - submit.deadline_s),
            )

    def estimate_s(self, submit: Submit) -> float:
        """Returns about how long a request would wait for its first rows; 0 while the speed is not known well enough."""
        if self._num_full < _WARM_UP_STEPS:
            return 0.0
        prices = self._limits.prices
        num_waiting, num_tokens = self._tenants.queue_of(submit.tenant)
        cost = num_tokens * prices.prefill_token + num_waiting * self._mean_output * prices.decode_token
        return cost / (self._speed * self._tenants.share_of(submit.tenant, submit.weight))

    def observe(self, cost: float, seconds: float, *, is_full: bool) -> None:
        """Hears what a step served and how long it took.

        Args:
            cost: What is charged for it.
            seconds: How long it took; 0 when that is not known.
            is_full: Whether requests waited that it could not take.
        """
        if seconds <= 0:
            return
        if is_full:
            self._num_full += 1
            self._speed *= _FADE
        self._speed = max(self._speed, cost / seconds)

    def finished(self, num_output: int) -> None:
        """Hears how many tokens a request generated."""
        self._mean_output += (num_output - self._mean_output) * 0.05


def _retry(seconds: float) -> float:
    return min(max(seconds, 0.1), _MAX_RETRY_S)
