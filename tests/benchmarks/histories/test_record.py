"""Histories of the real system: it holds what it promises under faults, and the checker finds what is planted in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.histories.faults import has_hit
from benchmarks.histories.history import Fault
from benchmarks.histories.measure import BUGS, measure_histories
from benchmarks.histories.records import Done, Grant, Operation
from tests.fixtures import planted_bugs


def operation(call: int, end: int, *, plane: int = 0, error: str = "") -> Operation:
    outcome = None if error else Done()
    return Operation(
        id=0, client=0, subject="", what=Grant("guest"), call=call, end=end, outcome=outcome, plane=plane, error=error
    )


@pytest.mark.parametrize(
    ("kind", "one", "hit"),
    [
        ("kill", operation(5, 15, error="UNAVAILABLE"), True),
        ("kill", operation(5, 15), False),
        ("kill", operation(5, 15, plane=1, error="UNAVAILABLE"), False),
        ("kill", operation(11, 15, error="UNAVAILABLE"), False),
        ("kill", operation(5, 9, error="UNAVAILABLE"), False),
        ("pause", operation(5, 25), True),
        ("pause", operation(5, 19), False),
        ("read-only", operation(12, 15, error="UNAVAILABLE"), True),
        ("read-only", operation(12, 15), False),
        ("read-only", operation(21, 25, error="UNAVAILABLE"), False),
    ],
)
def test_a_fault_has_hit_if_the_records_show_what_it_met(kind: str, one: Operation, hit: bool) -> None:
    assert has_hit(Fault(kind, None if kind == "read-only" else 0, 10, 20), [one]) is hit


def test_every_planted_bug_is_one_that_the_benchmark_knows() -> None:
    assert planted_bugs.BUGS.keys() == BUGS.keys()


def test_every_bug_is_planted_where_something_is() -> None:
    plant = "from tests.fixtures.planted_bugs import BUGS\nfor plant in BUGS.values(): plant()"
    subprocess.run([sys.executable, "-c", plant], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_histories_under_faults_break_no_promise(tmp_path: Path) -> None:
    rows = {row.id: row for row in measure_histories(tmp_path, count=2, bugs=())}
    assert rows["violations"].value == 0
    assert rows["histories"].value == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_planted_bugs_are_found(tmp_path: Path) -> None:
    """One of each part of the checker; `python -m benchmarks.controlplane --only histories` plants them all."""
    bugs = ("lost-compare", "feed-skips", "revoked-resolves", "canary-overwrites", "dry-run-guesses")
    rows = {row.id: row for row in measure_histories(tmp_path, count=0, bugs=bugs)}
    assert rows["bugs_caught"].meets
