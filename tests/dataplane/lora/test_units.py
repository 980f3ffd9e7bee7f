from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataplane.lora.units import Extent, Units

UNIT = 1024
blocks = st.lists(st.integers(1, 3 * UNIT), min_size=1, max_size=6)


def spans(extents):
    return [unit for extent in extents for unit in range(extent.first_unit, extent.first_unit + extent.num_units)]


@given(st.lists(st.tuples(st.booleans(), blocks, st.integers(0, 9)), max_size=40))
def test_units_are_conserved_and_never_shared_and_every_block_lies_whole_in_one_extent(steps):
    units = Units(20, unit_bytes=UNIT)
    held: list[tuple[Extent, ...]] = []
    for give, sizes, index in steps:
        if give and held:
            units.give(held.pop(index % len(held)))
        else:
            before = units.free
            extents = units.take(sizes)
            if extents is None:
                assert units.free == before
            else:
                held.append(extents)
                assert [extent.first_block for extent in extents] == [
                    sum(extent.num_blocks for extent in extents[:i]) for i in range(len(extents))
                ]
                assert sum(extent.num_blocks for extent in extents) == len(sizes)
                for extent in extents:
                    part = sizes[extent.first_block : extent.first_block + extent.num_blocks]
                    assert sum(part) <= extent.num_units * UNIT < sum(part) + UNIT
        taken = [unit for extents in held for unit in spans(extents)]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(range(20))
        assert units.free == 20 - len(taken)
    for extents in held:
        units.give(extents)
    assert units.largest_hole == units.free == 20


def test_an_image_takes_the_smallest_hole_that_holds_it_whole():
    units = Units(10, unit_bytes=UNIT)
    held = [units.take([UNIT * size]) for size in (3, 1, 2, 4)]
    units.give(held[0])
    units.give(held[2])
    assert units.take([UNIT * 2]) == (Extent(4, 2, 0, 1),)


def test_an_image_is_cut_between_blocks_when_no_hole_holds_it():
    units = Units(6, unit_bytes=UNIT)
    held = [units.take([UNIT]) for _ in range(6)]
    for index in (0, 1, 3, 5):
        units.give(held[index])
    assert units.take([1500, 500, 900]) == (Extent(0, 2, 0, 2), Extent(5, 1, 2, 1))
    assert units.take([1500]) is None
    assert units.free == 1


def test_an_attempt_on_a_copy_leaves_the_original():
    units = Units(4, unit_bytes=UNIT)
    trial = units.copy()
    assert trial.take([UNIT * 3])
    assert (units.free, trial.free, trial.num_units) == (4, 1, 4)
