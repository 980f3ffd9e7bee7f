"""Hints are heard from a real server, and whatever else comes on the channel costs next to nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from dataplane.hints import Allowance, Hint, HintSubscriber, TenantAllowance, read_hint
from tests.dataplane.doubles import VERSION, until
from veneer.controlplane.v1 import hints_pb2
from veneer.local.valkey import Valkey

CHANNEL = "veneer:hints:v1"
GOOD = hints_pb2.Hint(kind=1, tenant="acme", adapter="bot", version=VERSION, generation=2**62).SerializeToString()


class Listener:
    """A subscriber, and what it heard."""

    def __init__(self, url: str, *, burst: int = 1000) -> None:
        self.hints: list[Hint] = []
        self.num_connects = 0
        self.changed = asyncio.Event()
        self.subscriber = HintSubscriber(
            url,
            on_hint=self.on_hint,
            on_connect=self.on_connect,
            allowance=TenantAllowance(per_s=0.001, burst=burst),
            heartbeat_s=0.2,
        )
        self.task = asyncio.create_task(self.subscriber.run())

    def on_hint(self, hint: Hint) -> None:
        self.hints.append(hint)
        self.changed.set()

    def on_connect(self) -> None:
        self.num_connects += 1
        self.changed.set()

    async def until(self, *, connects: int = 0, hints: int = 0) -> None:
        async with asyncio.timeout(60):
            while self.num_connects < connects or len(self.hints) < hints:
                await self.changed.wait()
                self.changed.clear()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def own_valkey(tmp_path: Path) -> AsyncIterator[Valkey]:
    """A server that the test may stop."""
    server = Valkey(tmp_path / "valkey")
    await asyncio.to_thread(server.start)
    yield server
    await asyncio.to_thread(server.stop)


async def publish(valkey: Valkey, *payloads: bytes) -> None:
    client = redis.asyncio.from_url(valkey.url())
    for payload in payloads:
        await client.publish(CHANNEL, payload)
    await client.aclose()


async def test_a_hint_is_heard(valkey: Valkey) -> None:
    listener = Listener(valkey.url())
    await listener.until(connects=1)
    assert listener.subscriber.connected
    await publish(valkey, GOOD)
    await listener.until(hints=1)
    assert listener.hints == [Hint(VERSION, "acme")]
    await listener.stop()


async def test_garbage_on_the_channel_is_ignored(valkey: Valkey) -> None:
    listener = Listener(valkey.url())
    await listener.until(connects=1)
    forged = hints_pb2.Hint(version="../../etc/passwd").SerializeToString()
    await publish(valkey, b"", b"\xff" * 40, forged, b"x" * 100_000, GOOD)
    await listener.until(hints=2)
    assert listener.hints == [Hint(""), Hint(VERSION, "acme")]  # an empty message is a hint that names nothing
    assert listener.subscriber.num_ignored == 3
    await listener.stop()


async def test_a_flood_is_cut_to_the_allowance(valkey: Valkey) -> None:
    listener = Listener(valkey.url(), burst=4)
    await listener.until(connects=1)
    await publish(valkey, *[GOOD] * 50)
    await until(lambda: listener.subscriber.num_ignored >= 47)
    assert len(listener.hints) == 3
    await listener.stop()


async def test_after_a_restart_of_the_server_it_listens_again_and_says_so(own_valkey: Valkey) -> None:
    listener = Listener(own_valkey.url())
    await listener.until(connects=1)
    await asyncio.to_thread(own_valkey.stop)
    await asyncio.to_thread(own_valkey.start)
    await listener.until(connects=2)
    await publish(own_valkey, GOOD)
    await listener.until(hints=1)
    await listener.stop()


async def test_a_subscriber_that_was_cut_off_for_its_slowness_listens_again_and_says_so(own_valkey: Valkey) -> None:
    listener = Listener(own_valkey.url())
    await listener.until(connects=1)
    async with redis.asyncio.from_url(own_valkey.url()) as client:
        await client.config_set("client-output-buffer-limit", "pubsub 65536 0 0")
        async with client.pipeline(transaction=True) as flood:  # all of it before any of it is sent on
            for _ in range(400):
                flood.publish(CHANNEL, b"x" * 50_000)
            await flood.execute()
    await listener.until(connects=2)
    await publish(own_valkey, GOOD)
    await listener.until(hints=1)
    await listener.stop()


async def test_a_silent_connection_is_probed_and_kept(valkey: Valkey) -> None:
    listener = Listener(valkey.url())
    await listener.until(connects=1)
    await asyncio.wait({listener.task}, timeout=1.0)  # five heartbeats
    assert listener.num_connects == 1
    assert listener.subscriber.connected
    await listener.stop()


async def test_a_connection_that_cannot_be_closed_does_not_keep_the_subscriber_alive(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(valkey.url())
    await listener.until(connects=1)

    async def fail(*_: object, **__: object) -> None:
        raise redis.exceptions.TimeoutError("cannot close")

    with monkeypatch.context() as patch:
        patch.setattr(redis.asyncio.Redis, "aclose", fail)
        listener.task.cancel()
        done, _ = await asyncio.wait({listener.task}, timeout=5)
    assert done
    assert listener.task.cancelled()


@given(payload=st.one_of(st.binary(max_size=200), st.none(), st.text(), st.integers()))
def test_any_payload_is_a_hint_or_none(payload: object) -> None:
    hint = read_hint(payload)
    assert hint is None or hint.version == "" or len(hint.version) == 64


def test_the_allowance_fills_with_time_up_to_its_burst() -> None:
    now_s = 0.0
    allowance = Allowance(per_s=2, burst=3, clock=lambda: now_s)
    assert [allowance.take() for _ in range(4)] == [True, True, True, False]
    now_s = 0.5
    assert [allowance.take() for _ in range(2)] == [True, False]
    now_s = 1000
    assert [allowance.take() for _ in range(4)] == [True, True, True, False]


def test_a_flood_of_one_tenant_leaves_others_their_hints_and_a_tenant_alone_has_nearly_all() -> None:
    now_s = 0.0
    allowance = TenantAllowance(per_s=8, burst=64, clock=lambda: now_s)
    assert sum(allowance.take("flood") for _ in range(1000)) == 32 + 16
    assert [sum(allowance.take(tenant) for _ in range(1000)) for tenant in ("small", "late")] == [16, 0]
    taken = 0
    for _ in range(100):
        now_s += 1
        taken += sum(allowance.take("flood") for _ in range(1000))
        assert allowance.take("small")
    assert taken > 600


async def test_a_flood_of_ignored_hints_takes_a_bounded_part_of_the_loops_time(valkey: Valkey) -> None:
    listener = Listener(valkey.url(), burst=1)
    try:
        await listener.until(connects=1)
        publisher = redis.asyncio.from_url(valkey.url())
        async with publisher, publisher.pipeline(transaction=False) as pipeline:
            for place in range(5000):
                pipeline.publish(CHANNEL, hints_pb2.Hint(version=f"{place:064x}", generation=2**63).SerializeToString())
            await pipeline.execute()
        start_s, before = time.monotonic(), listener.subscriber.num_ignored
        await until(lambda: listener.subscriber.num_ignored >= before + 200)
        assert time.monotonic() - start_s >= 0.2  # a millisecond each at least, in which others have their turn
        assert len(listener.hints) == 1
    finally:
        await listener.stop()
