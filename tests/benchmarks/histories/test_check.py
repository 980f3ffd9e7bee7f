"""Histories made by hand: the checker passes what the API promises, and flags what it forbids."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.histories.check import check_history
from benchmarks.histories.history import Change, Feed, History
from benchmarks.histories.records import (
    Call,
    Delete,
    Deleted,
    Done,
    Grant,
    Listed,
    Lost,
    Moved,
    Operation,
    Outcome,
    Publish,
    Published,
    ReadAliases,
    ReadCount,
    ReadVersions,
    Refused,
    Resolve,
    Resolved,
    Retire,
    Revoke,
    RevokeKey,
    Rollback,
    SetAlias,
    UseKey,
)
from benchmarks.histories.search import linearize
from benchmarks.histories.state import AdapterState
from tests.benchmarks.histories.random_history import SUBJECT, random_history

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


class Story:
    """A history that is told operation by operation; each takes one unit of time unless it says when."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.now = 0

    def add(
        self, what: Call, outcome: Outcome | None, *, call: int | None = None, end: int | None = None, **more: object
    ) -> Story:
        call = self.now + 1 if call is None else call
        end = call + 1 if end is None else end
        self.now = max(self.now, end)
        fields = {"client": 0, "subject": SUBJECT, **more}
        one = Operation(id=len(self.operations), what=what, call=call, end=end, outcome=outcome, **fields)
        self.operations.append(one)
        return self

    def publish(self, digest: str, number: int, moved: Moved | None = None, **more: object) -> Story:
        return self.add(Publish(digest, "stable" if moved else ""), Published(digest, number, moved), **more)

    def promises_broken(self, *events: Change, resets: tuple[int, ...] = (), with_feed: bool = False) -> set[str]:
        feed = Feed(events, resets) if with_feed else None
        return {one.promise for one in check_history(History(tuple(self.operations), feed))}


def two_versions() -> Story:
    """Two versions; `stable` serves the first, in generation 1."""
    return Story().publish(A, 1, Moved("stable", 1, ((A, 1),))).publish(B, 2)


def moved(generation: int, *digests: str) -> Moved:
    return Moved("stable", generation, tuple((digest, 1) for digest in digests))


def served(generation: int, *arms: tuple[str, int, str]) -> Resolved:
    return Resolved(generation, tuple((digest, number, 1, before) for digest, number, before in arms))


def test_a_life_of_an_adapter_fits() -> None:
    story = two_versions()
    story.add(SetAlias("stable", ((B, 1),), expected=1), moved(2, B))
    story.add(Resolve(alias="stable"), served(2, (B, 2, A)))
    story.add(SetAlias("stable", ((A, 1), (B, 1))), moved(3, A, B))
    story.add(Resolve(alias="stable"), served(3, (A, 1, ""), (B, 2, A)))
    story.add(Retire(A), Refused("FAILED_PRECONDITION"))
    story.add(Rollback("stable", B), moved(4, B))
    story.add(Rollback("stable"), moved(5, A))
    story.add(SetAlias("stable", ((B, 1),), expected=4), Refused("ABORTED", 5))
    story.add(Resolve("guest", "stable"), Refused("NOT_FOUND"))
    story.add(Grant("guest"), Done())
    story.add(Resolve("guest", "stable"), served(5, (A, 1, "")))
    story.add(Revoke("guest"), Done())
    story.add(Resolve("guest", "stable"), Refused("NOT_FOUND"))
    story.add(Retire(B), Done())
    story.add(Resolve(version=B), Refused("RETIRED"))
    story.add(Delete(A), Refused("FAILED_PRECONDITION"))
    story.add(Delete(A, force=True), Deleted((moved(6),)))
    story.add(ReadAliases(), Listed(()))
    story.add(ReadVersions(), Listed(((2, B, "RETIRED"),)))
    story.add(ReadCount(), Listed((2,)))
    story.publish(A, 3)
    story.add(SetAlias("stable", ((A, 1),), expected=0), moved(7, A))
    assert story.promises_broken() == set()


def test_what_overlaps_may_take_effect_in_either_order() -> None:
    story = two_versions()
    story.add(SetAlias("stable", ((B, 1),)), moved(2, B), call=10, end=20)
    story.add(Resolve(alias="stable"), served(2, (B, 2, A)), call=11, end=12)
    story.add(Resolve(alias="stable"), served(2, (B, 2, A)), call=13, end=14)
    assert story.promises_broken() == set()


