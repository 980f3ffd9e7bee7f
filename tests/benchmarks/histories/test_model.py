"""The model against what the API says of promotions, frozen aliases and deleted adapters, and the checker on top of it."""

from __future__ import annotations

from benchmarks.histories.check import check_history
from benchmarks.histories.history import Change, Feed, History
from benchmarks.histories.model import step
from benchmarks.histories.records import (
    Call,
    Delete,
    DeleteAdapter,
    Deleted,
    Done,
    Freeze,
    Frozen,
    Grant,
    Listed,
    Moved,
    Operation,
    Outcome,
    Promote,
    Publish,
    Published,
    ReadAliases,
    ReadCount,
    ReadVersions,
    Refused,
    Resolve,
    Resolved,
    Revoke,
    Rollback,
    SetAlias,
)
from benchmarks.histories.state import AdapterState

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
NOT_FOUND, PRECONDITION = Refused("NOT_FOUND"), Refused("FAILED_PRECONDITION")
Told = list[tuple[Call, Outcome]]


def stable(generation: int, *digests: str, frozen: bool = False) -> Moved:
    return Moved("stable", generation, tuple((digest, 1) for digest in digests), frozen)


def canary(generation: int, *digests: str) -> Moved:
    return Moved("canary", generation, tuple((digest, 1) for digest in digests))


BEGIN: Told = [(Publish(A), Published(A, 1, stable(1, A))), (Publish(B, "canary"), Published(B, 2, canary(1, B)))]
PROMOTED: Told = [
    *BEGIN,
    (Publish(C), Published(C, 3, None)),
    (Promote("stable", "canary"), stable(2, B)),
    (Promote("stable", "canary", A), PRECONDITION),  # the source serves another
    (Promote("stable", "other"), NOT_FOUND),
    (Promote("stable", "", C), PRECONDITION),  # it is no arm
    (Promote("stable", "", B, 1), Refused("ABORTED", 2)),
    (SetAlias("stable", ((A, 1), (C, 1))), stable(3, A, C)),
    (Promote("canary", "stable"), PRECONDITION),  # the source serves a split
    (Promote("stable", "", C, 3), stable(4, C)),
    (Promote("other", "stable"), Moved("other", 1, ((C, 1),))),
    (Promote("nowhere", "", C), NOT_FOUND),
    (Rollback("stable"), stable(5, B)),
]
FROZEN: Told = [
    *BEGIN,
    (Freeze("other", frozen=True), NOT_FOUND),
    (Freeze("stable", frozen=True), Frozen(stable(1, A, frozen=True))),
    (Freeze("stable", frozen=True), Frozen(stable(1, A, frozen=True))),
    (ReadAliases(), Listed((canary(1, B), stable(1, A, frozen=True)))),
    (SetAlias("stable", ((B, 1),)), PRECONDITION),
    (SetAlias("stable", ((B, 1),), 7), Refused("ABORTED", 1)),
    (SetAlias("stable", ((C, 1),)), NOT_FOUND),
    (Promote("stable", "canary"), PRECONDITION),
    (Publish(C, "stable"), PRECONDITION),
    (Delete(A, force=True), PRECONDITION),
    (DeleteAdapter(force=True), PRECONDITION),
    (Promote("canary", "stable"), canary(2, A)),
    (Freeze("stable", frozen=False), Frozen(stable(1, A))),
    (Promote("stable", "canary"), stable(2, A)),
    (ReadCount(), Listed((2,))),
]
DELETED: Told = [
    *BEGIN,
    (Grant("guest"), Done()),
    (DeleteAdapter(), PRECONDITION),
    (DeleteAdapter(force=True), Deleted((canary(2), stable(2)), 2)),
    (DeleteAdapter(force=True), NOT_FOUND),
    (ReadAliases(), NOT_FOUND),
    (ReadVersions(), NOT_FOUND),
    (Grant("guest"), NOT_FOUND),
    (Revoke("guest"), NOT_FOUND),
    (Freeze("stable", frozen=True), NOT_FOUND),
    (Resolve("", "stable"), NOT_FOUND),
    (Resolve("", "", A), NOT_FOUND),
    (Publish(A), Published(A, 3, stable(3, A))),
    (Resolve("guest", "stable"), NOT_FOUND),
    (Resolve("", "stable"), Resolved(3, ((A, 3, 1, ""),))),
    (ReadVersions(), Listed(((3, A, "READY"),))),
    (SetAlias("canary", ((A, 1),), 0), canary(3, A)),
    (Delete(A, force=True), Deleted((canary(4), stable(4)))),
    (DeleteAdapter(), Deleted((), 0)),
]
EVENTS = [
    ("VERSION", A, 0), ("ALIAS", A, 1), ("VERSION", B, 0), ("ALIAS", B, 1), ("GRANT", "", 0),
    ("ALIAS", "", 2), ("ALIAS", "", 2), ("VERSION", A, 0), ("VERSION", B, 0), ("GRANT", "", 0),
    ("VERSION", A, 0), ("ALIAS", A, 3), ("ALIAS", A, 3), ("ALIAS", "", 4), ("ALIAS", "", 4), ("VERSION", A, 0),
]  # fmt: skip
"""What the feed tells of `DELETED`."""


