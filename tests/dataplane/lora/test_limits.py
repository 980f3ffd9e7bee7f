"""What a tenant's copies may take together, pins, and who pays for what several tenants use."""

from __future__ import annotations

import numpy as np

from dataplane.lora.image import ImagePair, build_image
from tests.dataplane.lora.loading import UNIT, make, next_victims, places, stage


def bring(residency, version, units=1, tenant="", max_units=0):
    """As `load`, within a limit."""
    stage(residency, version, units)
    assert residency.acquire(version, tenant, max_bytes=max_units * UNIT) is None
    plan = residency.next_load()
    residency.commit(plan)
    lease = residency.acquire(version, tenant, max_bytes=max_units * UNIT)
    residency.withdraw(version)
    return lease


def test_a_load_beyond_the_limit_takes_the_room_of_the_tenants_own_idle_copies_though_there_is_other_room():
    residency = make(max_slots=8, num_units=8)
    for version in "ab":
        residency.release(bring(residency, version, tenant="x", max_units=2))
    stage(residency, "c")
    assert residency.acquire("c", "x", max_bytes=2 * UNIT) is None
    plan = residency.next_load()
    assert [evicted.version for evicted in plan.evicted] == ["a"]
    assert residency.units_used == 2


def test_a_load_beyond_the_limit_waits_for_the_tenants_leases_and_holds_nobody_up():
    residency = make(max_slots=8, num_units=8, max_passed_over=0)
    held = bring(residency, "a", 2, tenant="x", max_units=2)
    stage(residency, "b")
    assert residency.acquire("b", "x", max_bytes=2 * UNIT) is None
    budget = residency.budget("b", "x", max_bytes=2 * UNIT)
    assert (budget.needed, budget.used, budget.busy, budget.allowed) == (UNIT, 2 * UNIT, 2 * UNIT, 2 * UNIT)
    assert budget.is_spent
    assert not budget.is_hopeless
    residency.reserve("b")
    other = bring(residency, "c", 4, tenant="y")
    residency.release(held)
    plan = residency.next_load()
    assert (plan.version, [evicted.version for evicted in plan.evicted]) == ("b", ["a"])
    residency.release(other)


def test_who_waits_for_the_same_version_is_not_kept_from_it_by_anothers_limit():
    residency = make(max_slots=8, num_units=8)
    held = bring(residency, "a", 2, tenant="x", max_units=2)
    stage(residency, "b")
    assert residency.acquire("b", "x", max_bytes=2 * UNIT) is None
    assert residency.next_load() is None
    assert residency.acquire("b", "y") is None
    residency.commit(residency.next_load())
    lease = residency.acquire("b", "y")
    assert residency.acquire("b", "x", max_bytes=2 * UNIT) is not None, "y uses it too and pays"
    assert residency._entries["b"].tenant == "y"
    residency.release(lease)
    assert residency.acquire("b", "x", max_bytes=2 * UNIT) is None, "nobody would pay for it but y, who is done with it"
    residency.release(held)
    assert residency.acquire("b", "x", max_bytes=2 * UNIT) is not None
    assert [freed.version for freed in residency.take_freed()] == ["a"]
    assert places(residency) == {"a": "host", "b": "device"}


def test_a_limit_counts_a_copy_in_one_piece_however_it_is_cut():
    residency = make(max_slots=8, num_units=6)
    leases = [bring(residency, version) for version in "abcd"]
    residency.release(leases[1])
    residency.release(leases[3])
    stage(residency, "big", 3)
    assert residency.acquire("big", "x", max_bytes=3 * UNIT) is None
    assert residency.next_load() is not None
    assert residency.budget("a", "x", max_bytes=3 * UNIT).used == 3 * UNIT


def test_a_pinned_version_is_loaded_and_stays_until_the_pin_ends():
    residency = make(max_slots=2)
    residency.pin("p", "x")
    assert residency.missing() == ("p",)
    stage(residency, "p")
    residency.withdraw("p")
    residency.commit(residency.next_load())
    residency.release(bring(residency, "a", tenant="y"))
    assert residency.is_pinned("p")
    assert next_victims(residency, "b") == ["a"]
    assert next_victims(residency, "c") == ["b"]
    assert not residency.evict("p")
    lease = residency.acquire("p", "y")
    residency.release(lease)
    assert residency._entries["p"].tenant == "x", "whose pin it is pays for it"
    residency.unpin("p")
    for _ in range(3):
        residency.release(residency.acquire("c", "z"))
    assert next_victims(residency, "d") == ["p"]


