"""The covering sets that choose what the oracle compares."""

from __future__ import annotations

import itertools

import pytest

from tests.fixtures.covering import pairwise

pytestmark = pytest.mark.oracle

FACTORS = {"a": (1, 2, 3, 4, 5, 6), "b": ("x", "y", "z"), "c": (True, False), "d": (None, 1), "e": (0, 1)}


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_of_values_occurs_and_few_combinations_do(seed: int) -> None:
    chosen = pairwise(FACTORS, seed=seed)
    for (one, values), (other, others) in itertools.combinations(FACTORS.items(), 2):
        assert {(row[one], row[other]) for row in chosen} == set(itertools.product(values, others))
    assert len(chosen) <= 22, "18 pairs of a and b cannot be had with less than 18"


def test_another_seed_gives_another_set_and_the_same_seed_the_same() -> None:
    assert pairwise(FACTORS, seed=1) == pairwise(FACTORS, seed=1) != pairwise(FACTORS, seed=2)