def test_what_was_seen_is_not_unseen() -> None:
    story = two_versions()
    story.add(SetAlias("stable", ((B, 1),)), moved(2, B), call=10, end=20)
    story.add(Resolve(alias="stable"), served(2, (B, 2, A)), call=11, end=12)
    story.add(Resolve(alias="stable"), served(1, (A, 1, "")), call=13, end=14)
    assert story.promises_broken() == {"linearizable", "an alias never goes back"}


def test_a_read_of_what_nobody_wrote_is_flagged() -> None:
    assert two_versions().add(Resolve(alias="stable"), served(2, (B, 2, A))).promises_broken() == {"linearizable"}


def test_a_stale_read_is_flagged() -> None:
    story = two_versions().add(SetAlias("stable", ((B, 1),)), moved(2, B))
    assert "linearizable" in story.add(ReadAliases(), Listed((moved(1, A),))).promises_broken()


def test_an_unknown_outcome_may_take_effect_late_or_never() -> None:
    story = two_versions()
    story.add(SetAlias("stable", ((B, 1),)), None, call=10, end=11)
    story.add(Resolve(alias="stable"), served(1, (A, 1, "")))
    assert story.promises_broken() == set()
    story.add(Resolve(alias="stable"), served(2, (B, 2, A)))
    assert story.promises_broken() == set()
    story.add(Resolve(alias="stable"), served(1, (A, 1, "")))
    assert "linearizable" in story.promises_broken()


def test_an_unknown_outcome_takes_effect_once() -> None:
    story = two_versions().add(SetAlias("stable", ((B, 1),)), None)
    story.add(ReadAliases(), Listed((moved(2, B),))).add(ReadAliases(), Listed((moved(3, B),)))
    assert "linearizable" in story.promises_broken()


def test_an_unknown_outcome_takes_no_effect_before_its_call() -> None:
    story = two_versions().add(ReadAliases(), Listed((moved(2, B),))).add(SetAlias("stable", ((B, 1),)), None)
    assert "linearizable" in story.promises_broken()


def test_two_winners_of_one_compare_and_swap_are_flagged() -> None:
    story = two_versions()
    story.add(SetAlias("stable", ((B, 1),), expected=1), moved(2, B), call=10, end=20)
    story.add(SetAlias("stable", ((A, 1),), expected=1), moved(3, A), call=10, end=20, client=1)
    assert story.promises_broken() == {"compare-and-swap is exclusive", "linearizable"}


def test_a_lost_update_is_flagged() -> None:
    story = two_versions()
    story.add(SetAlias("stable", ((B, 1),)), moved(2, B), call=10, end=20)
    story.add(SetAlias("stable", ((A, 1),)), moved(2, A), call=10, end=20, client=1)
    broken = {"a generation of an alias means one thing", "an alias's generation grows by one a move", "linearizable"}
    assert story.promises_broken() == broken


def test_a_generation_that_is_used_again_after_a_rollback_is_flagged() -> None:
    story = two_versions().add(SetAlias("stable", ((B, 1),)), moved(2, B)).add(Rollback("stable"), moved(1, A))
    broken = story.promises_broken()
    assert {"linearizable", "an alias never goes back", "an alias's generation grows by one a move"} <= broken


def test_a_request_that_is_repeated_is_done_once() -> None:
    story = two_versions()
    story.add(SetAlias("stable", ((B, 1),)), None, request_id="r")
    story.add(SetAlias("stable", ((B, 1),)), moved(2, B), request_id="r")
    story.add(SetAlias("stable", ((A, 1),)), moved(3, A))
    story.add(SetAlias("stable", ((B, 1),)), moved(2, B), request_id="r")
    story.add(ReadAliases(), Listed((moved(3, A),)))
    assert story.promises_broken() == set()
    story.add(SetAlias("stable", ((A, 1),)), Refused("INVALID_ARGUMENT"), request_id="r")
    assert story.promises_broken() == set()


