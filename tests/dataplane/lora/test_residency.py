"""States, leases and evictions of versions."""

from __future__ import annotations

import threading

import pytest

from dataplane.lora.copies import DoesNotFitError
from dataplane.lora.eviction import Recency
from tests.dataplane.lora.loading import load, make, next_victims, places, stage


def test_a_miss_is_remembered_until_the_version_is_on_the_device():
    residency = make()
    assert residency.acquire("a") is None
    assert residency.acquire("a") is None
    assert residency.wanted() == residency.missing() == ("a",)
    assert residency.next_load() is None
    stage(residency, "a")
    assert residency.missing() == ()
    plan = residency.next_load()
    assert places(residency) == {"a": "loading"}
    assert residency.next_load() is None
    assert residency.acquire("a") is None
    assert residency.commit(plan) == 1
    assert residency.wanted() == ()
    lease = residency.acquire("a")
    assert (lease.slot, lease.rank, lease.epoch) == (plan.slot, 8, 1)
    assert residency.counters.misses == 1


def test_by_recency_the_least_recently_used_unleased_version_makes_room():
    residency = make(max_slots=3, policy=Recency())
    leases = {version: load(residency, version) for version in "abc"}
    for version in "bca":
        residency.release(leases[version])
    held = residency.acquire("b")
    stage(residency, "d")
    residency.acquire("d")
    plan = residency.next_load()
    assert [evicted.version for evicted in plan.evicted] == ["c"]
    assert plan.slot == leases["c"].slot
    assert places(residency) == {"a": "device", "b": "device", "c": "host", "d": "loading"}
    residency.release(held)


def test_the_version_used_least_makes_room_and_is_known_when_it_comes_back():
    residency = make(max_slots=2)
    for version in "aab":
        lease = load(residency, version) if version not in places(residency) else residency.acquire(version)
        residency.release(lease)
    assert next_victims(residency, "c") == ["b"]
    residency.release(residency.acquire("c"))
    assert next_victims(residency, "b") == ["c"], "used once, as b was, but b is used again"
    for _ in range(2):
        residency.release(residency.acquire("b"))
    assert next_victims(residency, "c") == ["a"]


def test_of_two_used_alike_the_one_that_takes_more_room_goes_first():
    residency = make(max_slots=8, num_units=4)
    for version, units in (("small", 1), ("large", 2)):
        residency.release(load(residency, version, units))
    assert next_victims(residency, "new", 2) == ["large"]


def test_a_version_without_a_host_image_stays_longer():
    residency = make(max_slots=2)
    for version in "ab":
        residency.release(load(residency, version))
    residency.unstage("a")
    assert next_victims(residency, "c") == ["b"]
    stage(residency, "a")
    residency.release(residency.acquire("c"))
    assert next_victims(residency, "d") == ["a"]


def test_what_requests_wait_for_goes_after_what_nobody_waits_for():
    residency = make(max_slots=2, quantum_tokens=0)
    for version in "aab":
        lease = load(residency, version) if version not in places(residency) else residency.acquire(version)
        residency.release(lease)
    residency.want("b")
    assert next_victims(residency, "c") == ["a"]


def test_a_leased_version_is_never_evicted():
    residency = make(max_slots=1)
    lease = load(residency, "a")
    stage(residency, "b")
    assert residency.acquire("b") is None
    assert residency.next_load() is None
    residency.release(lease)
    assert residency.next_load().version == "b"


def test_a_version_loaded_for_a_waiting_request_is_not_evicted_before_it_is_used():
    residency = make(max_slots=1)
    for version in "ab":
        stage(residency, version)
        residency.acquire(version)
    residency.commit(residency.next_load())
    assert residency.next_load() is None
    residency.release(residency.acquire("a"))
    assert residency.next_load() is None, "another request waits for it"
    residency.withdraw("a")
    assert residency.next_load().version == "b"


def test_a_request_that_gave_up_keeps_nothing():
    residency = make(max_slots=1)
    for version in "abc":
        stage(residency, version)
        residency.acquire(version)
    residency.commit(residency.next_load())
    residency.withdraw("a")
    residency.withdraw("b")
    assert residency.wanted() == ("c",)
    assert residency.next_load().version == "c"


def test_nothing_is_evicted_for_a_load_that_does_not_fit_anyway():
    residency = make(max_slots=3, num_units=4)
    lease = load(residency, "a", units=2)
    residency.release(load(residency, "b"))
    stage(residency, "c", units=3)
    residency.acquire("c")
    assert residency.next_load() is None
    assert places(residency)["b"] == "device"
    assert residency.units_used == 3
    residency.release(lease)
    assert residency.next_load().version == "c"


def test_a_loaded_version_serves_its_quantum_before_others_take_its_place():
    residency = make(max_slots=1, quantum_tokens=10)
    for version in "ab":
        stage(residency, version)
        residency.acquire(version)
    residency.commit(residency.next_load())
    for served in (4, 5):
        residency.release(residency.acquire("a"), served=served)
        assert residency.next_load() is None, "others wait for it and it has served 9 of 10"
    residency.release(residency.acquire("a"), served=1)
    assert residency.next_load().version == "b"


