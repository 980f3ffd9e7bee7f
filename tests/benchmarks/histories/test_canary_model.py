"""Canaries: the model against what the API says, and the checker on moves that the service makes of itself."""

from __future__ import annotations

import json

import pytest

from benchmarks.histories.check import check_history
from benchmarks.histories.history import Entry, History
from benchmarks.histories.journal import moves_in
from benchmarks.histories.model import step
from benchmarks.histories.records import (
    SERVICE,
    Call,
    Condemn,
    Conduct,
    Delete,
    DeleteAdapter,
    Deleted,
    Done,
    Freeze,
    Frozen,
    Listed,
    Moved,
    Operation,
    Outcome,
    Publish,
    Published,
    ReadAliases,
    ReadCanary,
    Refused,
    Retire,
    SetAlias,
    Shown,
    StartCanary,
    StopCanary,
)
from benchmarks.histories.state import AdapterState
from veneer.controlplane.v1 import tenants_pb2

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
NOT_FOUND, PRECONDITION = Refused("NOT_FOUND"), Refused("FAILED_PRECONDITION")
Told = list[tuple[Call, Outcome | None]]


def whole(generation: int, digest: str) -> Moved:
    return Moved("stable", generation, ((digest, 1),))


def split(generation: int, weight: int) -> Moved:
    return Moved("stable", generation, ((A, 100 - weight), (B, weight)))


def shown(step: int, generation: int, state: str = "RUNNING") -> Shown:
    return Shown("stable", B, A, (10, 50), step, generation, state)


START = StartCanary("stable", B, (10, 50))
BEGIN: Told = [(Publish(A), Published(A, 1, whole(1, A))), (Publish(B), Published(B, 2, None))]
RUNNING: Told = [*BEGIN, (START, shown(0, 2))]
TO_THE_END: Told = [
    (ReadCanary("stable"), NOT_FOUND),
    (START, NOT_FOUND),
    *BEGIN,
    (ReadCanary("stable"), NOT_FOUND),
    (StopCanary("stable"), PRECONDITION),
    (StartCanary("other", B, (10,)), NOT_FOUND),
    (StartCanary("stable", A, (10,)), PRECONDITION),  # it is served already
    (StartCanary("stable", C, (10,)), NOT_FOUND),
    (StartCanary("stable", B, (10, 50), expected=7), Refused("ABORTED", 1)),
    (START, shown(0, 2)),
    (START, PRECONDITION),  # the alias serves a split
    (ReadAliases(), Listed((split(2, 10),))),
    (Retire(A), PRECONDITION),
    (Conduct("stable"), split(3, 50)),
    (ReadCanary("stable"), shown(1, 3)),
    (Conduct("stable"), whole(4, B)),
    (ReadCanary("stable"), shown(1, 3, "PROMOTED")),
    (StopCanary("stable"), PRECONDITION),
]
CONDEMNED: Told = [
    *RUNNING,
    (Condemn("stable", 9, B, A), Done()),  # of no step
    (Conduct("stable"), split(3, 50)),
    (Condemn("stable", 2, B, A), Done()),
    (Conduct("stable"), whole(4, A)),
    (ReadCanary("stable"), shown(1, 3, "ROLLED_BACK")),
]
STOPPED: Told = [
    *RUNNING,
    (StopCanary("stable"), shown(0, 2, "STOPPED")),
    (ReadAliases(), Listed((whole(3, A),))),
    (ReadCanary("stable"), shown(0, 2, "STOPPED")),
]
OUTRUN: Told = [
    *RUNNING,
    (SetAlias("stable", ((A, 1),)), whole(3, A)),
    (ReadCanary("stable"), shown(0, 2, "STOPPED")),
    (StopCanary("stable"), PRECONDITION),
    (START, shown(0, 4)),
    (Delete(B, force=True), Deleted((Moved("stable", 5, ((A, 90),)),))),
    (ReadCanary("stable"), NOT_FOUND),
]
FROZEN: Told = [
    *BEGIN,
    (Freeze("stable", frozen=True), Frozen(Moved("stable", 1, ((A, 1),), frozen=True))),
    (START, PRECONDITION),
    (Freeze("stable", frozen=False), Frozen(whole(1, A))),
    (START, shown(0, 2)),
    (Freeze("stable", frozen=True), Frozen(Moved("stable", 2, ((A, 90), (B, 10)), frozen=True))),
    (StopCanary("stable"), PRECONDITION),
    (ReadCanary("stable"), shown(0, 2)),
    (Freeze("stable", frozen=False), Frozen(split(2, 10))),
    (Conduct("stable"), split(3, 50)),
    (DeleteAdapter(force=True), Deleted((Moved("stable", 4, ()),), 2)),
    (ReadCanary("stable"), NOT_FOUND),
]


def operations(told: Told) -> tuple[Operation, ...]:
    end = 2 * len(told)
    return tuple(
        Operation(id=at, client=SERVICE, subject="style", what=what, call=2 * at, end=end, outcome=outcome)
        if isinstance(what, Conduct)
        else Operation(id=at, client=0, subject="style", what=what, call=2 * at, end=2 * at + 1, outcome=outcome)
        for at, (what, outcome) in enumerate(told)
    )


