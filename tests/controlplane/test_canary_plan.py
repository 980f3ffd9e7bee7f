"""What counts lead to, by rules alone: every request is weighed once, and steps end by time and requests."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.canaries import canary_from_json, canary_to_json
from controlplane.canary_plan import RUNNING, WINDOW, Canary, Move, Progress, Step, check_steps
from controlplane.regression import NONE, Tally
from veneer.errors import InvalidArgumentError

NOW = datetime(2026, 11, 30, tzinfo=UTC)
TALLIES = st.builds(Tally, st.integers(0, 40), st.integers(0, 40))


def canary(*progress: Progress, num_steps: int = 3) -> Canary:
    """One whose last step with progress is the present one; each step takes a minute and twenty requests."""
    return Canary(
        owner="acme",
        adapter="style",
        alias="stable",
        generation=7,
        version="a" * 64,
        stable="b" * 64,
        steps=tuple(Step(10 * (place + 1), 60.0, 20) for place in range(num_steps)),
        step=len(progress) - 1,
        state=RUNNING,
        reason="",
        progress=progress,
        create_time=NOW,
        step_time=NOW,
        end_time=None,
    )


def counts(version: Tally, stable: Tally) -> Progress:
    return Progress(version=version, stable=stable)


@pytest.mark.parametrize(
    ("elapsed_s", "requests", "due"), [(60.0, 20, True), (59.9, 20, False), (60.0, 19, False), (1e6, 0, False)]
)
def test_a_step_is_over_after_its_time_and_its_requests(elapsed_s: float, requests: int, *, due: bool) -> None:
    one = canary(counts(Tally(requests - requests // 2, requests // 2), NONE))
    assert one.is_due(elapsed_s) is due


def test_requests_of_earlier_steps_do_not_count_for_the_present_one() -> None:
    assert not canary(counts(Tally(500, 0), NONE), counts(Tally(19, 0), NONE)).is_due(60.0)


def test_a_window_is_weighed_when_both_have_enough_requests_or_the_step_is_over() -> None:
    few = canary(counts(Tally(WINDOW - 1, 0), Tally(50, 0)))
    assert few.weighed(is_due=False) == few
    assert few.weighed(is_due=True).progress[0].weighed_version == Tally(WINDOW - 1, 0)
    late = canary(counts(Tally(1, 0), Tally(1, 0)), counts(Tally(1, 0), Tally(1, 0))).weighed(is_due=False)
    assert [one.weighed_version.total for one in late.progress] == [1, 0], "nothing more is waited for in a step that is over"


@given(st.lists(st.tuples(TALLIES, TALLIES), min_size=1, max_size=6))
def test_every_request_is_weighed_once_however_often_one_looks(parts: list[tuple[Tally, Tally]]) -> None:
    one = canary(Progress())
    for version, stable in parts:
        [present] = one.progress
        one = replace(one, progress=(replace(present, version=present.version + version, stable=present.stable + stable),))
        one = one.weighed(is_due=False)
        assert one.weighed(is_due=False) == one
        [present] = one.progress
        pending = present.version - present.weighed_version, present.stable - present.weighed_stable
        assert min(tally.total for tally in pending) < WINDOW
        assert all(tally.ok >= 0 and tally.failed >= 0 for tally in pending)


def test_evidence_is_kept_since_the_beginning_of_each_step() -> None:
    bad, good = counts(Tally(10, 30), Tally(300, 3)), counts(Tally(40, 0), Tally(300, 3))
    first, second = canary(good, bad).weighed(is_due=True).progress
    assert max(second.evidence) > max(first.evidence) > 0
    alone = canary(bad).weighed(is_due=True).progress[0]
    assert max(second.evidence) == pytest.approx(max(alone.evidence), rel=0.2), "but for the rate that is known by then"


@pytest.mark.parametrize(
    ("version", "due", "move"),
    [(Tally(40, 0), False, Move.WAIT), (Tally(40, 0), True, Move.GO_ON), (Tally(0, 40), True, Move.ROLL_BACK)],
)
def test_evidence_goes_before_the_schedule(version: Tally, move: Move, *, due: bool) -> None:
    assert canary(counts(version, Tally(300, 3))).weighed(is_due=due).next_move(is_due=due) is move


@given(st.lists(st.tuples(TALLIES, TALLIES), min_size=1, max_size=3))
def test_a_stored_answer_reads_as_it_was_given(parts: list[tuple[Tally, Tally]]) -> None:
    one = canary(*(counts(*part) for part in parts)).weighed(is_due=True)
    assert canary_from_json(canary_to_json(one)) == one
    over = replace(one, end_time=NOW, state="STOPPED", reason="why")
    assert canary_from_json(canary_to_json(over)) == over


def test_every_step_gives_more_than_the_one_before() -> None:
    check_steps([Step(1, 0, 0), Step(2, 0, 0), Step(99, 0, 0)])
    with pytest.raises(InvalidArgumentError) as caught:
        check_steps([Step(10, 0, 0), Step(10, 0, 0), Step(5, 0, 0)])
    assert [one.field for one in caught.value.violations] == ["steps[1].weight_percent", "steps[2].weight_percent"]
