"""A residency against a model that is so simple that it must be right."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from tests.dataplane.lora.loading import UNIT, make, places, stage

VERSIONS = st.sampled_from([f"v{number}" for number in range(6)])
LIMITS = {"x": 3 * UNIT + 5, "y": 0, "z": 2 * UNIT}
"""Bytes that a tenant's copies may take; 0 is no limit."""


class AgainstAModel(RuleBasedStateMachine):
    """Leased and pinned versions stay, no slot or unit is lost or shared, no epoch comes twice, no limit is passed."""

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
        self.requested: set[str] = set()
        self.epochs: list[int] = []
        self.pinned: dict[str, str] = {}
        self.beyond: set[str] = set()

    @rule(version=VERSIONS)
    def stage(self, version):
        stage(self.residency, version, self.size[version])
        self.staged.add(version)
        if version in self.pinned and version not in self.device and version not in self.loading:
            self.wants.add(version)

    @rule(version=VERSIONS, drop=st.booleans())
    def unstage(self, version, drop):
        if drop:
            self.pinned.pop(version, None)
            self.wants &= self.requested | set(self.pinned)
        freed = self.residency.unstage(version, drop_device=drop)
        if freed is not None:
            assert not self.leased(version)
            plan, _ = self.device.pop(version)
            assert (freed.version, freed.slot) == (version, plan.slot)
            assert self.residency.arena_bytes(version) == 0
        self.staged.discard(version)

    @rule(target=leases, version=VERSIONS, tenant=st.sampled_from("xyz"))
    def acquire(self, version, tenant):
        budget = self.residency.budget(version, tenant, max_bytes=LIMITS[tenant])
        lease = self.residency.acquire(version, tenant, weight=1 + (tenant == "y"), max_bytes=LIMITS[tenant])
        for freed in self.residency.take_freed():
            assert not self.leased(freed.version)
            assert freed.version not in self.pinned
            assert self.device.pop(freed.version)[0].slot == freed.slot
        if lease is None:
            if not self.is_given(version):
                self.wants.add(version)
                self.requested.add(version)
            else:
                assert budget.is_spent
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
        self.requested.discard(version)
        if version not in self.pinned:
            self.wants.discard(version)

    @rule(version=VERSIONS, owner=st.sampled_from("xyz"))
    def pin(self, version, owner):
        self.residency.pin(version, owner)
        self.pinned[version] = owner
        self.beyond.add(owner)
        if not self.is_given(version):
            self.wants.add(version)

    @rule(version=VERSIONS)
    def unpin(self, version):
        self.residency.unpin(version)
        self.pinned.pop(version, None)
        self.wants &= self.requested | set(self.pinned)

    @rule(version=VERSIONS)
    def evict(self, version):
        is_idle = version in self.device and not self.leased(version) and version not in self.pinned
        assert (self.residency.evict(version) is not None) <= is_idle
        if is_idle:
            del self.device[version]

    @rule(target=plans)
    def next_load(self):
        plan = self.residency.next_load()
        if plan is None:
            return multiple()
        assert plan.version in self.wants & self.staged
        assert plan.version not in self.device
        for evicted in plan.evicted:
            assert not self.leased(evicted.version)
            assert evicted.version not in self.pinned
            assert self.device.pop(evicted.version)[0].slot == evicted.slot
        self.loading[plan.version] = plan
        return plan

    @rule(plan=consumes(plans))
    def commit(self, plan):
        del self.loading[plan.version]
        self.wants.discard(plan.version)
        self.requested.discard(plan.version)
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
            self.requested.discard(plan.version)

    @precondition(lambda self: not self.held and not self.loading)
    @rule(version=VERSIONS, tenant=st.sampled_from("xyz"))
    def an_idle_device_takes_any_version_within_the_limit(self, version, tenant):
        for other in self.size:
            self.unpin(other)
            self.withdraw(other)
        if version in self.device or (LIMITS[tenant] and self.size[version] * UNIT > LIMITS[tenant]):
            return
        self.stage(version)
        assert self.residency.acquire(version, tenant, max_bytes=LIMITS[tenant]) is None
        self.wants.add(version)
        self.requested.add(version)
        self.commit(self.next_load_of(version))

    def next_load_of(self, version):
        plan = self.residency.next_load()
        assert plan is not None
        assert plan.version == version
        for evicted in plan.evicted:
            del self.device[evicted.version]
        self.loading[version] = plan
        return plan

    def is_given(self, version):
        """Whether the device has a copy of which leases are given."""
        entry = self.residency._entries.get(version)
        return version in self.device and not entry.dropped and not entry.leaving

    def payer(self, version):
        return self.residency._entries[version].tenant

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
        for tenant, limit in LIMITS.items():
            mine = [version for version in (*self.device, *self.loading) if self.payer(version) == tenant]
            booked = sum(self.size[version] for version in mine)
            assert self.residency._charges.booked(tenant) == booked
            busy = [version for version in mine if version in self.loading or version in self.pinned or self.leased(version)]
            assert self.residency._charges.busy(tenant) == sum(self.size[version] for version in busy)
            if not limit or booked * UNIT <= limit:
                self.beyond.discard(tenant)
            assert not limit or booked * UNIT <= limit or tenant in self.beyond, "a pin alone may pass its owner's limit"
            self.beyond |= set(self.pinned.values())
        assert set(slots) <= set(range(3))

    @invariant()
    def holdings_and_wants_agree_with_the_model(self):
        expected = dict.fromkeys(self.staged, "host")
        expected |= dict.fromkeys(self.device, "device") | dict.fromkeys(self.loading, "loading")
        assert places(self.residency) == expected
        assert set(self.residency.wanted()) == self.wants
        assert self.wants <= self.requested | set(self.pinned), "a load is waited for by a request or a pin"
        leases = {holding.version: holding.leases for holding in self.residency.holdings()}
        assert sum(leases.values()) == len(self.held)


TestAgainstAModel = AgainstAModel.TestCase