def test_a_pin_that_ends_before_its_load_is_loaded_no_more():
    residency = make(max_slots=1, num_units=1)
    used = bring(residency, "a", tenant="y")
    stage(residency, "p")
    residency.pin("p", "x")
    residency.unpin("p")
    assert residency.wanted() == ()
    assert not residency._shares.has("x")
    residency.release(used)
    assert residency.next_load() is None, "what is used stays"


def test_nor_one_whose_version_is_taken_away_before_it_was_there():
    residency = make()
    residency.pin("p", "x")
    assert residency.missing() == ("p",)
    residency.unstage("p", drop_device=True)
    assert (residency.missing(), residency.is_pinned("p")) == ((), False)
    assert not residency._shares.has("x")


def test_the_end_of_a_pin_is_no_end_of_a_requests_wait():
    residency = make()
    for is_first in (True, False):
        if is_first:
            assert residency.acquire("v", "y") is None
        residency.pin("v", "x")
        if not is_first:
            assert residency.acquire("v", "y") is None
        residency.unpin("v")
        assert residency.wanted() == ("v",)
        residency.withdraw("v")
        assert residency.wanted() == ()


def test_when_a_pin_ends_before_its_load_whoever_waits_pays_and_not_the_pins_owner():
    residency = make(max_slots=8, num_units=8)
    residency.pin("a", "owner")
    assert residency.acquire("a", "x", max_bytes=4 * UNIT) is None
    residency.unpin("a")
    stage(residency, "a", 3)
    residency.commit(residency.next_load())
    assert residency._charges.booked("x") == 3
    assert residency._charges.booked("owner") == 0


def test_the_end_of_a_requests_wait_is_no_end_of_a_pin():
    residency = make()
    residency.pin("v", "x")
    assert residency.acquire("v", "y") is None
    residency.withdraw("v")
    assert residency.wanted() == ("v",)
    residency.unpin("v")
    assert residency.wanted() == ()


def test_a_copy_that_requests_wait_for_stays_so_when_its_pin_ends():
    """A copy that nobody waits for goes before one that a request is about to lease."""
    residency = make(max_slots=2, num_units=2)
    for version in ("v", "idle"):
        residency.release(bring(residency, version))
    residency.pin("v", "")
    assert residency.want("v")
    residency.unpin("v")
    assert next_victims(residency, "new") == ["idle"]


def test_a_version_that_is_taken_away_is_pinned_no_more():
    residency = make()
    residency.pin("p", "x")
    stage(residency, "p")
    residency.commit(residency.next_load())
    assert residency.unstage("p", drop_device=True)
    assert not residency.is_pinned("p")
    assert places(residency) == {}


def test_a_pin_meets_no_limit_of_its_owner_whose_own_loads_wait_then():
    residency = make(max_slots=8, num_units=8)
    held = bring(residency, "a", 2, tenant="x", max_units=2)
    residency.pin("p", "x")
    stage(residency, "p")
    residency.commit(residency.next_load())
    stage(residency, "b")
    residency.release(held)
    assert residency.acquire("b", "x", max_bytes=2 * UNIT) is None
    plan = residency.next_load()
    assert [evicted.version for evicted in plan.evicted] == ["a"]


def test_adapters_of_gains_and_shifts_alone_take_bytes_and_a_slot_of_their_tenant():
    nothing, shift = np.empty((0, 32), np.float32), np.ones(32, np.float32)
    pair = ImagePair(0, 0, 1.0, nothing, nothing.T, shift=shift)
    image = build_image([pair], version="a", base_digest="b", dtype="float32", num_layers=1, num_slices=1)
    assert (image.rank, image.block_bytes) == (0, (128,))
    residency = make(max_slots=2, num_units=10)
    for version in "abc":
        residency.stage(version, rank=image.rank, blocks=image.block_bytes)
        assert residency.acquire(version, "x", max_bytes=2 * UNIT) is None
    for version in "ab":
        plan = residency.next_load()
        assert plan is not None
        assert plan.version == version
        residency.commit(plan)
        assert residency.acquire(version, "x", max_bytes=2 * UNIT) is not None
    assert residency.next_load() is None, "two slots, and two units of its limit, are taken"
    assert residency._charges.booked("x") == 2
    assert residency.excess_of("x") == 0, "it holds both slots, and all is its share"
    assert residency.acquire("z", "y") is None
    assert residency.excess_of("x") == 5, "half of that is the other's"
    assert residency.units_used == 2
