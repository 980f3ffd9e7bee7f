"""Where an adapter starts in a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.invocation import find_start


@pytest.mark.parametrize(
    ("prompt", "invocation", "start"),
    [
        ((1, 2, 3), (), 0),
        ((1, 2, 3), (1,), 0),
        ((1, 2, 3), (3,), 2),
        ((1, 2, 3), (2, 3), 1),
        ((1, 2, 3), (1, 2, 3), 0),
        ((7, 8, 1, 7, 8, 1), (7, 8), 3),
        ((5, 5, 5, 5), (5, 5), 2),
        ((1, 2, 3), (3, 2), None),
        ((1, 2, 3), (4,), None),
        ((1, 2), (1, 2, 3), None),
        ((0, 0x110000 - 1, 0xD800), (0x110000 - 1,), 1),
    ],
)
def test_an_adapter_starts_where_its_invocation_last_begins(
    prompt: tuple[int, ...], invocation: tuple[int, ...], start: int | None
) -> None:
    assert find_start(prompt, invocation) == start


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_the_search_is_that_of_every_place_in_turn(prompt: list[int], invocation: list[int]) -> None:
    places = [place for place in range(len(prompt)) if prompt[place : place + len(invocation)] == invocation]
    assert find_start(prompt, invocation) == (places[-1] if places else None)
