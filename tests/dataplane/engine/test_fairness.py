"""Order of waiting requests."""

from __future__ import annotations

from dataplane.engine.fairness import FairQueue
from dataplane.engine.messages import Sampling, Submit
from dataplane.engine.sequence import Sequence


def sequence(tenant: str, name: str, *, weight: int = 1, prompt: int = 10) -> Sequence:
    submit = Submit(request_id=name, tenant=tenant, prompt=(1,) * prompt, sampling=Sampling(max_tokens=1), weight=weight)
    return Sequence(submit, deadline=None, max_context=100)


def drain(queue: FairQueue, count: int) -> list[str]:
    names = []
    for _ in range(count):
        first = next(queue.in_order())
        queue.admit(first)
        names.append(first.submit.request_id)
    return names


def test_tenants_alternate_and_each_keeps_its_own_order() -> None:
    queue = FairQueue()
    for i in range(4):
        queue.push(sequence("x", f"x{i}"))
    queue.push(sequence("y", "y0"))
    queue.push(sequence("y", "y1"))
    assert [item.submit.request_id for item in queue.in_order()] == ["x0", "y0", "x1", "y1", "x2", "x3"]
    assert drain(queue, 6) == ["x0", "y0", "x1", "y1", "x2", "x3"]
    assert len(queue) == 0


def test_weight_multiplies_a_share() -> None:
    queue = FairQueue()
    for i in range(12):
        queue.push(sequence("heavy", f"h{i}", weight=3))
        queue.push(sequence("light", f"l{i}"))
    assert sum(name.startswith("h") for name in drain(queue, 12)) == 9


def test_a_pause_banks_no_credit() -> None:
    queue = FairQueue()
    queue.push(sequence("y", "early"))
    drain(queue, 1)
    for i in range(20):
        queue.push(sequence("x", f"x{i}"))
    drain(queue, 10)
    for i in range(10):
        queue.push(sequence("y", f"y{i}"))
    assert sum(name.startswith("y") for name in drain(queue, 10)) <= 6


def test_generated_tokens_are_charged() -> None:
    queue = FairQueue()
    first = sequence("x", "x0")
    queue.push(first)
    drain(queue, 1)
    queue.charge(first, 1000)
    queue.push(sequence("x", "x1"))
    queue.push(sequence("y", "y0"))
    queue.push(sequence("y", "y1"))
    assert drain(queue, 3) == ["y0", "y1", "x1"]


def test_idle_tenants_are_forgotten() -> None:
    queue = FairQueue()
    for i in range(3000):
        queue.push(sequence(f"t{i}", f"r{i}"))
        queue.admit(next(queue.in_order()))
    assert len(queue._tenants) < 2100
