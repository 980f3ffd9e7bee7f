"""Promises of the catalogue that can be read off the records of one adapter, without a model.

Each says by name what broke. They overlap with the search on purpose: it says only that no order fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.histories.history import Violation
from benchmarks.histories.records import (
    MOVES,
    Arms,
    Conduct,
    Deleted,
    Done,
    Frozen,
    Grant,
    Listed,
    Moved,
    Operation,
    Publish,
    Published,
    ReadCount,
    ReadVersions,
    Resolve,
    Resolved,
    Revoke,
    RevokeKey,
    Shown,
    StartCanary,
    StopCanary,
    UseKey,
    is_read,
)
from benchmarks.histories.state import RUNNING


def check_invariants(subject: str, operations: Sequence[Operation]) -> list[Violation]:
    """Returns what one adapter's operations (or one key's) show to be broken."""
    found: list[Violation] = []
    for check in (_numbers, _generations, _exclusive, _canaries, _idempotent, _revocations):
        found += check(subject, operations)
    return found


def _numbers(subject: str, operations: Sequence[Operation]) -> Iterator[Violation]:
    """A number names one version, all up to the count were given, and a version has the digest of its content."""
    digests: dict[int, str] = {}
    shown = 0
    for one in operations:
        for number, digest in _versions_in(one):
            if digests.setdefault(number, digest) != digest:
                text = f"number {number} names {digest[:12]} and {digests[number][:12]}"
                yield Violation("a version is immutable and its number is given once", subject, text, [one.id])
        if isinstance(one.what, Publish) and isinstance(one.outcome, Published) and one.outcome.digest != one.what.digest:
            yield Violation("the digest is that of the content", subject, f"{one.outcome.digest} is not", [one.id])
        if isinstance(one.what, ReadCount) and isinstance(one.outcome, Listed):
            shown = max(shown, *(int(str(item)) for item in one.outcome.items))
    given = {one.outcome.number for one in operations if isinstance(one.outcome, Published)} | set(digests)
    gaps = set(range(1, max([shown, *given], default=0) + 1)) - given
    may_be = len({one.request_id for one in operations if isinstance(one.what, Publish) and one.outcome is None})
    if len(gaps) > may_be:
        yield Violation("numbers have no gaps", subject, f"{sorted(gaps)} were given to nobody")


def _versions_in(operation: Operation) -> Iterator[tuple[int, str]]:
    outcome = operation.outcome
    if isinstance(outcome, Published):
        yield outcome.number, outcome.digest
    elif isinstance(outcome, Resolved):
        yield from ((number, digest) for digest, number, _, _ in outcome.arms)
    elif isinstance(operation.what, ReadVersions) and isinstance(outcome, Listed):
        for item in outcome.items:
            assert isinstance(item, tuple)
            yield int(item[0]), str(item[1])


def _generations(subject: str, operations: Sequence[Operation]) -> Iterator[Violation]:
    """A generation means one thing for ever, is given to one move, and is never older than one that was seen before the call."""
    meaning: dict[tuple[str, int], Arms] = {}
    movers: dict[tuple[str, int], Operation] = {}
    for one in operations:
        for moved, is_move in _aliases_in(one):
            key = (moved.alias, moved.generation)
            if meaning.setdefault(key, moved.arms) != moved.arms:
                text = f"generation {moved.generation} of {moved.alias} is {moved.arms} and {meaning[key]}"
                yield Violation("a generation of an alias means one thing", subject, text, [one.id])
            other = movers.setdefault(key, one) if is_move else one
            if other is not one and (not one.request_id or one.request_id != other.request_id):
                text = f"generation {moved.generation} of {moved.alias} was given to two moves"
                yield Violation("an alias's generation grows by one a move", subject, text, [other.id, one.id])
    yield from _never_back(subject, operations)


def _aliases_in(operation: Operation) -> Iterator[tuple[Moved, bool]]:
    """What an operation shows of aliases, and whether it moved them."""
    what, outcome = operation.what, operation.outcome
    if isinstance(outcome, Moved):
        yield outcome, True
    elif isinstance(outcome, Shown) and isinstance(what, StopCanary):
        yield Moved(outcome.alias, outcome.generation + 1, ((outcome.stable, 1),)), True
    elif isinstance(outcome, Shown) and (isinstance(what, StartCanary) or outcome.state == RUNNING):
        yield outcome.moved, isinstance(what, StartCanary)
    elif isinstance(outcome, Published) and outcome.moved is not None:
        yield outcome.moved, True
    elif isinstance(outcome, Deleted) and not is_read(what):
        yield from ((moved, True) for moved in outcome.moved)
    elif isinstance(outcome, Listed):
        yield from ((item, False) for item in outcome.items if isinstance(item, Moved))
    elif isinstance(outcome, Resolved) and isinstance(what, Resolve) and what.alias:
        arms = tuple((digest, weight) for digest, _, weight, _ in outcome.arms)
        yield Moved(what.alias, outcome.generation, arms), False


def _never_back(subject: str, operations: Sequence[Operation]) -> Iterator[Violation]:
    reads = [(one, moved) for one in operations for moved, is_move in _aliases_in(one) if not (is_move and one.request_id)]
    ends = sorted(reads, key=lambda pair: pair[0].end)
    newest: dict[str, tuple[int, int]] = {}
    at = 0
    for one, moved in sorted(reads, key=lambda pair: pair[0].call):
        while at < len(ends) and ends[at][0].end < one.call:
            seen, past = ends[at]
            newest[past.alias] = max(newest.get(past.alias, (0, 0)), (past.generation, seen.id))
            at += 1
        generation, seen_by = newest.get(moved.alias, (0, 0))
        if moved.generation < generation:
            text = f"generation {moved.generation} of {moved.alias} was shown after {generation} had been"
            yield Violation("an alias never goes back", subject, text, [seen_by, one.id])


def _exclusive(subject: str, operations: Sequence[Operation]) -> Iterator[Violation]:
    """Of moves that expect one generation, one wins, and it makes the next."""
    winners: dict[tuple[str, int], Operation] = {}
    for one in operations:
        if not isinstance(one.what, (*MOVES, StartCanary)) or not one.what.expected:
            continue
        if not isinstance(one.outcome, Moved | Shown):
            continue
        if one.outcome.generation != one.what.expected + 1:
            text = f"a move that expected {one.what.expected} made generation {one.outcome.generation}"
            yield Violation("compare-and-swap is exclusive", subject, text, [one.id])
        other = winners.setdefault((one.what.alias, one.what.expected), one)
        if other is not one and (not one.request_id or other.request_id != one.request_id):
            text = f"two moves of {one.what.alias} that expected {one.what.expected} were done"
            yield Violation("compare-and-swap is exclusive", subject, text, [other.id, one.id])


def _canaries(subject: str, operations: Sequence[Operation]) -> Iterator[Violation]:
    """What the service moves of itself goes on from a step of a canary, which a start or the service itself made."""
    movers: dict[tuple[str, int], list[tuple[Operation, Arms]]] = {}
    for one in operations:
        for moved, is_move in _aliases_in(one):
            if is_move:
                movers.setdefault((moved.alias, moved.generation), []).append((one, moved.arms))
    for one in operations:
        if not isinstance(one.what, Conduct) or not isinstance(one.outcome, Moved):
            continue
        before = movers.get((one.outcome.alias, one.outcome.generation - 1), [])
        is_step = [isinstance(other.what, StartCanary | Conduct) and len(arms) > 1 for other, arms in before]
        if before and not any(is_step):
            other = before[0][0]
            ended = isinstance(other.what, StopCanary | Conduct)
            promise = "a canary that has ended moves nothing" if ended else "a canary overwrites nobody's move"
            yield Violation(promise, subject, f"{one.outcome} came after {other.what}", [other.id, one.id])


def _idempotent(subject: str, operations: Sequence[Operation]) -> Iterator[Violation]:
    """All that were answered under one request id were answered the same."""
    answers: dict[str, Operation] = {}
    for one in operations:
        if one.request_id and not is_read(one.what) and isinstance(one.outcome, Moved | Frozen | Published | Deleted | Shown):
            other = answers.setdefault(one.request_id, one)
            if other.what == one.what and other.outcome != one.outcome:
                text = f"{one.request_id} was answered {other.outcome} and {one.outcome}"
                yield Violation("a request id is answered once", subject, text, [other.id, one.id])


def _revocations(subject: str, operations: Sequence[Operation]) -> Iterator[Violation]:
    """What was called after a revocation had returned, with no grant in between, is refused: the control plane keeps no cache."""
    grants = [one for one in operations if isinstance(one.what, Grant)]
    for first_call, end in _revoked(operations):
        who = end.what.grantee if isinstance(end.what, Revoke) else ""
        later = (one.call for one in grants if _grantee(one) == who and (one.outcome is None or one.end > first_call))
        again = min(later, default=None)
        for one in operations:
            uses = isinstance(one.what, UseKey) or (isinstance(one.what, Resolve) and who != "" and one.what.caller == who)
            was_let_in = isinstance(one.outcome, Resolved | Done)
            if uses and was_let_in and one.call > end.end and (again is None or one.end < again):
                text = f"{who or 'a key'} was let in {(one.call - end.end) / 1e6:.1f} ms after its revocation had returned"
                yield Violation("what is revoked is refused", subject, text, [end.id, one.id])


def _revoked(operations: Sequence[Operation]) -> Iterator[tuple[int, Operation]]:
    """Each revocation that is known to be done, as its first answer, and when it was first asked for."""
    writes: dict[str, list[Operation]] = {}
    for one in operations:
        if isinstance(one.what, Revoke | RevokeKey):
            writes.setdefault(one.request_id or f"#{one.id}", []).append(one)
    for attempts in writes.values():
        done = [one for one in attempts if isinstance(one.outcome, Done)]
        if done:
            yield min(one.call for one in attempts), min(done, key=lambda one: one.end)


def _grantee(operation: Operation) -> str:
    return operation.what.grantee if isinstance(operation.what, Grant) else ""
