"""Reports of nodes, true and forged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from controlplane import fleet_reports
from controlplane.fleet_reports import FleetReports
from veneer.controlplane.v1 import reports_pb2
from veneer.local.valkey import Valkey

NODE = "11111111-1111-1111-1111-111111111111"
VERSION = "a" * 64


@pytest.fixture
async def redis(valkey: Valkey) -> AsyncIterator[Redis]:
    async with Redis.from_url(valkey.url()) as client:
        await client.flushall()
        yield client
        await client.flushall()


async def write(redis: Redis, node: str = NODE, *, sequence: int = 1, uses: int = 3, **fields: Any) -> None:
    known = {"epoch": 7, "serving": True, "max_running": 16, "slots": 40, "device_bytes_total": 1000, **fields}
    report = reports_pb2.NodeReport(node=node, sequence=sequence, **known)
    holding = reports_pb2.NodeHolding(tier=reports_pb2.HOLDING_TIER_DEVICE, max_rank=8, size_bytes=100, uses=uses)
    head = {"epoch": report.epoch, "sequence": sequence, "report": report.SerializeToString()}
    await redis.hset(f"veneer:node:v1:{{{node}}}", mapping=head)
    await redis.hset(f"veneer:holdings:v1:{{{node}}}:{report.epoch}", VERSION, holding.SerializeToString())


async def test_a_node_is_read_with_what_it_holds(redis: Redis) -> None:
    await write(redis, address="10.0.0.1:7700")
    states = await FleetReports(redis).read([NODE, "22222222-2222-2222-2222-222222222222"])
    assert set(states) == {NODE}
    state = states[NODE]
    assert (state.serving, state.address, state.slots, state.max_running) == (True, "10.0.0.1:7700", 40, 16)
    assert state.holdings[VERSION].uses == 3
    assert state.holdings[VERSION].on_device


async def test_holdings_are_read_again_when_the_sequence_has_moved(redis: Redis) -> None:
    reports = FleetReports(redis)
    await write(redis, uses=3)
    await reports.read([NODE])
    await write(redis, uses=9)
    assert (await reports.read([NODE]))[NODE].holdings[VERSION].uses == 3, "the sequence says that nothing changed"
    await write(redis, uses=9, sequence=2)
    assert (await reports.read([NODE]))[NODE].holdings[VERSION].uses == 9
    await redis.flushall()
    assert await reports.read([NODE]) == {}


@pytest.mark.parametrize(
    ("field", "value"), [("report", b"\xff\xff"), ("report", b"x" * 5000), ("epoch", b"8"), ("epoch", b"1" * 30), ("report", b"")]
)
async def test_a_head_that_is_none_is_no_report(redis: Redis, field: str, value: bytes) -> None:
    await write(redis)
    await redis.hset(f"veneer:node:v1:{{{NODE}}}", field, value)
    assert await FleetReports(redis).read([NODE]) == {}


async def test_a_node_that_reports_for_another_is_not_believed(redis: Redis) -> None:
    await write(redis, "22222222-2222-2222-2222-222222222222")
    await redis.rename("veneer:node:v1:{22222222-2222-2222-2222-222222222222}", f"veneer:node:v1:{{{NODE}}}")
    assert await FleetReports(redis).read([NODE]) == {}


async def test_holdings_above_a_bound_are_no_report(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    await write(redis)
    await redis.hset(f"veneer:holdings:v1:{{{NODE}}}:7", "b" * 64, b"x" * 200)
    assert await FleetReports(redis).read([NODE]) == {}
    await redis.hdel(f"veneer:holdings:v1:{{{NODE}}}:7", "b" * 64)
    assert set(await FleetReports(redis).read([NODE])) == {NODE}
    monkeypatch.setattr(fleet_reports, "MAX_HOLDINGS", 0)
    assert await FleetReports(redis).read([NODE]) == {}


async def test_figures_are_clipped(redis: Redis) -> None:
    await write(redis, max_running=0, slots=(1 << 32) - 1, device_bytes_total=(1 << 64) - 1)
    state = (await FleetReports(redis).read([NODE]))[NODE]
    assert (state.max_running, state.slots, state.device_bytes) == (1, 1 << 16, 1 << 46)
