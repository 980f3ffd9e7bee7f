"""Work on grammars: fair between tenants, and what a tenant does beyond its rate yields to the steps."""

from __future__ import annotations

import os
import queue
import threading
import time

import pytest

from dataplane.engine.grammar_work import GrammarWork


def burn(seconds: float) -> None:
    """Takes a core, as a thread's clock counts it."""
    started = time.thread_time()
    while time.thread_time() - started < seconds:
        pass


def ran(work: GrammarWork, tenant: str, seconds: float = 0.0) -> int:
    """Runs a job to its end; returns the niceness of its thread, less that of the process."""
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def job() -> None:
        burn(seconds)
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        done.put(own - os.getpriority(os.PRIO_PROCESS, os.getpid()))

    work.submit(tenant, job)
    return done.get(timeout=60)


def test_a_tenant_beyond_its_rate_goes_to_the_thread_that_yields_and_comes_back() -> None:
    now = 0.0
    work = GrammarWork(num_quick=2, clock=lambda: now)  # so a tenant has one at a time, and the one before is counted first
    assert ran(work, "heavy", 0.5) == 0
    assert ran(work, "heavy") > 0
    assert ran(work, "light") == 0
    now = 1000.0
    assert ran(work, "heavy") == 0
    work.stop()


def test_what_waits_for_the_thread_that_yields_goes_to_another_once_its_tenant_is_within_its_rate() -> None:
    now = 0.0
    work = GrammarWork(num_quick=2, clock=lambda: now)
    entered, gate, done = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        gate.wait(60)

    for tenant in ("hog", "busy"):
        ran(work, tenant, 0.3)
        ran(work, tenant)  # the one before is counted now
    work.submit("hog", block)
    assert entered.wait(60)
    work.submit("busy", done.set)
    assert work._lines["busy"].is_slow
    now = 1000.0
    assert done.wait(60), "nothing else comes that would wake a thread"
    gate.set()
    work.stop()


def test_seconds_are_charged_to_the_tenant_that_took_them() -> None:
    work = GrammarWork()
    ran(work, "a", 0.05)
    ran(work, "b", 0.01)
    work.stop()
    costs = work.take_costs()
    assert costs["a"] >= 0.05
    assert 0.01 <= costs["b"] < costs["a"]
    assert work.take_costs() == {}


@pytest.mark.parametrize("num_quick", [2, 4])
def test_one_tenant_never_has_all_quick_threads(num_quick: int) -> None:
    work = GrammarWork(num_quick=num_quick)
    gate = threading.Event()
    for _ in range(2 * num_quick):
        work.submit("greedy", lambda: bool(gate.wait(60)))  # type: ignore[arg-type, return-value]
    assert ran(work, "quiet") == 0
    gate.set()
    work.stop()


def test_the_tenant_with_the_least_recent_work_goes_first() -> None:
    work = GrammarWork(num_quick=2)
    gate, order = threading.Event(), queue.SimpleQueue[str]()
    ran(work, "busy", 0.1)
    for name in ("hold-1", "hold-2"):
        work.submit(name, lambda: bool(gate.wait(60)))  # type: ignore[arg-type, return-value]
    for number in range(3):
        work.submit("busy", lambda number=number: order.put(f"busy-{number}"))  # type: ignore[misc]
    work.submit("idle", lambda: order.put("idle"))
    gate.set()
    assert {order.get(timeout=60) for _ in range(2)} >= {"idle"}
    work.stop()


def test_what_waits_is_dropped_at_the_end() -> None:
    work = GrammarWork()
    work.stop()
    work.submit("t", lambda: pytest.fail("it runs after the end"))
