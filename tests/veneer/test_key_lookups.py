"""Look-ups of keys that were not seen before: bounded by peer and in all, and known keys pass."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

import pytest

from tests.veneer.plane import until
from veneer.access import current_peer, set_peer
from veneer.errors import ResourceExhaustedError, UnauthenticatedError, UnavailableError
from veneer.key_lookups import KeyLookups, LookupLimits

KNOWN = b"known"
LIMITS = LookupLimits(peer_per_s=0.001, peer_burst=3, per_s=0.001, burst=5, wait_s=0.01)


@dataclass
class Plane:
    """Keys that have a holder, and all look-ups."""

    limits: LookupLimits = LIMITS
    holders: set[bytes] = field(default_factory=lambda: {KNOWN})
    looked_up: list[bytes] = field(default_factory=list)
    now_s: float = 1000.0

    def __post_init__(self) -> None:
        self.lookups = KeyLookups(self.limits, clock=lambda: self.now_s)
        self.numbers = itertools.count()
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self, key: bytes, peer: str = "a") -> str:
        async def find() -> str:
            self.looked_up.append(key)
            await self.gate.wait()
            if key not in self.holders:
                raise UnauthenticatedError("no valid credential")
            return key.decode()

        return await self.lookups.look_up(key, find, peer=peer)

    async def refused(self, key: bytes | None = None, peer: str = "a") -> str:
        with pytest.raises((UnauthenticatedError, ResourceExhaustedError)) as caught:
            await self.ask(key or b"unknown-%d" % next(self.numbers), peer)
        return caught.value.status


@pytest.fixture
async def plane() -> Plane:
    return Plane()


async def test_a_peer_has_so_many_unknown_keys_refused_and_no_more_and_others_have_theirs(plane: Plane) -> None:
    assert [await plane.refused() for _ in range(3)] == ["UNAUTHENTICATED"] * 3
    assert [await plane.refused() for _ in range(3)] == ["RESOURCE_EXHAUSTED"] * 3
    assert len(plane.looked_up) == 3
    assert await plane.refused(peer="b") == "UNAUTHENTICATED"


async def test_all_peers_together_have_a_bound(plane: Plane) -> None:
    codes = [await plane.refused(peer=f"peer-{number}") for number in range(8)]
    assert codes == ["UNAUTHENTICATED"] * 5 + ["RESOURCE_EXHAUSTED"] * 3


async def test_a_known_key_passes_whatever_unknown_ones_did(plane: Plane) -> None:
    assert await plane.ask(KNOWN) == "known"
    for _ in range(10):
        await plane.refused()
    assert await plane.ask(KNOWN) == "known"
    assert plane.looked_up.count(KNOWN) == 2, "it is looked up each time"


async def test_keys_with_a_holder_cost_nothing_of_the_bound(plane: Plane) -> None:
    plane.holders = {b"key-%d" % number for number in range(50)}
    for key in sorted(plane.holders):
        await plane.ask(key)
    assert await plane.refused() == "UNAUTHENTICATED"


async def test_a_plane_that_is_away_costs_nothing_of_the_bound(plane: Plane) -> None:
    async def away() -> str:
        raise UnavailableError("away")

    for _ in range(20):
        with pytest.raises(UnavailableError):
            await plane.lookups.look_up(KNOWN, away, peer="a")
    assert await plane.ask(KNOWN) == "known"


async def test_the_bound_fills_again_with_time(plane: Plane) -> None:
    plane = Plane(LookupLimits(peer_per_s=1, peer_burst=2, wait_s=0.01))
    assert [await plane.refused() for _ in range(3)] == ["UNAUTHENTICATED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED"]
    plane.now_s += 1.0
    assert [await plane.refused() for _ in range(2)] == ["UNAUTHENTICATED", "RESOURCE_EXHAUSTED"]


async def test_a_refused_caller_is_told_when_to_come_back(plane: Plane) -> None:
    for _ in range(3):
        await plane.refused()
    with pytest.raises(ResourceExhaustedError) as caught:
        await plane.ask(b"another")
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1.0


async def test_a_key_that_was_refused_and_then_made_works_after_a_second_or_a_change(plane: Plane) -> None:
    plane = Plane(LookupLimits())
    assert [await plane.refused(b"new") for _ in range(5)] == ["UNAUTHENTICATED"] * 5
    assert plane.looked_up == [b"new"]
    plane.holders.add(b"new")
    plane.now_s += LookupLimits().refusal_s
    assert await plane.ask(b"new") == "new"
    await plane.refused(b"next")
    plane.holders.add(b"next")
    plane.lookups.forget_refusals()
    assert await plane.ask(b"next") == "next"


async def test_a_key_that_is_revoked_is_unknown_from_its_next_look_up_on(plane: Plane) -> None:
    await plane.ask(KNOWN)
    plane.holders.clear()
    assert await plane.refused(KNOWN) == "UNAUTHENTICATED"
    assert await plane.refused(KNOWN) == "UNAUTHENTICATED"
    assert plane.looked_up == [KNOWN, KNOWN], "the refusal is remembered"


async def test_thousands_of_calls_with_one_new_key_take_one_place(plane: Plane) -> None:
    plane = Plane(LookupLimits(max_running=1, max_waiting=1, max_waiting_of_peer=1, wait_s=60))
    plane.gate.clear()
    calls = [asyncio.create_task(plane.ask(KNOWN)) for _ in range(3000)]
    await asyncio.sleep(0)
    plane.gate.set()
    assert set(await asyncio.gather(*calls)) == {"known"}


async def test_a_caller_that_leaves_gives_its_place_to_the_next(plane: Plane) -> None:
    plane = Plane(LookupLimits(max_running=1, wait_s=60))
    plane.gate.clear()
    first, second, third = (asyncio.create_task(plane.ask(key)) for key in (b"1", b"2", KNOWN))
    await until(lambda: bool(plane.looked_up))
    second.cancel()
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    plane.gate.set()
    assert await third == "known"
    assert plane.looked_up == [b"1", KNOWN]


async def test_a_caller_that_leaves_in_the_moment_of_its_turn_harms_no_other(plane: Plane) -> None:
    plane = Plane(LookupLimits(max_running=1, wait_s=60), holders={b"1", b"2", KNOWN})
    plane.gate.clear()
    first, second, third = (asyncio.create_task(plane.ask(key)) for key in (b"1", b"2", KNOWN))
    await until(lambda: bool(plane.looked_up))
    plane.gate.set()
    second.cancel()
    assert [await first, await third] == ["1", "known"]
    assert plane.looked_up == [b"1", KNOWN]


async def test_peers_wait_by_turns(plane: Plane) -> None:
    plane = Plane(LookupLimits(max_running=1, wait_s=60), holders={b"a%d" % number for number in range(5)} | {b"b", b"first"})
    plane.gate.clear()
    calls = [asyncio.create_task(plane.ask(b"first", "a"))]
    await until(lambda: bool(plane.looked_up))
    calls += [asyncio.create_task(plane.ask(b"a%d" % number, "a")) for number in range(5)]
    calls.append(asyncio.create_task(plane.ask(b"b", "b")))
    await asyncio.sleep(0)
    plane.gate.set()
    await asyncio.gather(*calls)
    assert plane.looked_up.index(b"b") <= 2


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:192.0.2.1:4711", "ipv4:192.0.2.1"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:4711", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:[::1]:4711", "ipv6:::/64"),
        ("unix:/run/x", "unix"),
    ],
)
async def test_a_peer_is_an_address_without_its_port(peer: str, expected: str) -> None:
    assert current_peer() == ""
    set_peer(lambda: peer)
    assert current_peer() == expected
