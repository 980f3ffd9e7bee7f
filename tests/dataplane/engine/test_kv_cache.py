"""The page pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.engine.kv_cache import PagePool


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_a_page_has_one_owner_and_none_is_lost(steps: list[tuple[bool, int]]) -> None:
    pool = PagePool(12, page_size=4)
    held: list[list[int]] = []
    for take, number in steps:
        if take and number <= pool.num_free:
            held.append(pool.take(number))
        elif not take and held:
            pool.give_back(held.pop(number % len(held)))
        pages = [page for owner in held for page in owner]
        assert len(pages) == len(set(pages))
        assert set(pages) <= set(range(1, 13)), "page 0 is nobody's"
        assert pool.num_free + len(pages) == 12


def test_pages_for_rounds_up() -> None:
    pool = PagePool(4, page_size=16)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_taking_more_than_there_is_is_a_fault_of_the_caller() -> None:
    pool = PagePool(2, page_size=16)
    with pytest.raises(AssertionError):
        pool.take(3)
