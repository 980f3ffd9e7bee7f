"""Figures of the histories: how many were checked, what they broke, and how many planted faults the checker found."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.histories.check import check_history
from benchmarks.histories.faults import hits
from benchmarks.histories.history import History, Violation
from benchmarks.histories.record import Load, StalledError, record
from benchmarks.histories.records import Conduct
from benchmarks.histories.system import System
from benchmarks.report import Row

MIN_KINDS = 3
"""Kinds of fault that must have hit for a history to count."""
MIN_CALLS = 300
MIN_CLIENTS = 5
_MIN_CALLS_OF_CLIENT = 10
"""Calls with a known outcome that make somebody one of a history's clients."""
BUGS: Mapping[str, frozenset[str]] = {
    "lost-compare": frozenset({"compare-and-swap is exclusive"}),
    "answer-not-kept": frozenset({"a request id is answered once", "linearizable"}),
    "generation-reused": frozenset({"an alias's generation grows by one a move", "a generation of an alias means one thing"}),
    "lost-update": frozenset({"an alias's generation grows by one a move", "a generation of an alias means one thing"}),
    "feed-skips": frozenset({"the feed skips nothing"}),
    "revoked-resolves": frozenset({"what is revoked is refused"}),
    "frozen-moves": frozenset({"linearizable"}),
    "deletion-forgets-generations": frozenset(
        {"an alias's generation grows by one a move", "a generation of an alias means one thing", "an alias never goes back"}
    ),
    "canary-overwrites": frozenset({"a canary overwrites nobody's move"}),
    "stopped-canary-moves": frozenset({"a canary that has ended moves nothing"}),
    "dry-run-deletes": frozenset({"linearizable"}),
    "dry-run-guesses": frozenset({"linearizable"}),
}
"""Faults that `tests.fixtures.planted_bugs` plants, and the promises of which one must be found broken."""
_PLANTED_BY = "tests.fixtures.planted_bugs"
_MAX_TRIES = 4
_PLANTED = Load(min_calls=MIN_CALLS, settle_s=10.0, must_settle=False)
_PLANTED_KINDS = ("pause", "pause")
"""A pause keeps a transaction open, so that others commit past it."""


def measure_histories(folder: Path, *, count: int, bugs: Sequence[str] = tuple(BUGS)) -> list[Row]:
    """Records and checks histories under faults, then plants faults in the control planes and checks those histories."""
    with System(folder) as system:
        rows = _checked(system, count)
        if bugs:
            caught = [bug for number, bug in enumerate(bugs) if _is_caught(system, bug, first=10_000 + 100 * number)]
            print(f"planted: {', '.join(bugs)}; found: {', '.join(caught)}", flush=True)
            rows.append(Row("bugs_caught", len(caught), f"of {len(bugs)}", f">= {len(bugs)}"))
    return rows


def _checked(system: System, count: int) -> list[Row]:
    struck: Counter[str] = Counter()
    counted = num_violations = num_calls = num_unknown = num_moves = 0
    checking_s = 0.0
    start = time.monotonic()
    for number in range(count):
        try:
            history = asyncio.run(record(system, number=number))
        except StalledError as error:
            print(f"history {number} stalled, and no further one is recorded: {error}", flush=True)
            break
        began = time.monotonic()
        violations = check_history(history)
        checking_s += time.monotonic() - began
        hit = hits(history)
        struck += hit
        lacking = shortfalls(history)
        counted += not lacking
        num_violations += len(violations)
        num_calls += history.num_calls
        unknown = sum(one.outcome is None for one in history.operations)
        num_unknown += unknown
        moves = sum(isinstance(one.what, Conduct) for one in history.operations)
        num_moves += moves
        print(
            f"history {number}: {history.num_calls} calls, {unknown} unknown, {moves} moves by canaries, hit by {dict(hit)},"
            f" {len(violations)} violations{''.join(f'; does not count: {text}' for text in lacking)}",
            flush=True,
        )
        _show(history, violations, name=f"history-{number}")
    print(
        f"{count} histories in {time.monotonic() - start:.0f} s, {checking_s:.1f} s of it checking; faults: {dict(struck)}",
        flush=True,
    )
    return [
        Row("histories", counted, "histories", f">= {count}"),
        Row("violations", num_violations, "violations", "<= 0"),
        Row("history_calls", num_calls, "calls"),
        Row("history_unknown", num_unknown, "outcomes"),
        Row("history_canary_moves", num_moves, "moves", f">= {count}"),
        *(Row(f"history_faults_{kind}", times, "hits") for kind, times in sorted(struck.items())),
    ]


def shortfalls(history: History) -> list[str]:
    """What a history lacks to count, by its records alone; nothing: it counts."""
    found = []
    if history.num_calls < MIN_CALLS:
        found.append(f"{history.num_calls} calls have a known outcome, not {MIN_CALLS}")
    num_clients = sum(calls >= _MIN_CALLS_OF_CLIENT for calls in history.calls_by_client().values())
    if num_clients < MIN_CLIENTS:
        found.append(f"{num_clients} clients made {_MIN_CALLS_OF_CLIENT} of them or more, not {MIN_CLIENTS}")
    kinds = hits(history)
    if len(kinds) < MIN_KINDS:
        found.append(f"{len(kinds)} kinds of fault hit, not {MIN_KINDS}")
    return found


def _is_caught(system: System, bug: str, *, first: int) -> bool:
    """Whether the checker finds a planted fault, and for what it is."""
    system.serve_by(_PLANTED_BY, bug)
    for number in range(first, first + _MAX_TRIES):
        try:
            history = asyncio.run(record(system, number=number, kinds=_PLANTED_KINDS, load=_PLANTED))
        except StalledError as error:
            print(f"{bug}: the history stalled: {error}", flush=True)
            return False
        found = Counter(one.promise for one in check_history(history))
        print(f"{bug}: {history.num_calls} calls, found {dict(found)}", flush=True)
        if BUGS[bug] & set(found):
            return True
    return False


def _show(history: History, violations: Sequence[Violation], *, name: str) -> None:
    if not violations:
        return
    path = Path(tempfile.gettempdir()) / f"veneer-{name}.jsonl"
    history.write(path)
    for one in violations[:10]:
        print(f"  {one.promise}: {one.subject}: {one.text[:1000]} {list(one.operations)}")
    print(f"  recorded in {path}", flush=True)
