"""What a tenant's copies take that cannot make room, counted once between changes."""

from __future__ import annotations

from dataplane.lora.charges import Charges
from dataplane.lora.entries import Entry
from dataplane.lora.shares import Shares
from dataplane.lora.units import Extent


def test_what_is_busy_is_counted_again_only_after_something_of_the_tenant_changed() -> None:
    asked: list[str] = []
    idle = {"a"}

    def is_idle(copy: Entry) -> bool:
        asked.append(copy.version)
        return copy.version in idle

    charges = Charges(Shares(100, num_slots=10), is_idle=is_idle)
    copies = {name: Entry(name, needed=number, extents=(Extent(0, number, 0, 1),)) for number, name in enumerate("abcd", start=1)}
    for name, tenant in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y")):
        charges.book(copies[name], tenant)
    assert [charges.busy("x") for _ in range(16)] == [5] * 16
    assert asked == ["a", "b", "c"]
    assert (charges.busy("y"), charges.busy("z"), charges.booked("x")) == (4, 0, 6)
    asked.clear()
    idle.add("b")
    charges.touch(copies["b"])
    assert (charges.busy("x"), charges.busy("y"), asked) == (3, 4, ["a", "b", "c"])
    charges.rebook(copies["c"], "y")
    assert (charges.busy("x"), charges.busy("y"), charges.booked("x")) == (0, 7, 3)
    charges.unbook(copies["a"])
    charges.unbook(copies["b"])
    assert (charges.busy("x"), charges.booked("x")) == (0, 0)
    assert not set(charges._copies) - {"y"}
