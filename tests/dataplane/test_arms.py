"""A split's arm depends on the unit and the split's secret only, with the right shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.arms import draw_arm
from veneer.errors import InternalError

UNITS = [f"user-{number}" for number in range(4000)]
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27}  # by degrees of freedom; exceeded once in a thousand


def draws(weights: list[int], *, salt: bytes = b"salt", sticky: bool = True) -> list[int]:
    points: list[tuple[int, ...]] = [()] * len(weights)
    return [draw_arm(weights, points, salt=salt, unit=unit, sticky=sticky) for unit in UNITS]


def chi_square(counts: list[int], expected: list[float]) -> float:
    return sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))


@given(weights=st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=8), unit=st.text(), salt=st.binary(max_size=40))
def test_a_unit_keeps_its_arm(weights: list[int], unit: str, salt: bytes) -> None:
    first = draw_arm(weights, [()] * len(weights), salt=salt, unit=unit, sticky=True)
    assert first == draw_arm(weights, [()] * len(weights), salt=salt, unit=unit, sticky=True)
    assert 0 <= first < len(weights)


@pytest.mark.parametrize("weights", [[1, 1], [9, 1], [1, 2, 3], [50, 30, 15, 5]])
@pytest.mark.parametrize("sticky", [True, False])
def test_the_shares_are_the_weights(weights: list[int], sticky: bool) -> None:
    arms = draws(weights, sticky=sticky)
    expected = [len(UNITS) * weight / sum(weights) for weight in weights]
    counts = [arms.count(place) for place in range(len(weights))]
    assert chi_square(counts, expected) < CHI_SQUARE_999[len(weights) - 1]


def test_moving_a_tenth_of_the_weight_moves_a_tenth_of_the_units_and_only_one_way() -> None:
    before, after = draws([50, 50]), draws([60, 40])
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {(1, 0)}
    assert abs(len(moved) / len(UNITS) - 0.1) < 0.016  # 3.3 standard deviations


@pytest.mark.parametrize(("one", "other"), [((b"a", True), (b"b", True)), ((b"a", True), (b"a", False))])
def test_two_splits_are_independent(one: tuple[bytes, bool], other: tuple[bytes, bool]) -> None:
    pairs = list(zip(draws([1, 1], salt=one[0], sticky=one[1]), draws([1, 1], salt=other[0], sticky=other[1]), strict=True))
    counts = [pairs.count(pair) for pair in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert chi_square(counts, [len(UNITS) / 4] * 4) < CHI_SQUARE_999[3]


def test_a_unit_gets_the_arm_that_holds_its_point_in_whatever_order_the_arms_come() -> None:
    points = [(0, 1 << 22, 1 << 23, 1 << 24), (1 << 22, 1 << 23)]
    forth = [draw_arm([3, 1], points, salt=b"salt", unit=unit, sticky=True) for unit in UNITS]
    back = [draw_arm([1, 3], points[::-1], salt=b"salt", unit=unit, sticky=True) for unit in UNITS]
    assert forth == [1 - place for place in back]
    assert chi_square([forth.count(place) for place in (0, 1)], [len(UNITS) * 0.75, len(UNITS) * 0.25]) < CHI_SQUARE_999[1]


def test_consecutive_points_in_the_order_of_the_arms_draw_what_the_weights_do() -> None:
    points = [(0, 5033165), (5033165, 8388608), (8388608, 1 << 24)]  # 30, 20 and 50 of 100
    assert [draw_arm([3, 2, 5], points, salt=b"salt", unit=unit, sticky=True) for unit in UNITS] == draws([3, 2, 5])


def test_a_unit_whose_point_no_arm_holds_is_an_error_and_not_somebodys() -> None:
    with pytest.raises(InternalError, match="do not serve all units"):
        draw_arm([1, 1], [(0, 1), (1, 2)], salt=b"salt", unit="u", sticky=True)
