"""Which units the arms of a split serve: no order of them matters, and no more units move than weight does."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.splits import NUM_POINTS, Assignment, assign, consecutive, num_moved

WEIGHTS = st.integers(1, 10000)
Split = tuple[Mapping[str, int], Assignment]


def size(assignment: Assignment, version: str) -> int:
    points = assignment[version]
    return sum(points[1::2]) - sum(points[::2])


def check(assignment: Assignment, weights: Mapping[str, int]) -> None:
    """Every point has one version, and every version the points of its weight."""
    spans = sorted(span for points in assignment.values() for span in zip(points[::2], points[1::2], strict=True))
    assert [spans[0][0], spans[-1][1]] == [0, NUM_POINTS]
    assert all(start < end for start, end in spans)
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert assignment.keys() == weights.keys()
    for version, weight in weights.items():
        assert abs(size(assignment, version) - NUM_POINTS * weight / sum(weights.values())) < 1


def gained(before: Assignment, after: Assignment) -> int:
    return sum(max(size(after, version) - size(before, version), 0) for version in after)


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, int]]:
    """Weights of one set of versions, one after the other, each written in an order of its own."""
    versions = "abcdefgh"[: draw(st.integers(2, 8))]
    one = st.fixed_dictionaries(dict.fromkeys(versions, WEIGHTS))
    drawn = draw(st.lists(one, min_size=1, max_size=12))
    return [{version: weights[version] for version in draw(st.permutations(versions))} for weights in drawn]


@given(histories())
def test_a_change_of_weights_moves_the_units_that_must_move_and_no_others(history: list[dict[str, int]]) -> None:
    earlier: list[Split] = []
    for weights in history:
        assignment = assign(weights, earlier)
        check(assignment, weights)
        is_back = any(assignment is before for _, before in earlier)
        if earlier and not is_back:
            assert num_moved(earlier[0][1], assignment) == gained(earlier[0][1], assignment)
        earlier.insert(0, (weights, assignment))


@given(histories(), st.randoms(use_true_random=False), st.integers(1, 3))
def test_the_same_weights_are_the_same_assignment_in_any_order_and_whatever_came_between(
    history: list[dict[str, int]], random: object, factor: int
) -> None:
    earlier: list[Split] = []
    for weights in history:
        earlier.insert(0, (weights, assign(weights, earlier)))
    weights, assignment = earlier[-1]
    again = {version: weights[version] * factor for version in reversed(list(weights))}
    assert assign(again, earlier) == assignment


def test_ten_per_cent_stay_the_same_ten_per_cent_when_the_arms_are_written_the_other_way_round() -> None:
    first = assign({"a": 90, "b": 10}, [])
    assert assign({"b": 10, "a": 90}, [({"a": 90, "b": 10}, first)]) == first
    assert assign({"b": 10, "a": 90}, []) == first


def test_three_arms_are_written_in_every_order_while_a_weight_moves() -> None:
    before = {"a": 50, "b": 30, "c": 20}
    present = assign(before, [])
    for order in permutations("abc"):
        for loser, gainer in permutations("abc", 2):
            changed = {version: before[version] + 10 * ((version == gainer) - (version == loser)) for version in order}
            after = assign(changed, [(before, present)])
            check(after, changed)
            assert abs(num_moved(present, after) - NUM_POINTS / 10) <= 2
            (third,) = set("abc") - {loser, gainer}
            assert num_moved({third: present[third]}, {third: after[third]}) <= NUM_POINTS - size(present, third) + 2


def test_the_units_of_a_canary_only_grow_with_its_steps() -> None:
    earlier: list[Split] = []
    for weight in (1, 5, 25, 50, 99):
        weights = {"stable": 100 - weight, "canary": weight}
        assignment = assign(weights, earlier)
        if earlier:
            assert num_moved(earlier[0][1], assignment) == gained(earlier[0][1], assignment)
            assert size(assignment, "canary") > size(earlier[0][1], "canary")
        earlier.insert(0, (weights, assignment))
    assert [len(points) for points in earlier[0][1].values()] == [2, 2]


def test_a_split_of_before_goes_on_from_where_its_units_are() -> None:
    """The order of its arms is against that of the digests."""
    before = {"b": 10, "a": 90}
    present = consecutive(list(before.items()))
    assert present == {"b": (0, 1677722), "a": (1677722, NUM_POINTS)}
    after = assign({"a": 80, "b": 20}, [(before, present)])
    assert num_moved(present, after) == size(after, "b") - size(present, "b")


def test_many_moves_of_many_arms_leave_few_spans() -> None:
    earlier: list[Split] = []
    for turn in range(200):
        weights = {version: 1 + (turn * (place + 3) ** 3 + 7 * place) % 97 for place, version in enumerate("abcdefgh")}
        assignment = assign(weights, earlier[:1])
        check(assignment, weights)
        assert sum(map(len, assignment.values())) <= 2 * 128
        earlier.insert(0, (weights, assignment))
