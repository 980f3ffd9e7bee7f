"""Rank rows of tenants, counted."""

from __future__ import annotations

import pytest

from dataplane.engine.rank_budget import RankBudget
from tests.dataplane.engine.driving import submit


def test_each_distinct_adapter_of_a_tenant_counts_once_in_multiples_of_16() -> None:
    budget = RankBudget()
    small, other, again = (submit(name, version=version, rank=rank) for name, version, rank in
                           (("1", "a", 8), ("2", "b", 17), ("3", "a", 8)))  # fmt: skip
    for request in (small, other, again):
        budget.add(request)
    assert (budget.used("t"), budget.used("u")) == (48, 0)
    budget.remove(small)
    assert budget.used("t") == 48
    budget.remove(other)
    assert budget.used("t") == 16
    budget.remove(again)
    assert budget.used("t") == 0
    assert budget._uses == {}


@pytest.mark.parametrize(("allowed", "admitted"), [(0, True), (47, False), (48, True)])
def test_what_is_used_and_what_is_asked_for_are_within_the_limit_together(allowed: int, admitted: bool) -> None:
    budget = RankBudget()
    budget.add(submit("1", version="a", rank=16))
    assert budget.admits(submit("2", version="b", rank=17), allowed=allowed) is admitted
    assert budget.admits(submit("3", version="a", rank=16), allowed=allowed), "it runs already"


def test_the_fault_names_what_is_needed_allowed_and_used() -> None:
    budget = RankBudget()
    budget.add(submit("1", version="a", rank=16))
    large = submit("2", version="b", rank=33)
    assert budget.fault(large, allowed=32) == "the adapter takes 48 rank rows; its tenant may have 32 and uses 16"
    assert budget.fault(large, allowed=48) is None
    assert budget.fault(large, allowed=0) is None


def test_an_adapter_without_a_rank_counts_as_the_smallest() -> None:
    budget = RankBudget()
    budget.add(submit("1", version="a", rank=0))
    assert budget.used("t") == 16
    assert not budget.admits(submit("2", version="b", rank=0), allowed=31)
    assert budget.admits(submit("2", version="b", rank=0), allowed=32)
    assert budget.fault(submit("3", version="c", rank=0), allowed=15) is not None
    budget.remove(submit("1", version="a", rank=0))
    assert budget.used("t") == 0
