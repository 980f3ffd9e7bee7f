"""Versions that are kept on the device: for a time, within a budget, on their owner's account."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from dataplane.blob_grants import Grant
from dataplane.claims import Claim
from dataplane.pins import PinLimits, Pins
from veneer.errors import NotFoundError, ResourceExhaustedError, UnavailableError

LIMITS = PinLimits(max_bytes=100, max_bytes_per_tenant=60, max_pins=3, load_timeout_s=60.0)
OPERATOR = bytes(32)
SIZES = {"a": 40, "b": 40, "c": 20, "d": 10, "e": 1}
OWNERS = {"a": "x", "b": "x", "c": "x", "d": "y", "e": "y"}


@dataclass
class World:
    """What the pins use: an engine that notes, images of known sizes, all of them there unless `is_away`."""

    kept: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    is_away: bool = False

    def pin(self, version: str, owner: str, /) -> None:
        self.kept[version] = owner

    def unpin(self, version: str, /) -> None:
        del self.kept[version]

    def ensure(self, version: str, tenant: str = "", *, max_bytes: int = 0) -> Claim:
        assert (tenant, max_bytes) == (OWNERS[version], 0)
        self.held.append(version)
        claim = Claim(lambda *_: self.held.remove(version), tenant=tenant)
        if not self.is_away:
            claim.loaded.set_result(None)
        return claim

    async def grant_blobs(self, version: str, *, operator_key_digest: bytes = b"") -> Grant:
        assert operator_key_digest == OPERATOR
        if version not in OWNERS:
            raise NotFoundError("no such version")
        return Grant(token="t", blobs=(), base_digest="base", owner=OWNERS[version])

    def size_of(self, version: str) -> int:
        return SIZES[version]


def make(world: World, limits: PinLimits = LIMITS) -> Pins:
    return Pins(world, loader=world, source=world, cache=world, limits=limits)  # type: ignore[arg-type]


async def test_a_pin_keeps_copy_and_image_until_it_is_ended() -> None:
    world = World()
    pins = make(world)
    made = await pins.pin("a", lifetime_s=60, operator_key_digest=OPERATOR)
    assert (made.owner, made.size_bytes) == ("x", 40)
    assert (world.kept, world.held, pins.all()) == ({"a": "x"}, ["a"], [made])
    assert pins.unpin("a") == made
    assert (world.kept, world.held, pins.all()) == ({}, [], [])
    assert pins.unpin("a") is None


async def test_a_pin_ends_by_itself_and_a_second_one_moves_its_end() -> None:
    world = World()
    pins = make(world)
    first = await pins.pin("a", lifetime_s=60, operator_key_digest=OPERATOR)
    later = await pins.pin("a", lifetime_s=600, operator_key_digest=OPERATOR)
    assert later.end_unix_s > first.end_unix_s
    assert world.held == ["a"], "one claim"
    await pins.pin("a", lifetime_s=0.01, operator_key_digest=OPERATOR)
    async with asyncio.timeout(60):
        while pins.all():  # noqa: ASYNC110  the end is a timer of the loop
            await asyncio.sleep(0.001)
    assert (world.kept, world.held) == ({}, [])


@pytest.mark.parametrize(
    ("before", "version", "says"),
    [
        (["a"], "b", "takes 40 bytes; its owner's pins take 40 of 60"),
        (["a", "c", "d"], "e", "3 versions are pinned, at most 3 may be"),
    ],
)
async def test_beyond_a_budget_a_pin_is_refused_and_leaves_nothing(before: list[str], version: str, says: str) -> None:
    world = World()
    pins = make(world)
    for one in before:
        await pins.pin(one, lifetime_s=60, operator_key_digest=OPERATOR)
    with pytest.raises(ResourceExhaustedError, match=says):
        await pins.pin(version, lifetime_s=60, operator_key_digest=OPERATOR)
    assert sorted(world.held) == sorted(world.kept) == before
    await pins.pin(before[0], lifetime_s=60, operator_key_digest=OPERATOR)  # what is pinned already takes nothing more


async def test_all_pins_together_have_a_budget() -> None:
    world = World()
    pins = make(world, PinLimits(max_bytes=45, max_bytes_per_tenant=60, max_pins=3))
    await pins.pin("a", lifetime_s=60, operator_key_digest=OPERATOR)
    with pytest.raises(ResourceExhaustedError, match="takes 10 bytes; all pins take 40 of 45"):
        await pins.pin("d", lifetime_s=60, operator_key_digest=OPERATOR)


async def test_a_version_that_cannot_be_had_is_not_pinned() -> None:
    world = World()
    pins = make(world, PinLimits(max_bytes=100, max_bytes_per_tenant=60, max_pins=3, load_timeout_s=0.01))
    with pytest.raises(NotFoundError):
        await pins.pin("unknown", lifetime_s=60, operator_key_digest=OPERATOR)
    world.is_away = True
    with pytest.raises(UnavailableError, match="not loaded yet"):
        await pins.pin("a", lifetime_s=60, operator_key_digest=OPERATOR)
    assert (world.kept, world.held, pins.all()) == ({}, [], [])


async def test_two_pins_at_once_do_not_pass_a_budget_together() -> None:
    world = World()
    pins = make(world)
    done = await asyncio.gather(
        *(pins.pin(one, lifetime_s=60, operator_key_digest=OPERATOR) for one in ("a", "b")), return_exceptions=True
    )
    assert [type(one) for one in done].count(ResourceExhaustedError) == 1
    assert len(pins.all()) == 1
    pins.close()
    assert (world.kept, world.held) == ({}, [])
