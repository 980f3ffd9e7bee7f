from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.placement import Placement

CAPACITY = 12
sizes = st.lists(st.integers(1, 5), min_size=8, max_size=8)
steps = st.lists(st.tuples(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7), max_size=2)), max_size=20)


@settings(max_examples=3 * settings.default.max_examples)
@given(sizes, steps)
def test_active_ranges_are_disjoint_in_bounds_and_hold_what_was_copied_there(sizes, steps):
    placement = Placement(CAPACITY)
    epochs = [0] * 8
    content: list[tuple[int, int] | None] = [None] * CAPACITY
    for active, changed in steps:
        for slot in changed:
            epochs[slot] += 1
        while sum(sizes[slot] for slot in active) > CAPACITY:
            active = active - {max(active)}
        copies, end = placement.update({slot: (epochs[slot], sizes[slot]) for slot in active})
        assert len(copies) == len(set(copies))
        for slot in copies:
            for block in range(placement[slot].start, placement[slot].end):
                content[block] = (slot, epochs[slot])
        for slot in active:
            placed = placement[slot]
            assert placed.size == sizes[slot]
            assert placed.end <= end <= CAPACITY
            assert content[placed.start : placed.end] == [(slot, epochs[slot])] * sizes[slot]


def test_an_adapter_that_comes_back_is_not_copied_again():
    placement = Placement(8)
    assert placement.update({1: (0, 2), 2: (0, 2)})[0] == [1, 2]
    assert placement.update({1: (0, 2)})[0] == []
    assert placement.update({1: (0, 2), 2: (0, 2)}) == ([], 4)


def test_holes_do_not_make_the_range_much_longer_than_needed():
    placement = Placement(64)
    placement.update(dict.fromkeys(range(32), (0, 2)))
    copies, end = placement.update({31: (0, 2), 0: (0, 2), 7: (0, 2)})
    assert end <= 8
    assert copies == [31, 7]


def test_a_dropped_slot_is_copied_again():
    placement = Placement(8)
    placement.update({1: (0, 2)})
    placement.drop(1)
    placement.drop(5)
    assert placement.update({1: (0, 2)}) == ([1], 2)
