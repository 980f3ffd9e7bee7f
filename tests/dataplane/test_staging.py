"""Advice on what to hold: acted on at a bounded rate, forged or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio

from dataplane.hints import Allowance
from dataplane.staging import StagingReader, staging_key
from veneer.controlplane.v1 import hints_pb2
from veneer.local.valkey import Valkey

NODE = "11111111-1111-1111-1111-111111111111"
FIRST, SECOND, THIRD = (letter * 64 for letter in "abc")


class Rig:
    """A reader, what it did, and the server that it reads from."""

    def __init__(self, url: str, server: Any, *, burst: int = 64) -> None:
        self.server = server
        self.staged: list[str] = []
        self.released: list[str] = []
        self.used: set[str] = set()
        self.room = 100
        self.looked = asyncio.Event()

        async def identify() -> str:
            self.looked.set()
            return NODE

        def release(version: str) -> None:
            self.released.append(version)
            self.room += 1

        self.reader = StagingReader(
            url,
            identify=identify,
            stage=self.staged.append,
            release=release,
            is_in_use=lambda version: version in self.used,
            is_full=lambda: self.room <= 0,
            staged=Allowance(per_s=1e-9, burst=burst),
            released=Allowance(per_s=1e-9, burst=2),
            interval_s=0.01,
        )

    async def advise(self, *, stage: tuple[str, ...] = (), release: tuple[str, ...] = ()) -> None:
        hint = hints_pb2.StagingHint(stage=stage, release=release)
        await self.server.hset(staging_key(NODE), "hint", hint.SerializeToString())


@pytest.fixture
async def build(valkey: Valkey) -> AsyncIterator[Callable[..., Rig]]:
    server = redis.asyncio.from_url(valkey.url())
    await server.flushall()
    rigs: list[Rig] = []

    def build(**options: Any) -> Rig:
        rigs.append(Rig(valkey.url(), server, **options))
        return rigs[-1]

    yield build
    for rig in rigs:
        await rig.reader._redis.aclose()
    await server.flushall()
    await server.aclose()


async def test_what_should_be_there_is_brought_in_order_and_nothing_let_go_while_there_is_room(build: Callable[..., Rig]) -> None:
    rig = build()
    await rig.reader.look()
    assert rig.staged == []
    await rig.advise(stage=(SECOND, FIRST), release=(THIRD,))
    await rig.reader.look()
    assert (rig.staged, rig.released) == ([SECOND, FIRST], [])


async def test_without_room_others_have_what_is_let_go_first_and_no_more_than_needed(build: Callable[..., Rig]) -> None:
    rig = build()
    rig.room = 0
    await rig.advise(release=(THIRD,))
    await rig.reader.look()
    assert rig.released == [], "nothing wants its place"
    await rig.advise(stage=(FIRST,), release=(THIRD, SECOND))
    await rig.reader.look()
    assert (rig.staged, rig.released) == ([FIRST], [THIRD])


async def test_what_is_in_use_stays_and_costs_nothing_of_what_may_be_let_go(build: Callable[..., Rig]) -> None:
    rig = build()
    rig.room = 0
    in_use = tuple(f"{number:064x}" for number in range(10))
    rig.used.update(in_use)
    await rig.advise(stage=(FIRST,), release=(*in_use, THIRD))
    await rig.reader.look()
    assert (rig.staged, rig.released) == ([FIRST], [THIRD])


async def test_a_flood_costs_a_bounded_number_of_loads_and_unloads(build: Callable[..., Rig]) -> None:
    rig = build(burst=3)
    rig.room = -1000
    many = tuple(f"{number:064x}" for number in range(200))
    for _ in range(5):
        await rig.advise(stage=many, release=many)
        await rig.reader.look()
    assert (len(rig.staged), len(rig.released)) == (3, 2)


@pytest.mark.parametrize(
    "value", [b"\xff\xff\xff", b"x" * 70_000, hints_pb2.StagingHint(stage=["../x", "A" * 64]).SerializeToString()]
)
async def test_what_is_no_advice_does_nothing(build: Callable[..., Rig], value: bytes) -> None:
    rig = build()
    await rig.server.hset(staging_key(NODE), "hint", value)
    await rig.reader.look()
    assert rig.staged == []


async def test_it_goes_on_after_redis_was_away(build: Callable[..., Rig]) -> None:
    rig = build()
    failing = [redis.exceptions.ConnectionError()]
    look = rig.reader.look

    async def look_once_failing() -> None:
        if failing:
            raise failing.pop()
        await look()

    rig.reader.look = look_once_failing  # type: ignore[method-assign]
    await rig.advise(stage=(FIRST,))
    task = asyncio.create_task(rig.reader.run())
    async with asyncio.timeout(60):
        while not rig.staged:  # noqa: ASYNC110  the double only notes
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
