"""Judges a history: invariants, an order of each adapter's and each key's operations, and then the feed and the audit log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.histories.feed import check_feed, effects_of
from benchmarks.histories.history import History, Violation
from benchmarks.histories.invariants import check_invariants
from benchmarks.histories.journal import check_journal
from benchmarks.histories.records import Operation, RevokeKey, UseKey
from benchmarks.histories.search import linearize
from benchmarks.histories.state import AdapterState, KeyState, State


def check_history(history: History) -> list[Violation]:
    """Returns every promise that a history breaks; none when all hold."""
    found: list[Violation] = []
    for subject, operations in history.subjects().items():
        found += check_invariants(subject, operations)
        start: State = KeyState() if isinstance(operations[0].what, UseKey | RevokeKey) else AdapterState()
        journal = [one for one in history.journal or () if one.subject == subject]
        result = linearize(without_single_ids(operations), start, journal=journal)
        if not result.is_decided:
            found.append(Violation("undecided", subject, "the search for an order was given up"))
        elif result.stuck:
            text = (
                f"after {len(result.order)} operations none of these can come next: {_show(result.stuck)}; state {result.state}"
            )
            found.append(Violation("linearizable", subject, text, [one.id for one in result.stuck]))
        elif isinstance(start, AdapterState):
            if history.feed is not None:
                found += check_feed(subject, history.feed, effects_of(subject, operations, result.order, start))
            if history.journal is not None:
                found += check_journal(subject, journal, result.order, start)
    found += [
        Violation("errors are of the contract", one.subject, f"{one.what} was answered {one.error}", [one.id])
        for one in history.operations
        if one.error in ("INTERNAL", "UNKNOWN", "UNIMPLEMENTED", "DATA_LOSS")
    ]
    return found


def without_single_ids(operations: Sequence[Operation]) -> list[Operation]:
    """Leaves request ids out that came once: they change nothing, and would make every state another."""
    uses = Counter(one.request_id for one in operations)
    return [one if uses[one.request_id] > 1 else replace(one, request_id="") for one in operations]


def _show(operations: Sequence[Operation]) -> str:
    return "; ".join(f"#{one.id} by client {one.client}: {one.what} → {one.outcome}" for one in operations[:4])
