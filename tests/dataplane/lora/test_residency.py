from __future__ import annotations

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from dataplane.lora.eviction import Recency
from dataplane.lora.residency import DoesNotFitError, Residency

UNIT = 1024


def make(max_slots=2, num_units=4, **settings):
    return Residency(max_slots, num_units=num_units, unit_bytes=UNIT, **settings)


def stage(residency, version, units=1):
    residency.stage(version, rank=8, blocks=[UNIT] * units)


def load(residency, version, units=1, tenant=""):
    """Brings a version to the device, as a request that waits for it does, and returns the lease."""
    stage(residency, version, units)
    assert residency.acquire(version, tenant) is None
    plan = residency.next_load()
    assert plan is not None
    assert plan.version == version
    residency.commit(plan)
    lease = residency.acquire(version, tenant)
    assert lease is not None
    residency.withdraw(version)
    return lease


def places(residency):
    return {holding.version: holding.place for holding in residency.holdings()}


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


def next_victims(residency, version, units=1):
    """Loads a version and returns what made room for it."""
    stage(residency, version, units)
    assert residency.acquire(version) is None
    plan = residency.next_load()
    residency.commit(plan)
    residency.withdraw(version)
    return [evicted.version for evicted in plan.evicted]


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
    plan = Residency._plan
    monkeypatch.setattr(Residency, "_plan", lambda self, entry, want: sought.append(entry.version) or plan(self, entry, want))
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


def test_a_copy_is_paid_by_who_used_it_last():
    residency = make(max_slots=2, num_units=4)
    first = load(residency, "a", units=3, tenant="x")
    assert residency.excess_of("x") == 3 - 4
    second = residency.acquire("a", "y")
    assert (residency.excess_of("x"), residency.excess_of("y")) == (-2, 1)
    for lease in (first, second):
        residency.release(lease)
    assert residency.excess_of("y") == 0, "who asks for nothing has no share to be above"


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


VERSIONS = st.sampled_from([f"v{number}" for number in range(6)])


class AgainstAModel(RuleBasedStateMachine):
    """Leased versions stay, units are conserved, no slot or unit is shared, no epoch comes twice."""

    leases = Bundle("leases")
    plans = Bundle("plans")

    def __init__(self):
        super().__init__()
        self.residency = make(max_slots=3, num_units=6)
        self.size = {f"v{number}": 1 + number % 4 for number in range(6)}
        self.held: dict[int, object] = {}
        self.device: dict[str, object] = {}
        self.loading: dict[str, object] = {}
        self.staged: set[str] = set()
        self.wants: set[str] = set()
        self.epochs: list[int] = []

    @rule(version=VERSIONS)
    def stage(self, version):
        stage(self.residency, version, self.size[version])
        self.staged.add(version)

    @rule(version=VERSIONS, drop=st.booleans())
    def unstage(self, version, drop):
        if self.residency.unstage(version, drop_device=drop):
            assert not self.leased(version)
            del self.device[version]
        self.staged.discard(version)

    @rule(target=leases, version=VERSIONS, tenant=st.sampled_from("xy"))
    def acquire(self, version, tenant):
        lease = self.residency.acquire(version, tenant, weight=1 + (tenant == "y"))
        if lease is None:
            self.wants.add(version)
            return multiple()
        plan, epoch = self.device[version]
        assert (lease.slot, lease.epoch, lease.version) == (plan.slot, epoch, version)
        self.held[lease.lease_id] = lease
        return lease

    @rule(version=VERSIONS)
    def reserve(self, version):
        self.residency.reserve(version)

    @rule(lease=consumes(leases), served=st.sampled_from([0, 300]))
    def release(self, lease, served):
        del self.held[lease.lease_id]
        if self.residency.release(lease, served=served):
            assert not self.leased(lease.version)
            del self.device[lease.version]

    @rule(version=VERSIONS)
    def withdraw(self, version):
        self.residency.withdraw(version)
        self.wants.discard(version)

    @rule(target=plans)
    def next_load(self):
        plan = self.residency.next_load()
        if plan is None:
            return multiple()
        assert plan.version in self.wants & self.staged
        assert plan.version not in self.device
        for evicted in plan.evicted:
            assert not self.leased(evicted.version)
            assert self.device.pop(evicted.version)[0].slot == evicted.slot
        self.loading[plan.version] = plan
        return plan

    @rule(plan=consumes(plans))
    def commit(self, plan):
        del self.loading[plan.version]
        self.wants.discard(plan.version)
        epoch = self.residency.commit(plan)
        if epoch is not None:
            assert epoch not in self.epochs
            self.epochs.append(epoch)
            self.device[plan.version] = (plan, epoch)

    @rule(plan=consumes(plans), retry=st.booleans())
    def fail(self, plan, retry):
        del self.loading[plan.version]
        self.residency.fail(plan, retry=retry)
        if not retry:
            self.staged.discard(plan.version)
            self.wants.discard(plan.version)

    @precondition(lambda self: not self.held and not self.loading)
    @rule(version=VERSIONS)
    def an_idle_device_takes_any_version(self, version):
        for other in self.size:
            self.residency.withdraw(other)
            self.wants.discard(other)
        if version in self.device:
            return
        self.stage(version)
        assert self.residency.acquire(version) is None
        self.wants.add(version)
        self.commit(self.next_load_of(version))

    def next_load_of(self, version):
        plan = self.residency.next_load()
        assert plan is not None
        assert plan.version == version
        for evicted in plan.evicted:
            del self.device[evicted.version]
        self.loading[version] = plan
        return plan

    def leased(self, version):
        return any(lease.version == version for lease in self.held.values())

    @invariant()
    def leased_versions_are_on_the_device(self):
        for lease in self.held.values():
            plan, epoch = self.device[lease.version]
            assert (plan.slot, epoch) == (lease.slot, lease.epoch)

    @invariant()
    def slots_and_units_are_conserved_and_never_shared(self):
        plans = [plan for plan, _ in self.device.values()] + list(self.loading.values())
        slots = [plan.slot for plan in plans]
        assert len(slots) == len(set(slots))
        units = [
            unit
            for plan in plans
            for extent in plan.extents
            for unit in range(extent.first_unit, extent.first_unit + extent.num_units)
        ]
        assert len(units) == len(set(units)) == self.residency.units_used
        shares = self.residency._shares
        sizes = [max(3 * sum(extent.num_units for extent in plan.extents), 6) for plan in plans]
        assert sum(shares._held.values()) == sum(sizes), "every copy is charged to somebody"
        assert sum(shares._claims.values()) == len(self.held) + len(self.wants)
        assert set(units) <= set(range(6))
        assert set(slots) <= set(range(3))

    @invariant()
    def holdings_and_wants_agree_with_the_model(self):
        expected = dict.fromkeys(self.staged, "host")
        expected |= dict.fromkeys(self.device, "device") | dict.fromkeys(self.loading, "loading")
        assert places(self.residency) == expected
        assert set(self.residency.wanted()) == self.wants
        leases = {holding.version: holding.leases for holding in self.residency.holdings()}
        assert sum(leases.values()) == len(self.held)


TestAgainstAModel = AgainstAModel.TestCase
