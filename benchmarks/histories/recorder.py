"""Writes down who asked for what, when, and what came back. Owned by one event loop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import grpc

from benchmarks.histories.calls import known_outcome
from benchmarks.histories.history import Entry, Fault, Feed, History
from benchmarks.histories.records import SERVICE, Call, Conduct, Lost, Operation, Outcome

_T = TypeVar("_T")
_LOST_BY_CORE = "Internal error from Core"
"""What grpc.aio says where it lost an answer that came before all of an upload was sent."""


_CLOCK_ERROR_NS = 5_000_000
"""By how much the system's clock may stray from the monotonic one and back meanwhile."""


@dataclass(frozen=True, slots=True)
class Attempt(Generic[_T]):
    """A call that is over: its answer, or the refusal, or neither and why.

    Attributes:
        client: Who made it.
        plane: Where it was sent.
        call: When.
        end: When it was over.
        answer: What came back.
        refusal: What an error let the client know.
        error: Status code of an error that lets nothing be known.
    """

    client: int
    plane: int
    call: int
    end: int
    answer: _T | None = None
    refusal: Outcome | None = None
    error: str = ""


class Recorder:
    """Records of one run.

    Attributes:
        operations: In the order in which they ended.
        num_calls: Calls whose outcome is known.
        num_refused_writes: Writes among them that failed because the system was away.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._in_flight: dict[int, tuple[int, bool]] = {}
        self._next = 0
        self.num_calls = 0
        self.num_refused_writes = 0
        self._clock_ahead_ns = _clock_ahead_ns()

    def num_in_flight(self, plane: int | None) -> int:
        """Writes that are under way, at one control plane or at all."""
        return sum(is_write and plane in (None, at) for at, is_write in self._in_flight.values())

    async def attempt(self, client: int, plane: int, call: Awaitable[_T], *, is_write: bool = False) -> Attempt[_T]:
        """Makes a call and takes its time. It never raises for what the other side answers."""
        number, self._next = self._next, self._next + 1
        start = time.monotonic_ns()
        self._in_flight[number] = (plane, is_write)
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            refusal = known_outcome(error)
            name = "" if refusal is not None else "LOST" if error.details() == _LOST_BY_CORE else error.code().name
            self.num_refused_writes += is_write and name == "UNAVAILABLE"
            self.num_calls += refusal is not None and not isinstance(refusal, Lost)
            return Attempt(client, plane, start, time.monotonic_ns(), None, refusal, name)
        finally:
            del self._in_flight[number]
        self.num_calls += 1
        return Attempt(client, plane, start, time.monotonic_ns(), answer)

    def note(self, attempt: Attempt[Any], subject: str, what: Call, outcome: Outcome | None, *, request_id: str = "") -> None:
        """Writes down what a call showed about one subject."""
        one = Operation(
            id=0,
            client=attempt.client,
            subject=subject,
            what=what,
            call=attempt.call,
            end=attempt.end,
            outcome=outcome,
            request_id=request_id,
            plane=attempt.plane,
            error=attempt.error,
        )
        self.operations.append(one)

    def note_service(self, journal: Sequence[Entry]) -> None:
        """Writes down what the service did of itself: each since its transaction began, and until now."""
        ahead_ns = max(self._clock_ahead_ns, _clock_ahead_ns()) + _CLOCK_ERROR_NS
        now = time.monotonic_ns()
        for entry in journal:
            if entry.is_service:
                began: Attempt[Outcome] = Attempt(SERVICE, SERVICE, entry.time_ns - ahead_ns, now)
                self.note(began, entry.subject, Conduct(entry.moved.alias), entry.moved)

    def history(self, feed: Feed, faults: Sequence[Fault], journal: Sequence[Entry]) -> History:
        """Everything so far, in order of calls."""
        ordered = sorted(self.operations, key=lambda one: one.call)
        numbered = tuple(replace(one, id=number) for number, one in enumerate(ordered))
        return History(numbered, feed, tuple(faults), tuple(journal))


def _clock_ahead_ns() -> int:
    """By how much the system's clock, which the database uses, is ahead of the recorder's."""
    return time.time_ns() - time.monotonic_ns()
