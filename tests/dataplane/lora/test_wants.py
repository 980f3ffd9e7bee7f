"""Which of the loads that are waited for is next."""

from __future__ import annotations

from dataplane.lora.copies import Copies
from tests.dataplane.lora.loading import load, make, places, stage


def test_of_waiting_loads_that_are_alike_room_is_sought_for_one(monkeypatch):
    residency = make(max_slots=1)
    load(residency, "held")
    for i in range(20):
        stage(residency, f"x{i}")
        residency.acquire(f"x{i}", "x")
    stage(residency, "small", units=1)
    stage(residency, "large", units=2)
    for version, tenant in (("small", "y"), ("large", "x")):
        residency.acquire(version, tenant)
    sought = []
    take = Copies.take

    def noted(self, entry, tenant, **options):
        sought.append(entry.version)
        return take(self, entry, tenant, **options)

    monkeypatch.setattr(Copies, "take", noted)
    assert residency.next_load() is None
    assert sorted(sought) == ["large", "small", "x0"], "tenants and sizes differ"


def test_a_large_version_is_not_starved_by_small_ones():
    residency = make(max_slots=9, num_units=4, max_passed_over=3)
    held = load(residency, "held")
    stage(residency, "large", units=4)
    residency.acquire("large")
    overtook = 0
    for number in range(10):
        stage(residency, f"small{number}")
        residency.acquire(f"small{number}")
        plan = residency.next_load()
        if plan is None:
            break
        residency.commit(plan)
        residency.release(residency.acquire(plan.version))
        overtook += 1
    assert overtook == 3
    residency.release(held)
    assert residency.next_load().version == "large"


def test_a_reserved_version_has_the_next_room_whatever_the_quantum():
    residency = make(max_slots=1)
    for version in "abc":
        stage(residency, version)
        residency.acquire(version)
    residency.commit(residency.next_load())
    assert residency.next_load() is None
    residency.reserve("c")
    assert residency.next_load().version == "c"


def test_reserved_bytes_are_kept_for_a_large_version_until_they_are_enough():
    residency = make(max_slots=9, num_units=4)
    leases = [load(residency, f"held{number}") for number in range(4)]
    stage(residency, "large", units=3)
    residency.acquire("large")
    stage(residency, "small")
    residency.acquire("small")
    residency.reserve("large")
    for lease in leases[:2]:
        residency.release(lease)
        assert residency.next_load() is None, "the small one would fit"
    residency.release(leases[2])
    assert residency.next_load().version == "large"


def test_the_tenant_that_holds_least_for_its_weight_is_loaded_first():
    residency = make(max_slots=9, num_units=9)
    for number in range(4):
        stage(residency, f"x{number}")
        residency.acquire(f"x{number}", "x", weight=2)
    stage(residency, "y0")
    residency.acquire("y0", "y")
    order = []
    while (plan := residency.next_load()) is not None:
        order.append(plan.version)
        residency.commit(plan)
    assert order == ["x0", "y0", "x1", "x2", "x3"]


def test_a_reserved_load_of_a_tenant_above_its_share_stays_for_its_first_lease():
    residency = make(max_slots=3, num_units=3)
    stage(residency, "large", 3)
    stage(residency, "small", 2)
    residency.acquire("large", "x")
    residency.reserve("large")
    residency.commit(residency.next_load())
    residency.acquire("other", "x")
    residency.acquire("small", "y")
    assert residency.next_load() is None, "it was not used yet, and would be due again"
    lease = residency.acquire("large", "x")
    assert residency.next_load() is None
    residency.release(lease)
    assert residency.next_load().version == "small"


def test_a_failed_load_frees_its_room_and_is_retried_last_or_forgotten():
    residency = make(max_slots=1)
    for version in "ab":
        stage(residency, version)
        residency.acquire(version)
    residency.fail(residency.next_load(), retry=True)
    assert residency.units_used == 0
    assert residency.wanted() == ("b", "a")
    residency.fail(residency.next_load(), retry=False)
    assert residency.wanted() == ("a",)
    assert places(residency) == {"a": "host"}
    assert residency.next_load().version == "a"
    assert residency.counters.failures == 2