def broken(told: Told, journal: tuple[Entry, ...] | None = None) -> set[str]:
    return {one.promise for one in check_history(History(operations(told), journal=journal))}


@pytest.mark.parametrize("told", [TO_THE_END, CONDEMNED, STOPPED, OUTRUN, FROZEN])
def test_each_call_answers_as_the_api_says(told: Told) -> None:
    state = AdapterState()
    for one in operations(told):
        outcome, after = step(state, one)
        assert outcome == one.outcome, one.what
        assert isinstance(after, AdapterState)
        state = after
    assert broken(told) == set()


def test_a_canary_that_overwrites_a_move_is_flagged() -> None:
    told = [*RUNNING, (SetAlias("stable", ((A, 1),)), whole(3, A)), (Conduct("stable"), whole(4, B))]
    assert broken(told) == {"a canary overwrites nobody's move", "linearizable"}


def test_a_canary_that_was_stopped_and_moves_is_flagged() -> None:
    assert broken([*STOPPED, (Conduct("stable"), split(4, 50))]) == {"a canary that has ended moves nothing", "linearizable"}


@pytest.mark.parametrize("arms", [split(4, 50), whole(4, B)])
def test_a_condemned_canary_that_goes_on_is_flagged(arms: Moved) -> None:
    assert broken([*CONDEMNED[:6], (Conduct("stable"), arms)]) == {"linearizable"}


def test_a_roll_back_for_no_reason_and_a_step_too_far_are_flagged() -> None:
    assert broken([*RUNNING, (Conduct("stable"), whole(3, A))]) == {"linearizable"}
    assert broken([*RUNNING, (Conduct("stable"), whole(3, B))]) == {"linearizable"}


def test_a_frozen_alias_that_a_canary_moves_is_flagged() -> None:
    assert broken([*FROZEN[:7], (Conduct("stable"), split(3, 50))]) == {"linearizable"}


JOURNAL = (
    Entry("style", whole(1, A)),
    Entry("style", split(2, 10)),
    Entry("style", split(3, 50), is_service=True),
    Entry("style", whole(4, B), is_service=True),
    Entry("other", whole(1, A)),
)


def test_the_log_has_every_move_and_no_other() -> None:
    assert broken(TO_THE_END, JOURNAL) == set()
    for at in range(4):
        assert broken(TO_THE_END, JOURNAL[:at] + JOURNAL[at + 1 :]) == {"the log lists every write"}
    assert broken(TO_THE_END, (*JOURNAL, Entry("style", whole(5, A)))) == {"the log lists what was done"}
    by_a_client = Entry("style", whole(4, B))
    assert "the log lists what was done" in broken(TO_THE_END, (*JOURNAL[:3], by_a_client))


def test_the_log_says_which_of_two_unknown_moves_was_made() -> None:
    told: Told = [
        *BEGIN,
        (SetAlias("stable", ((A, 90), (B, 10))), None),
        (SetAlias("stable", ((A, 50), (B, 50))), None),
        (SetAlias("stable", ((B, 1),)), whole(3, B)),
    ]
    first, last = Entry("style", whole(1, A)), Entry("style", whole(3, B))
    for weight in (10, 50):
        assert broken(told, (first, Entry("style", split(2, weight)), last)) == set()
    assert broken(told, (first, Entry("style", split(2, 30)), last)) == {"linearizable"}


def entry(actor: str, kind: str, before: object, after: object) -> tenants_pb2.AuditEntry:
    texts = ["" if row is None else json.dumps(row) for row in (before, after)]
    return tenants_pb2.AuditEntry(actor=actor, object=kind, before=texts[0], after=texts[1])


def test_moves_are_read_from_the_log_with_their_arms_in_order() -> None:
    alias = {"adapter": "style", "name": "stable", "frozen": False}
    arm = {"adapter": "style", "alias": "stable"}
    log = [
        entry("tenant 1", "arms", {**arm, "generation": 1, "position": 0, "version": A, "weight": 1}, None),
        entry("tenant 1", "aliases", {**alias, "generation": 2}, {**alias, "generation": 2, "frozen": True}),
        entry("service", "arms", None, {**arm, "generation": 2, "position": 1, "version": B, "weight": 10}),
        entry("service", "arms", None, {**arm, "generation": 2, "position": 0, "version": A, "weight": 90}),
        entry("service", "aliases", {**alias, "generation": 1}, {**alias, "generation": 2}),
        entry("tenant 1", "arms", None, {**arm, "generation": 1, "position": 0, "version": A, "weight": 1}),
        entry("tenant 1", "aliases", None, {**alias, "generation": 1}),
        entry("tenant 1", "versions", None, {"digest": A}),
    ]
    assert moves_in(log) == (Entry("style", whole(1, A)), Entry("style", split(2, 10), is_service=True))
