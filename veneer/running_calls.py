"""Calls that run on a plane: how many there may be, and how they end when the plane stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from veneer.access import ListenerName
from veneer.errors import ResourceExhaustedError, UnavailableError, VeneerError

MAX_CALLS = 16_384
_END_S = 5.0
"""How long calls that the plane ends may take to give back what they hold and to send their status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Bounds of the calls of a plane.

    Attributes:
        max_calls: Calls of a listener at a time, without those of methods that are open to anyone, such as health.
        max_open: Calls of open methods; the oldest ends when there are more, so that short ones are answered whoever holds on.
        max_unheard: Calls whose request has not come; the oldest ends when there are more.
        retry_after_s: Delay that a refused caller is told.
    """

    max_calls: int = MAX_CALLS
    max_open: int = MAX_CALLS // 4
    max_unheard: int = MAX_CALLS // 4
    retry_after_s: float = 1.0


class RunningCalls:
    """The calls of both listeners of a plane. Owned by one event loop.

    `arrive`, `interruptible` and `hearing` run in a call's task.

    Attributes:
        limits: Bounds.
    """

    def __init__(self, limits: CallLimits | None = None) -> None:
        self.limits = limits or CallLimits()
        self._tasks: set[asyncio.Task[object]] = set()
        """All calls up to their last byte, those of open methods and those that are refused too."""
        self._counted: dict[asyncio.Task[object], ListenerName] = {}
        self._num_counted = Counter[ListenerName]()
        self._open: dict[asyncio.Task[object], None] = {}
        """Calls of open methods, the oldest first."""
        self._unheard: dict[asyncio.Task[object], None] = {}
        """Calls that wait for their request, the oldest first."""
        self._interruptible: dict[asyncio.Task[object], VeneerError | None] = {}
        """Calls from the look at their caller to the last word of their method, and with what the plane ends them."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusal: VeneerError | None = None

    def __len__(self) -> int:
        return len(self._counted)

    def arrive(self, listener: ListenerName, *, is_open: bool) -> VeneerError | None:
        """Takes the call of this task in until the task ends; returns the reason if the call has to be refused.

        The calls of each listener have a bound of their own, so that callers never keep operators out.
        """
        task = _this_task()
        self._tasks.add(task)
        task.add_done_callback(self._leave)
        if is_open:
            self._open[task] = None
            self._end_oldest_open()
            return None
        if self._refusal is not None:
            return self._refusal
        limits, running = self.limits, self._num_counted[listener]
        if running >= limits.max_calls:
            return ResourceExhaustedError(
                f"the service runs {running} calls, at most {limits.max_calls}", retry_after_s=limits.retry_after_s
            )
        self._counted[task] = listener
        self._num_counted[listener] += 1
        self._idle.clear()
        return None

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """While the block runs, the plane may end this task's call.

        Raises:
            VeneerError: In place of the cancellation, if it was the plane that cancelled the task.
        """
        task = _this_task()
        self._interruptible[task] = None
        try:
            yield
        except asyncio.CancelledError:
            error = self._interruptible[task]
            if error is None:
                raise
            task.uncancel()
            raise error from None
        finally:
            del self._interruptible[task]

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """The block, within an `interruptible` one, waits for the request of this task's call.

        A caller may open calls and send no request. So it is the call that has waited longest that ends when too many do, and not
        a new one, whose request is on the way.
        """
        task = _this_task()
        self._unheard[task] = None
        if len(self._unheard) > self.limits.max_unheard:
            self._interrupt(
                next(iter(self._unheard)),
                ResourceExhaustedError(
                    "the request did not come, and too many calls wait for theirs", retry_after_s=self.limits.retry_after_s
                ),
            )
        try:
            yield
        finally:
            self._unheard.pop(task, None)

    def refuse(self) -> None:
        """From now on refuses what arrives, except for open methods: the plane stops."""
        self._refusal = UnavailableError("the service is shutting down and takes no more calls")

    async def wait_idle(self) -> None:
        """Waits until no call runs, except for those of open methods."""
        await self._idle.wait()

    async def end(self) -> None:
        """Ends what runs with UNAVAILABLE, and waits until that is sent; for 5 s at most."""
        for task in self._interruptible:
            self._interrupt(task, UnavailableError("the service shut down before the call was at its end"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)

    def _end_oldest_open(self) -> None:
        """Of callers without a key, who may watch health as often as they like; their watches shall not fill the memory."""
        if len(self._open) <= self.limits.max_open:
            return
        oldest = next((task for task in self._open if task in self._interruptible), None)
        if oldest is not None:
            self._interrupt(
                oldest,
                ResourceExhaustedError("too many calls of this kind began later", retry_after_s=self.limits.retry_after_s),
            )

    def _interrupt(self, task: asyncio.Task[object], error: VeneerError) -> None:
        self._unheard.pop(task, None)
        self._open.pop(task, None)
        if self._interruptible[task] is None:
            self._interruptible[task] = error
            task.cancel()

    def _leave(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        self._open.pop(task, None)
        listener = self._counted.pop(task, None)
        if listener is not None:
            self._num_counted[listener] -= 1
        if not self._counted:
            self._idle.set()


def _this_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task