def test_what_nobody_waits_for_has_no_quantum_until_somebody_does_again():
    residency = make(max_slots=1, quantum_tokens=10)
    residency.release(load(residency, "a"), served=1)
    stage(residency, "b")
    residency.acquire("b")
    assert residency.want("a")
    assert residency.next_load() is None
    residency.withdraw("a")
    assert residency.next_load().version == "b"


def test_two_versions_that_share_a_slot_are_loaded_once_a_quantum_and_not_once_a_request():
    residency = make(max_slots=1, quantum_tokens=100)
    waiting = dict.fromkeys("ab", 40)
    for version in waiting:
        stage(residency, version)
    while any(waiting.values()):
        here = [version for version in waiting if waiting[version] and residency.want(version)]
        if (plan := residency.next_load()) is not None:
            residency.commit(plan)
            here = [plan.version]
        version = here[0]
        lease = residency.acquire(version)
        waiting[version] -= 1
        if not waiting[version]:
            residency.withdraw(version)
        residency.release(lease, served=10)
    assert residency.counters.loads == 2 * 40 * 10 / 100


def test_a_tenant_above_its_share_makes_room_first_and_others_keep_their_older_copies():
    residency = make(max_slots=9, num_units=4)
    keeps = load(residency, "mine", tenant="y")
    residency.release(load(residency, "mine too", tenant="y"))
    for number in range(3):
        lease = load(residency, f"flood{number}", tenant="x")
        residency.release(lease)
    assert places(residency)["mine too"] == "device", "though it was used before all of the flood"
    assert places(residency)["flood2"] == "device"
    residency.release(keeps)


def test_a_tenant_below_its_share_ends_the_quantum_of_one_above():
    residency = make(max_slots=9, num_units=4)
    held = load(residency, "own", tenant="x")
    for number in range(3):
        stage(residency, f"x{number}")
        residency.want(f"x{number}", "x")
        residency.commit(residency.next_load())
    stage(residency, "more")
    residency.want("more", "x")
    assert residency.next_load() is None, "of one tenant none has served its quantum"
    stage(residency, "y")
    residency.want("y", "y")
    plan = residency.next_load()
    assert (plan.version, [evicted.version for evicted in plan.evicted]) == ("y", ["x0"])
    residency.release(held)


def test_a_copy_is_paid_by_who_used_it_last():
    residency = make(max_slots=2, num_units=4)
    first = load(residency, "a", units=3, tenant="x")
    assert residency.excess_of("x") == 3 - 4
    second = residency.acquire("a", "y")
    assert (residency.excess_of("x"), residency.excess_of("y")) == (-2, 1)
    for lease in (first, second):
        residency.release(lease)
    assert residency.excess_of("y") == 0, "who asks for nothing has no share to be above"


def test_a_dropped_version_serves_its_leases_and_then_goes():
    residency = make()
    first = load(residency, "a")
    assert not residency.unstage("a", drop_device=True)
    assert residency.acquire("a") is None
    assert residency.missing() == ("a",)
    assert residency.release(first)
    assert residency.holdings() == ()
    assert residency.units_used == 0


def test_a_version_dropped_while_it_loads_goes_at_once():
    residency = make()
    stage(residency, "a")
    residency.acquire("a")
    plan = residency.next_load()
    residency.unstage("a", drop_device=True)
    assert residency.commit(plan) is None
    assert residency.holdings() == ()
    assert residency.units_used == 0


def test_without_a_host_copy_the_device_copy_serves_until_it_is_evicted():
    residency = make(max_slots=1)
    residency.release(load(residency, "a"))
    residency.unstage("a")
    residency.release(residency.acquire("a"))
    residency.release(load(residency, "b"))
    assert places(residency) == {"b": "device"}
    assert residency.acquire("a") is None
    assert residency.missing() == ("a",)


def test_a_version_staged_again_is_no_longer_dropped():
    residency = make()
    lease = load(residency, "a")
    residency.unstage("a", drop_device=True)
    stage(residency, "a")
    assert not residency.release(lease)
    assert residency.acquire("a") is not None


def test_an_image_larger_than_the_arena_is_refused():
    with pytest.raises(DoesNotFitError, match="5 units"):
        stage(make(num_units=4), "a", units=5)


def test_a_lease_cannot_be_released_twice():
    residency = make()
    lease = load(residency, "a")
    residency.release(lease)
    with pytest.raises(AssertionError):
        residency.release(lease)


def test_threads_that_acquire_load_and_release_leave_the_books_in_order():
    residency = make(max_slots=2, num_units=3)
    versions = [f"v{number}" for number in range(5)]
    for number, version in enumerate(versions):
        stage(residency, version, units=1 + number % 2)
    stop = threading.Event()
    failures: list[BaseException] = []

    def loader():
        while not stop.is_set():
            plan = residency.next_load()
            if plan is not None:
                residency.commit(plan)

    def user(offset):
        try:
            taken = 0
            while taken < 50:
                version = versions[(taken + offset) % 5]
                lease = residency.acquire(version)
                if lease is not None:
                    assert lease.version == version
                    residency.release(lease, served=256)
                    taken += 1
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=user, args=(offset,)) for offset in range(3)]
    background = threading.Thread(target=loader)
    for thread in [background, *threads]:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    stop.set()
    background.join(timeout=60)
    assert not failures
    assert not any(thread.is_alive() for thread in [background, *threads])
    assert residency.units_used <= 3
    assert all(holding.leases == 0 for holding in residency.holdings())