def test_a_request_that_is_done_again_is_flagged() -> None:
    story = two_versions()
    story.add(SetAlias("stable", ((B, 1),)), moved(2, B), request_id="r")
    story.add(SetAlias("stable", ((B, 1),)), moved(3, B), request_id="r")
    assert story.promises_broken() == {"a request id is answered once", "linearizable"}


def test_an_unknown_attempt_cannot_take_effect_beside_its_repetition() -> None:
    story = two_versions()
    story.add(SetAlias("stable", ((B, 1),)), None, request_id="r")
    story.add(SetAlias("stable", ((B, 1),)), moved(2, B), request_id="r")
    story.add(ReadAliases(), Listed((moved(3, B),)))
    assert story.promises_broken() == {"linearizable"}


def test_a_revoked_grant_that_resolves_is_flagged() -> None:
    story = two_versions().add(Grant("guest"), Done()).add(Revoke("guest"), Done())
    story.add(Resolve("guest", "stable"), served(1, (A, 1, "")))
    assert story.promises_broken() == {"what is revoked is refused", "linearizable"}


def test_a_resolve_that_overlaps_the_revocation_may_succeed() -> None:
    story = two_versions().add(Grant("guest"), Done()).add(Revoke("guest"), Done(), call=10, end=20)
    story.add(Resolve("guest", "stable"), served(1, (A, 1, "")), call=12, end=30)
    assert story.promises_broken() == set()


def test_a_revocation_that_is_answered_again_is_not_done_again() -> None:
    story = two_versions().add(Grant("guest"), Done())
    story.add(Revoke("guest"), None, request_id="r").add(Grant("guest"), Done()).add(Revoke("guest"), Done(), request_id="r")
    story.add(Resolve("guest", "stable"), served(1, (A, 1, "")))
    assert story.promises_broken(*EVENTS[:3], *[Change("GRANT", SUBJECT)] * 3, with_feed=True) == set()
    story.add(Revoke("guest"), Done()).add(Resolve("guest", "stable"), served(1, (A, 1, "")))
    assert story.promises_broken() == {"what is revoked is refused", "linearizable"}


def test_a_write_that_would_change_nothing_at_first_may_be_the_one_that_changes_something_later() -> None:
    story = two_versions().add(Grant("guest"), Done()).add(Revoke("guest"), Done(), call=10, end=20)
    story.add(Grant("guest"), Done(), call=10, end=40)
    story.add(Resolve("guest", "stable"), Refused("NOT_FOUND"), call=25, end=30)
    story.add(Resolve("guest", "stable"), served(1, (A, 1, "")), call=45, end=46)
    assert story.promises_broken() == set()


def test_a_new_grant_makes_up_for_the_revocation() -> None:
    story = two_versions().add(Grant("guest"), Done()).add(Revoke("guest"), Done()).add(Grant("guest"), None)
    assert story.add(Resolve("guest", "stable"), served(1, (A, 1, ""))).promises_broken() == set()


def test_a_revoked_key_that_is_let_in_is_flagged() -> None:
    story = Story().add(UseKey(), Done()).add(RevokeKey(), None).add(UseKey(), Done())
    assert story.promises_broken() == set()
    story.add(UseKey(), Refused("UNAUTHENTICATED"))
    assert story.promises_broken() == set()
    assert story.add(UseKey(), Done()).promises_broken() == {"linearizable"}
    assert Story().add(RevokeKey(), Done()).add(UseKey(), Done()).promises_broken() == {
        "linearizable",
        "what is revoked is refused",
    }


def test_a_number_given_twice_is_flagged() -> None:
    broken = Story().publish(A, 1, moved(1, A)).publish(B, 1).promises_broken()
    assert broken == {"a version is immutable and its number is given once", "linearizable"}


def test_a_gap_between_numbers_is_flagged_unless_an_unknown_publish_may_have_it() -> None:
    with_gap = Story().publish(A, 1, moved(1, A)).publish(C, 3)
    assert with_gap.promises_broken() == {"numbers have no gaps", "linearizable"}
    story = Story().publish(A, 1, moved(1, A))
    assert story.add(Publish(B), None, request_id="r").publish(C, 3).promises_broken() == set()


def test_a_version_that_changes_its_digest_is_flagged() -> None:
    story = Story().add(Publish(A), Published(B, 1, moved(1, B)))
    assert "the digest is that of the content" in story.promises_broken()


