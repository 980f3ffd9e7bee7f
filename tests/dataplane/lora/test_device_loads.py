"""A load is chosen, and ends once: visible, to be tried again, or forgotten."""

from __future__ import annotations

import pytest

from dataplane.lora.copies import Copies
from dataplane.lora.device_loads import DeviceLoads
from dataplane.lora.entries import Entry
from dataplane.lora.eviction import Recency
from dataplane.lora.shares import Shares
from dataplane.lora.wants import Wants


class Parts:
    """Loads over parts of their own: four units, two slots."""

    def __init__(self) -> None:
        shares = Shares(4, num_slots=2)
        self.wants = Wants(shares, max_passed_over=3)
        self.copies = Copies(shares, max_slots=2, num_units=4, unit_bytes=10, quantum_tokens=0, policy=Recency())
        self.loads = DeviceLoads(self.copies, self.wants, shares)

    def want(self, version: str, *, units: int = 1, tenant: str = "", max_units: int | None = None) -> None:
        self.wants.add(version, tenant, weight=1, max_units=max_units)
        self.copies.entries[version] = Entry(version, blocks=(10 * units,), needed=units, in_host=True)


def test_each_load_that_is_done_has_an_epoch_of_its_own() -> None:
    parts = Parts()
    for number, version in enumerate("ab", start=1):
        parts.want(version)
        plan = parts.loads.next()
        assert plan is not None
        assert plan.version == version
        assert parts.loads.next() is None, "it is on its way"
        assert parts.loads.commit(plan) == number
        assert version not in parts.wants
    assert (parts.loads.num_done, parts.loads.num_failed) == (2, 0)
    with pytest.raises(AssertionError):
        parts.loads.commit(plan)


@pytest.mark.parametrize("retry", [True, False])
def test_a_load_that_fails_gives_its_room_back_and_comes_last_or_not_again(*, retry: bool) -> None:
    parts = Parts()
    for version in "ab":
        parts.want(version)
    plan = parts.loads.next()
    assert plan is not None
    parts.loads.fail(plan, retry=retry)
    assert (parts.copies.units.used, parts.loads.num_failed) == (0, 1)
    assert list(parts.wants) == (["b", "a"] if retry else ["b"])
    assert ("a" in parts.copies.entries) is retry


def test_a_limit_of_the_tenant_holds_for_a_request_and_not_for_a_pin() -> None:
    parts = Parts()
    parts.want("a", units=2, tenant="small", max_units=1)
    assert parts.loads.limit_on("a") == 1
    assert parts.loads.next() is None
    parts.copies.pins["a"] = "small"
    assert parts.loads.limit_on("a") is None
    assert parts.loads.next() is not None


def test_what_is_wanted_and_has_no_image_is_missing_until_it_is_on_its_way() -> None:
    parts = Parts()
    parts.wants.add("a", "", weight=1)
    assert parts.loads.missing() == ("a",)
    parts.want("a")
    assert parts.loads.missing() == ()
    parts.copies.entries["a"].in_host = False
    assert parts.loads.missing() == ("a",)
