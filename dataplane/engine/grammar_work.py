"""Threads that compile grammars and find masks beside the steps, the tenant that was served least first."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

_RATE = 0.15
"""Seconds of a core that a tenant's grammars may take each second before they yield to the steps."""
_BURST_S = 0.25
"""What they may take beyond that at once."""
_PRUNE_S = 10.0
_NICENESS = 19


class _Line:
    """One tenant's work. `level` is a leaky bucket in seconds of a core, of what was spent lately; `is_slow`: it is full."""

    __slots__ = ("at", "is_slow", "jobs", "level", "num_running")

    def __init__(self, now: float) -> None:
        self.jobs: deque[Callable[[], None]] = deque()
        self.level = 0.0
        self.at = now
        self.num_running = 0
        self.is_slow = False

    def spend(self, seconds: float, now: float) -> None:
        """Brings the level up to date, and adds to it."""
        self.level = max(0.0, self.level - _RATE * (now - self.at)) + seconds
        self.at = now
        self.is_slow = self.level > _BURST_S

    @property
    def seconds_to_return(self) -> float:
        """How long until it is not slow any more, if nothing of it runs meanwhile."""
        return max(0.0, self.level - _BURST_S) / _RATE


class GrammarWork:
    """A queue by tenant, and its threads. Any thread may call it.

    The tenant with the least recent work goes first, and no tenant has all quick threads at once. Work of a tenant beyond its
    rate goes to a thread of the lowest priority, which gets what the steps leave, so that no tenant's grammars slow the steps
    of others; while cores are idle that thread is as fast as the others. Once the tenant is within its rate again, the other
    threads take what of it waits there.

    Args:
        num_quick: Threads for tenants within their rate, at least 2.
        clock: Reads seconds.
    """

    def __init__(self, *, num_quick: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_quick = num_quick or max(2, min(4, os.cpu_count() or 1))
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._costs: dict[str, float] = {}
        self._condition = threading.Condition()
        self._is_stopping = False
        self._threads: list[threading.Thread] = []
        self._pruned = clock()

    def submit(self, tenant: str, job: Callable[[], None]) -> None:
        """Queues a job, which must not raise."""
        with self._condition:
            if self._is_stopping:
                return
            if not self._threads:
                self._start()
            line = self._lines.get(tenant)
            if line is None:
                line = self._lines[tenant] = _Line(self._clock())
            line.spend(0.0, self._clock())
            line.jobs.append(job)
            self._condition.notify_all()

    def take_costs(self) -> dict[str, float]:
        """Returns seconds of a core by tenant since the last call."""
        if not self._costs:
            return {}
        with self._condition:
            costs, self._costs = self._costs, {}
        return costs

    def stop(self) -> None:
        """Drops what waits, and ends the threads after what runs."""
        with self._condition:
            self._is_stopping = True
            self._lines.clear()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        for number in range(self._num_quick + 1):
            is_slow = number == self._num_quick
            name = "grammars-slow" if is_slow else f"grammars-{number}"
            thread = threading.Thread(target=self._run, args=(is_slow,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, is_slow: bool) -> None:  # noqa: FBT001 - an argument of a thread
        if is_slow:
            with contextlib.suppress(OSError):  # a sandbox may forbid it; then this thread is as fast as the others
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (taken := self._take(is_slow=is_slow)) is not None:
            tenant, line, job = taken
            started = time.thread_time()
            try:
                job()
            finally:
                self._done(tenant, line, time.thread_time() - started)

    def _take(self, *, is_slow: bool) -> tuple[str, _Line, Callable[[], None]] | None:
        with self._condition:
            while not self._is_stopping:
                now = self._clock()
                for line in self._lines.values():
                    if line.jobs:
                        line.spend(0.0, now)
                ready = [
                    (line.level, tenant)
                    for tenant, line in self._lines.items()
                    if line.jobs and line.is_slow is is_slow and (is_slow or line.num_running < self._num_quick - 1)
                ]
                if ready:
                    tenant = min(ready)[1]
                    line = self._lines[tenant]
                    line.num_running += 1
                    return tenant, line, line.jobs.popleft()
                returns = [line.seconds_to_return for line in self._lines.values() if line.jobs and line.is_slow]
                self._condition.wait(None if is_slow else min(returns, default=None))
            return None

    def _done(self, tenant: str, line: _Line, seconds: float) -> None:
        with self._condition:
            line.num_running -= 1
            now = self._clock()
            line.spend(seconds, now)
            self._costs[tenant] = self._costs.get(tenant, 0.0) + seconds
            if now - self._pruned > _PRUNE_S:
                self._pruned = now
                for name, one in list(self._lines.items()):
                    one.spend(0.0, now)
                    if not (one.jobs or one.num_running or one.level):
                        del self._lines[name]
            self._condition.notify_all()