def test_content_is_known_until_it_is_deleted() -> None:
    story = two_versions().add(Publish(B), Refused("ALREADY_EXISTS")).add(Delete(B), Deleted(()))
    assert story.publish(B, 3).promises_broken() == set()
    assert "linearizable" in two_versions().publish(B, 3).promises_broken()


def test_what_lost_against_a_neighbour_had_no_effect() -> None:
    story = two_versions().add(SetAlias("stable", ((B, 1),)), Lost()).add(ReadAliases(), Listed((moved(1, A),)))
    assert story.promises_broken() == set()


def test_an_error_outside_the_contract_is_flagged() -> None:
    assert two_versions().add(ReadCount(), None, error="INTERNAL").promises_broken() == {"errors are of the contract"}


EVENTS = (
    Change("VERSION", SUBJECT, A),
    Change("ALIAS", SUBJECT, A, 1),
    Change("VERSION", SUBJECT, B),
    Change("ALIAS", SUBJECT, B, 2),
    Change("ALIAS", SUBJECT, "", 3),
)


def told() -> Story:
    story = two_versions().add(SetAlias("stable", ((B, 1),)), moved(2, B))
    return story.add(SetAlias("stable", ((A, 1), (B, 1))), moved(3, A, B))


def test_a_whole_feed_passes() -> None:
    assert told().promises_broken(*EVENTS, Change("GRANT", "other"), with_feed=True) == set()


@pytest.mark.parametrize("at", range(len(EVENTS)))
def test_a_feed_that_skips_an_event_is_flagged(at: int) -> None:
    events = EVENTS[:at] + EVENTS[at + 1 :]
    assert told().promises_broken(*events, with_feed=True) == {"the feed skips nothing"}


def test_a_feed_that_makes_events_up_or_tells_them_twice_is_flagged() -> None:
    assert told().promises_broken(*EVENTS, EVENTS[-1], with_feed=True) == {"the feed tells what was done, once"}
    assert told().promises_broken(*EVENTS, EVENTS[0], with_feed=True) == {"the feed tells what was done, once"}


def test_a_feed_out_of_order_is_flagged() -> None:
    events = (*EVENTS[:3], EVENTS[4], EVENTS[3])
    assert told().promises_broken(*events, with_feed=True) == {"the feed is in the order of commits"}


@pytest.mark.parametrize(
    ("num_events", "broken"),
    [(1, {"the feed skips nothing"}), (2, set()), (5, set()), (6, {"the feed tells what was done, once"})],
)
def test_changes_of_grants_are_counted_as_far_as_outcomes_are_known(num_events: int, broken: set[str]) -> None:
    story = told().add(Grant("guest"), Done()).add(Revoke("guest"), Done())
    story.add(Grant("guest"), Done()).add(Revoke("guest"), None).add(Grant("guest"), Done())
    assert story.promises_broken(*EVENTS, *[Change("GRANT", SUBJECT)] * num_events, with_feed=True) == broken


def test_after_a_reset_the_feed_owes_only_what_came_later() -> None:
    assert told().promises_broken(EVENTS[0], *EVENTS[3:], resets=(1,), with_feed=True) == set()
    assert told().promises_broken(*EVENTS[:3], EVENTS[4], resets=(1,), with_feed=True) == {"the feed is in the order of commits"}


@pytest.mark.parametrize("seed", range(30))
def test_what_a_right_catalogue_shows_always_passes(seed: int) -> None:
    assert check_history(History(tuple(random_history(seed)))) == []


@pytest.mark.parametrize("seed", range(15))
def test_a_right_history_with_one_wrong_answer_is_flagged(seed: int) -> None:
    operations = random_history(seed, unknown=0.0)
    reads = [at for at, one in enumerate(operations) if isinstance(one.outcome, Listed) and isinstance(one.what, ReadCount)]
    at = reads[len(reads) // 2]
    operations[at] = dataclasses.replace(operations[at], outcome=Listed((99,)))
    assert "linearizable" in {one.promise for one in check_history(History(tuple(operations)))}


def test_a_search_that_takes_too_long_is_told_and_not_passed() -> None:
    result = linearize(random_history(3), AdapterState(), max_configurations=10)
    assert not result.is_decided
    assert not result.fits
