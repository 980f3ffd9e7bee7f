from __future__ import annotations

from controlplane.advice import MAX_VERSIONS, Staging, named_homes, staging
from controlplane.placement import Plan

PLAN = Plan.of_pairs([("t/a", "one"), ("t/a", "two"), ("t/b", "two"), ("t/c", "three")])


def test_homes_are_named_when_they_hold_the_adapter() -> None:
    held = {"two": {"t/a": {"v1"}}, "three": {"t/b": {"v2"}}, "gone": {"t/c": {"v3"}}}
    assert named_homes(PLAN, held) == {
        "t/a": ("two",),  # the other home is not ready yet
        "t/b": ("three",),  # no home is, but another has it
        "t/c": ("three",),  # nobody of the plan has it
    }


def test_a_home_is_told_to_stage_what_it_lacks_and_a_holder_to_let_go_when_the_homes_have_it() -> None:
    held = {"two": {"t/a": {"v1"}}, "three": {"t/a": {"v1"}}}
    versions = {"t/a": ("v1", "v1b"), "t/b": ("v2",), "t/c": ()}
    told = staging(PLAN, held, versions)
    assert told["one"].stage == ("v1", "v1b")
    assert told["three"] == Staging(), "home one does not have it yet"
    assert set(told["two"].stage) == {"v1b", "v2"}
    complete = staging(PLAN, {**held, "one": {"t/a": {"v1"}}}, versions)
    assert complete["three"].release == ("v1",)


def test_what_nobody_asks_for_is_neither_staged_nor_let_go() -> None:
    told = staging(PLAN, {"one": {"t/unplanned": {"v9"}}}, {})
    assert told == {"one": Staging(), "two": Staging(), "three": Staging()}


def test_a_hint_names_a_bounded_number_of_versions() -> None:
    keys = [(f"t/{number}", "one") for number in range(2 * MAX_VERSIONS)]
    told = staging(Plan.of_pairs(keys), {}, {key: ("v",) for key, _ in keys})
    assert len(told["one"].stage) == MAX_VERSIONS