REHEARSED: Told = [
    (DeleteAdapter(force=True, dry_run=True), NOT_FOUND),
    *BEGIN,
    (Grant("guest"), Done()),
    (DeleteAdapter(dry_run=True), PRECONDITION),
    (DeleteAdapter(force=True, dry_run=True), Deleted((canary(2), stable(2)), 2)),
    (ReadAliases(), Listed((canary(1, B), stable(1, A)))),
    (ReadVersions(), Listed(((1, A, "READY"), (2, B, "READY")))),
    (Resolve("guest", "stable"), Resolved(1, ((A, 1, 1, ""),))),
    (DeleteAdapter(force=True), Deleted((canary(2), stable(2)), 2)),
]


def operations(told: Told) -> tuple[Operation, ...]:
    return tuple(
        Operation(id=at, client=0, subject="style", what=what, call=2 * at, end=2 * at + 1, outcome=outcome)
        for at, (what, outcome) in enumerate(told)
    )


def broken(told: Told, events: list[tuple[str, str, int]] | None = None) -> set[str]:
    feed = None if events is None else Feed(tuple(Change(kind, "style", version, place) for kind, version, place in events))
    return {one.promise for one in check_history(History(operations(told), feed))}


def test_each_call_answers_as_the_api_says() -> None:
    for told in (PROMOTED, FROZEN, DELETED, REHEARSED):
        state = AdapterState()
        for one in operations(told):
            outcome, after = step(state, one)
            assert outcome == one.outcome, one.what
            assert isinstance(after, AdapterState)
            state = after
        assert broken(told) == set()


def test_a_frozen_alias_that_moves_is_flagged() -> None:
    told = [*FROZEN[:4], (SetAlias("stable", ((B, 1),)), stable(2, B))]
    assert broken(told) == {"linearizable"}


def test_a_promotion_to_another_version_is_flagged() -> None:
    assert broken([*BEGIN, (Promote("stable", "canary"), stable(2, A))]) == {"linearizable"}


def test_two_promotions_that_expected_one_generation_are_flagged() -> None:
    told = [*BEGIN, (Promote("stable", "canary", "", 1), stable(2, B)), (Promote("stable", "canary", "", 1), stable(3, B))]
    assert "compare-and-swap is exclusive" in broken(told)


def test_what_outlives_its_adapter_is_flagged() -> None:
    gone = DELETED[:5]
    again = [*gone, (Publish(A), Published(A, 3, stable(3, A)))]
    assert broken(again) == set()
    assert "linearizable" in broken([*gone, (Resolve("", "", A), Resolved(0, ((A, 1, 1, ""),)))])
    assert "linearizable" in broken([*again, (Resolve("guest", "stable"), Resolved(3, ((A, 3, 1, ""),)))])
    assert "an alias's generation grows by one a move" in broken([*gone, (Publish(A), Published(A, 3, stable(1, A)))])
    assert "linearizable" in broken([*gone, (Publish(A), Published(A, 1, stable(3, A)))])


def test_the_feed_tells_of_all_that_goes_with_an_adapter() -> None:
    assert broken(DELETED, EVENTS) == set()
    for at, (kind, *_) in enumerate(EVENTS):
        if kind != "GRANT":  # how many of these there are is not known exactly
            assert broken(DELETED, EVENTS[:at] + EVENTS[at + 1 :]) == {"the feed skips nothing"}


def test_a_dry_run_that_deletes_or_tells_something_else_is_flagged() -> None:
    assert broken([*REHEARSED[:5], (ReadAliases(), NOT_FOUND)]) == {"linearizable"}
    assert broken([*BEGIN, (DeleteAdapter(force=True, dry_run=True), Deleted((canary(1), stable(1)), 2))]) == {"linearizable"}
    assert broken([*BEGIN, (DeleteAdapter(force=True, dry_run=True), Deleted((canary(2), stable(2)), 1))]) == {"linearizable"}


def test_a_dry_run_takes_no_request_id() -> None:
    rehearsed, real = Deleted((canary(3), stable(2)), 2), Deleted((canary(2), stable(2)), 2)
    told = [
        *operations(BEGIN),
        *(
            Operation(id=at, client=0, subject="style", what=what, call=2 * at, end=2 * at + 1, outcome=outcome, request_id=name)
            for at, (what, outcome, name) in enumerate(
                [
                    (DeleteAdapter(force=True, dry_run=True), real, "r"),
                    (SetAlias("canary", ((A, 1),)), canary(2, A), "r"),
                    (DeleteAdapter(force=True, dry_run=True), Refused("INVALID_ARGUMENT"), "r"),
                    (DeleteAdapter(force=True, dry_run=True), rehearsed, "s"),
                    (DeleteAdapter(force=True), rehearsed, "s"),
                    (DeleteAdapter(force=True, dry_run=True), rehearsed, "s"),
                ],
                start=len(BEGIN),
            )
        ),
    ]
    assert check_history(History(tuple(told))) == []
