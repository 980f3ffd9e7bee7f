"""Redis tells what a living node holds, and nothing of a dead one. On a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import redis.asyncio
import redis.exceptions
from prometheus_client import CollectorRegistry

from dataplane.engine.messages import Holding, Moved
from dataplane.metrics import Metrics
from dataplane.residency_feed import ResidencyFeed
from dataplane.residency_reports import ResidencyReporter, head_key, holdings_key
from tests.dataplane.doubles import OTHER, VERSION
from tests.dataplane.test_residency_feed import Files
from veneer.controlplane.v1 import reports_pb2
from veneer.errors import UnavailableError
from veneer.local.valkey import Valkey

Start = Callable[..., "Node"]
NODE = "6f1e0000-0000-4000-8000-000000000001"


class Node:
    """One start of a node that reports when the test says."""

    def __init__(self, url: str, *, start_ms: int, ttl_s: float = 60.0) -> None:
        self.files = Files()
        self.feed = ResidencyFeed(self.files, clock_ms=lambda: start_ms)
        self.registry = CollectorRegistry()
        self.reporter = ResidencyReporter(
            url,
            feed=self.feed,
            identify=self.identify,
            describe=lambda: reports_pb2.NodeReport(serving=True, running=3),
            metrics=Metrics(self.registry, base_name="tiny"),
            interval_s=0.02,
            ttl_s=ttl_s,
        )
        self.is_known = True

    async def identify(self) -> str:
        if not self.is_known:
            raise UnavailableError("away")
        return NODE

    def hold(self, *versions: str, leases: int = 0) -> None:
        self.feed.show([Holding(version, "device", 8, 100, leases, 5, uses=2) for version in versions])

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value("veneer_residency_reports_total", {"outcome": outcome}) or 0.0


class Redis:
    """What a reader of the server sees, read as docs/adr/0041 says."""

    def __init__(self, url: str) -> None:
        self.client = redis.asyncio.from_url(url)

    async def head(self) -> reports_pb2.NodeReport | None:
        epoch, sequence, report = await self.client.hmget(head_key(NODE), ["epoch", "sequence", "report"])
        if report is None:
            return None
        read = reports_pb2.NodeReport.FromString(report)
        assert (int(epoch), int(sequence)) == (read.epoch, read.sequence)
        return read

    async def holdings(self) -> dict[str, reports_pb2.NodeHolding] | None:
        head = await self.head()
        if head is None:
            return None
        raw = await self.client.hgetall(holdings_key(NODE, head.epoch))
        return {version.decode(): reports_pb2.NodeHolding.FromString(value) for version, value in raw.items()}

    async def keys(self) -> set[str]:
        return {key.decode() for key in await self.client.keys("*")}

    async def ttl_ms(self) -> list[int]:
        return [await self.client.pttl(key) for key in await self.keys()]


@pytest.fixture
async def server(valkey: Valkey) -> AsyncIterator[Redis]:
    made = Redis(valkey.url())
    await made.client.flushall()
    yield made
    await made.client.flushall()
    await made.client.aclose()


@pytest.fixture
async def start(valkey: Valkey) -> AsyncIterator[Start]:
    made: list[Node] = []

    def build(start_ms: int, *, ttl_s: float = 60.0) -> Node:
        made.append(Node(valkey.url(), start_ms=start_ms, ttl_s=ttl_s))
        return made[-1]

    yield build
    for node in made:
        await node.reporter.close()


async def test_a_report_says_load_and_holdings_and_later_ones_only_what_changed(start: Start, server: Redis) -> None:
    node = start(1000)
    node.files.known[OTHER] = 70
    node.hold(VERSION, leases=1)
    assert await node.reporter.report()
    head = await server.head()
    assert head is not None
    assert (head.node, head.epoch, head.serving, head.running) == (NODE, 1000, True, 3)
    holdings = await server.holdings()
    assert holdings == {
        VERSION: reports_pb2.NodeHolding(
            tier=reports_pb2.HOLDING_TIER_DEVICE, max_rank=8, size_bytes=100, leases=1, epoch=5, uses=2
        ),
        OTHER: reports_pb2.NodeHolding(tier=reports_pb2.HOLDING_TIER_DISK, size_bytes=70),
    }
    await server.client.hset(holdings_key(NODE, 1000), OTHER, b"untouched")
    node.feed.moved(Moved(VERSION, "host", reason="room"))
    assert await node.reporter.report()
    raw = await server.client.hgetall(holdings_key(NODE, 1000))
    assert raw[OTHER.encode()] == b"untouched", "what did not change is not written again"
    assert reports_pb2.NodeHolding.FromString(raw[VERSION.encode()]).tier == reports_pb2.HOLDING_TIER_HOST
    node.feed.unloaded(VERSION)
    await node.reporter.report()
    assert await server.client.hkeys(holdings_key(NODE, 1000)) == [OTHER.encode()]


async def test_every_key_ends_by_itself(start: Start, server: Redis) -> None:
    node = start(1000, ttl_s=15)
    node.hold(VERSION)
    await node.reporter.report()
    assert await server.keys() == {head_key(NODE), holdings_key(NODE, 1000)}
    assert all(0 < ttl <= 15_000 for ttl in await server.ttl_ms())
    short = start(1001, ttl_s=0.02)
    short.hold(VERSION)
    await short.reporter.report()
    async with asyncio.timeout(60):
        while await server.keys():  # noqa: ASYNC110  a reader can only look
            await asyncio.sleep(0.005)


async def test_a_start_after_a_crash_replaces_what_the_dead_one_told(start: Start, server: Redis) -> None:
    dead, living = start(1000), start(2000)
    dead.hold(VERSION, OTHER)
    await dead.reporter.report()
    living.hold(OTHER)
    assert await living.reporter.report()
    assert await server.keys() == {head_key(NODE), holdings_key(NODE, 2000)}
    assert set(await server.holdings() or {}) == {OTHER}


async def test_a_process_that_was_paused_and_replaced_writes_nothing_more(start: Start, server: Redis) -> None:
    paused, living = start(1000), start(2000)
    paused.hold(VERSION)
    await paused.reporter.report()
    await living.reporter.report()
    paused.hold(VERSION, OTHER)
    assert not await paused.reporter.report()
    assert paused.count("replaced") == 1
    await paused.reporter.close()
    assert await server.holdings() == {}
    head = await server.head()
    assert head is not None
    assert head.epoch == 2000


async def test_an_engine_that_ended_begins_a_new_epoch(start: Start, server: Redis) -> None:
    node = start(1000)
    node.hold(VERSION)
    node.files.known[VERSION] = 70
    await node.reporter.report()
    node.feed.engine_lost()
    await node.reporter.report()
    assert await server.keys() == {head_key(NODE), holdings_key(NODE, 1001)}
    holdings = await server.holdings()
    assert holdings is not None
    assert holdings[VERSION].tier == reports_pb2.HOLDING_TIER_DISK


@pytest.mark.parametrize("damage", ["wiped", "no head", "no holdings", "one lost", "forged", "another sequence"])
async def test_whatever_became_of_the_keys_the_next_report_makes_them_right(start: Start, server: Redis, damage: str) -> None:
    node = start(1000)
    node.hold(VERSION, OTHER)
    await node.reporter.report()
    match damage:
        case "wiped":
            await server.client.flushall()
        case "no head":
            await server.client.delete(head_key(NODE))
        case "no holdings":
            await server.client.delete(holdings_key(NODE, 1000))
        case "one lost":
            await server.client.hdel(holdings_key(NODE, 1000), OTHER)
        case "forged":
            await server.client.hset(holdings_key(NODE, 1000), "f" * 64, b"")
        case _:
            await server.client.hset(head_key(NODE), "sequence", "77")
    assert await node.reporter.report()
    assert set(await server.holdings() or {}) == {VERSION, OTHER}
    assert all(ttl > 0 for ttl in await server.ttl_ms())


async def test_a_stop_takes_the_keys_away(start: Start, server: Redis) -> None:
    node = start(1000)
    node.hold(VERSION)
    await node.reporter.report()
    await node.reporter.close()
    assert await server.keys() == set()


async def test_reports_go_on_after_redis_and_the_control_plane_were_away(tmp_path: Path) -> None:
    valkey = Valkey(tmp_path / "valkey")
    await asyncio.to_thread(valkey.start)
    node = Node(valkey.url(), start_ms=1000)
    node.is_known = False
    task = asyncio.create_task(node.reporter.run())
    server = Redis(valkey.url())
    try:
        async with asyncio.timeout(60):
            while not node.count("failed"):  # noqa: ASYNC110  nothing tells of a failure but its count
                await asyncio.sleep(0.01)
            node.is_known = True
            while not node.count("told"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.to_thread(valkey.stop)
            failed = node.count("failed")
            while node.count("failed") < failed + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            node.hold(VERSION)
            await asyncio.to_thread(valkey.start)
            told = node.count("told")
            while node.count("told") == told:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert set(await server.holdings() or {}) == {VERSION}
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await node.reporter.close()
        await server.client.aclose()
        await asyncio.to_thread(valkey.stop)
