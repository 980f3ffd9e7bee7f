"""What came free of a version is known when nothing is left of it."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from dataplane.engine.messages import Unloaded
from dataplane.metrics import Metrics
from dataplane.unloads import Unloads
from tests.dataplane.doubles import OTHER, VERSION


def make() -> tuple[Unloads, CollectorRegistry]:
    registry = CollectorRegistry()
    return Unloads(Metrics(registry, base_name="tiny")), registry


async def test_bytes_of_all_tiers_are_told_once_the_engine_has_let_go() -> None:
    unloads, registry = make()
    unloads.begin(VERSION, disk_bytes=40)
    waits = asyncio.create_task(unloads.wait(VERSION, timeout_s=60))
    assert not await unloads.wait(VERSION, timeout_s=0)
    assert unloads.num_pending == 1
    unloads.finish(Unloaded(OTHER, 7, 7, 7))
    unloads.finish(Unloaded(VERSION, 10, 20, 30))
    assert await waits
    unload = unloads.last(VERSION)
    assert unload is not None
    assert (unload.device_bytes, unload.host_bytes, unload.disk_bytes, unload.kv_bytes) == (10, 20, 40, 30)
    assert unloads.last(OTHER) is None, "nobody let it go"
    for level, num_bytes in (("device", 10), ("host", 20), ("disk", 40), ("kv", 30)):
        assert registry.get_sample_value("veneer_adapter_unloaded_bytes_total", {"level": level}) == num_bytes
    assert registry.get_sample_value("veneer_adapter_unloads_total") == 1
    assert await unloads.wait(VERSION, timeout_s=0)


async def test_what_goes_twice_at_once_is_one_unload() -> None:
    unloads, _ = make()
    unloads.begin(VERSION, disk_bytes=40)
    unloads.begin(VERSION, disk_bytes=2)
    unloads.finish(Unloaded(VERSION, 10, num_asked=2))
    unload = unloads.last(VERSION)
    assert unload is not None
    assert (unload.disk_bytes, unloads.num_pending) == (42, 0)


async def test_what_came_back_and_goes_again_is_gone_with_the_last_answer() -> None:
    unloads, registry = make()
    unloads.begin(VERSION, disk_bytes=40)
    unloads.begin(VERSION, disk_bytes=40)
    unloads.finish(Unloaded(VERSION, host_bytes=20, kv_bytes=30, came_back=True))
    assert not await unloads.wait(VERSION, timeout_s=0)
    assert (unloads.num_pending, unloads.last(VERSION)) == (1, None)
    unloads.finish(Unloaded(VERSION, 10, 20))
    unload = unloads.last(VERSION)
    assert unload is not None
    assert not unload.came_back
    assert (unload.device_bytes, unload.host_bytes, unload.disk_bytes, unload.kv_bytes) == (10, 40, 80, 30)
    assert await unloads.wait(VERSION, timeout_s=0)
    assert registry.get_sample_value("veneer_adapter_unloads_total") == 1
    unloads.begin(VERSION, disk_bytes=1)
    unloads.begin(VERSION, disk_bytes=1)
    unloads.engine_lost()
    assert unloads.num_pending == 0


async def test_an_engine_that_ended_holds_nothing_any_more() -> None:
    unloads, _ = make()
    unloads.begin(VERSION, disk_bytes=40)
    unloads.engine_lost()
    unload = unloads.last(VERSION)
    assert unload is not None
    assert (unload.device_bytes, unload.disk_bytes) == (0, 40)


async def test_the_last_thousand_are_remembered() -> None:
    unloads, _ = make()
    for number in range(1001):
        unloads.begin(f"v{number}", disk_bytes=1)
        unloads.finish(Unloaded(f"v{number}"))
    assert unloads.last("v0") is None
    assert unloads.last("v1") is not None
