"""What lets a history count, and what becomes of one that does not come to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.histories import measure, record
from benchmarks.histories.history import Fault, History
from benchmarks.histories.measure import MIN_CALLS, shortfalls
from benchmarks.histories.record import Load, StalledError
from benchmarks.histories.records import SERVICE, Conduct, Done, Grant, Lost, Moved, Operation, Outcome
from benchmarks.histories.system import System

FAULTS = (Fault("kill", 0, 10, 20), Fault("pause", 0, 10, 20), Fault("restart", None, 10, 20))


def operation(at: int, *, client: int = 0, outcome: Outcome | None = Done(), end: int = 0) -> Operation:  # noqa: B008  frozen
    error = "UNAVAILABLE" if outcome is None else ""
    return Operation(
        id=at, client=client, subject="", what=Grant("guest"), call=at, end=end or at + 1, outcome=outcome, error=error
    )


WHOLE = tuple(operation(100 + at, client=at % 5) for at in range(MIN_CALLS))
STRUCK = (operation(5, outcome=None, end=30),)


def test_a_history_counts_with_calls_clients_and_faults_that_hit() -> None:
    assert shortfalls(History((*STRUCK, *WHOLE), faults=FAULTS)) == []


@pytest.mark.parametrize(
    ("operations", "faults", "lacks"),
    [
        ((*STRUCK, *WHOLE[1:]), FAULTS, "299 calls"),
        ((*STRUCK, *WHOLE[1:], operation(900, outcome=None)), FAULTS, "299 calls"),
        ((*STRUCK, *WHOLE[1:], operation(900, outcome=Lost())), FAULTS, "299 calls"),
        ((*STRUCK, *(operation(100 + at, client=at % 4) for at in range(300)), operation(900, client=4)), FAULTS, "4 clients"),
        ((*STRUCK, *WHOLE), FAULTS[:2], "2 kinds"),
        (WHOLE, FAULTS, "0 kinds"),
    ],
)
def test_a_history_that_lacks_something_does_not_count(
    operations: tuple[Operation, ...], faults: tuple[Fault, ...], lacks: str
) -> None:
    (text,) = shortfalls(History(operations, faults=faults))
    assert text.startswith(lacks)


def test_what_the_service_does_of_itself_counts_as_no_call_and_meets_no_fault() -> None:
    moved = Moved("stable", 2, ())
    own = Operation(id=0, client=SERVICE, subject="", what=Conduct("stable"), call=5, end=90, outcome=moved, plane=SERVICE)
    texts = shortfalls(History((own, *WHOLE[1:]), faults=FAULTS[1:2]))
    assert [text.split()[:2] for text in texts] == [["299", "calls"], ["0", "kinds"]]


async def test_a_history_that_stalls_is_ended_and_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def hang(*arguments: object, **more: object) -> History:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(record, "_record", hang)
    with pytest.raises(StalledError, match=r"not over within 0\.01 s: 0 calls had an answer.*faults so far: none"):
        await record.record(System(tmp_path), number=0, load=Load(limit_s=0.01))


def test_a_stalled_history_fails_the_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stall(*arguments: object, **more: object) -> History:
        raise StalledError("it stood still")

    monkeypatch.setattr(measure, "record", stall)
    rows = {row.id: row for row in measure._checked(System(tmp_path), 2)}
    assert not rows["histories"].meets
    assert "history 0 stalled, and no further one is recorded: it stood still" in capsys.readouterr().out
