"""Shares of the arena against sums made anew."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.lora.shares import Shares

TENANTS = st.sampled_from("xyz")


@dataclass
class Copy:
    tenant: str
    num_units: int


@given(
    claims=st.lists(st.tuples(TENANTS, st.booleans()), max_size=20),
    copies=st.lists(st.tuples(TENANTS, st.integers(1, 5)), max_size=12),
    weights=st.tuples(*[st.integers(1, 4)] * 3),
    loader=TENANTS,
    more=st.integers(1, 8),
)
def test_who_is_most_above_its_share_gives_first_and_then_recency(
    claims: list[tuple[str, bool]], copies: list[tuple[str, int]], weights: tuple[int, ...], loader: str, more: int
) -> None:
    shares, weight = Shares(24, num_slots=24), dict(zip("xyz", weights, strict=True))
    count = dict.fromkeys("xyz", 0)
    for tenant, comes in [*claims, (loader, True)]:
        if comes:
            shares.claim(tenant, weight=weight[tenant])
            count[tenant] += 1
        elif count[tenant]:
            shares.disclaim(tenant)
            count[tenant] -= 1
    waiting = [Copy(*copy) for copy in copies]
    for copy in waiting:
        shares.charge(copy.tenant, copy.num_units)
    total = sum(weight[tenant] for tenant in "xyz" if count[tenant])

    def excess(tenant: str, left: list[Copy]) -> float:
        held = sum(copy.num_units for copy in left if copy.tenant == tenant) + more * (tenant == loader)
        return (held - 24 * weight[tenant] / total) / weight[tenant] if count[tenant] else 0.0

    left = list(waiting)
    for copy in shares.in_order(waiting, loader=loader, more=more):
        most = max(excess(other.tenant, left) for other in left)
        assert excess(copy.tenant, left) == pytest.approx(most) or most <= 1e-9
        if most > 1e-9:
            assert copy is next(other for other in left if other.tenant == copy.tenant), "of one tenant the oldest"
        else:
            assert copy is left[0], "of all the oldest"
        left.remove(copy)
    assert not left


def test_a_tenant_that_asks_for_nothing_has_no_share_and_keeps_none_from_others() -> None:
    shares = Shares(10, num_slots=5)
    shares.claim("x", weight=3)
    shares.claim("y", weight=1)
    shares.charge("x", 6)
    shares.charge("idle", 4)
    assert shares.excess("x") == -1.5
    assert not shares.yields("y", loader="x", more=1)
    assert not shares.yields("idle", loader="x", more=1), "what it left goes by recency"
    shares.disclaim("y")
    assert shares.excess("x") == -4
    assert not shares.has("y")


def test_where_slots_are_scarce_a_copy_counts_as_its_slots_part() -> None:
    shares = Shares(12, num_slots=3)
    for tenant in "xy":
        shares.claim(tenant, weight=1)
    shares.charge("x", 1)
    shares.charge("x", 2)
    shares.charge("y", 7)
    assert (shares.excess("x"), shares.excess("y")) == (2 * 4 - 6, 7 - 6)
    shares.discharge("x", 2)
    assert (shares.excess("x"), shares.excess("x", more=5)) == (-2, 3)


@given(
    held=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    weights=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_no_two_tenants_take_each_others_place_in_turn(
    held: tuple[int, int], sizes: tuple[int, int], weights: tuple[int, int]
) -> None:
    shares = Shares(12, num_slots=12)
    for tenant, units, weight in zip("xy", held, weights, strict=True):
        shares.claim(tenant, weight=weight)
        for _ in range(units):
            shares.charge(tenant, 1)
    if not shares.yields("x", loader="y", more=sizes[1]):
        return
    for _ in range(min(sizes[0], held[0])):
        shares.discharge("x", 1)
    shares.charge("y", sizes[1])
    assert not shares.yields("y", loader="x", more=sizes[0])
