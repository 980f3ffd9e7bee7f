"""A residency in small numbers, and loads that are carried out at once."""

from __future__ import annotations

from dataplane.lora.residency import Residency

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


def next_victims(residency, version, units=1):
    """Loads a version and returns what made room for it."""
    stage(residency, version, units)
    assert residency.acquire(version) is None
    plan = residency.next_load()
    residency.commit(plan)
    residency.withdraw(version)
    return [evicted.version for evicted in plan.evicted]
