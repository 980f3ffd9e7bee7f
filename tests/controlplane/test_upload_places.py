"""Who gets the places of uploads."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import upload_places as places_module
from controlplane.upload_places import UploadPlaces
from veneer.errors import ResourceExhaustedError

LONG_S = 60.0
SHORT_S = 0.001


async def _hold(stack: AsyncExitStack, places: UploadPlaces, tenant: str, organization: str = "", *, times: int) -> int:
    """Takes so many places; returns how many there were."""
    for held in range(times):
        try:
            await stack.enter_async_context(places.place(tenant, organization, wait_s=SHORT_S))
        except ResourceExhaustedError:
            return held
    return times


async def test_two_tenants_leave_places_to_others_however_many_uploads_they_begin() -> None:
    places = UploadPlaces(size=8, per_tenant=4, per_organization=6)
    async with AsyncExitStack() as stack:
        assert await _hold(stack, places, "one", times=12) == 4
        assert await _hold(stack, places, "two", times=12) == 2
        assert await _hold(stack, places, "three", times=12) == 1
        assert await _hold(stack, places, "four", times=1) == 1


async def test_the_tenants_of_an_organization_share_its_places_and_one_leaves_some_to_the_others() -> None:
    places = UploadPlaces(size=16, per_tenant=8, per_organization=4)
    async with AsyncExitStack() as stack:
        assert await _hold(stack, places, "big-a", "big", times=8) == 3
        assert await _hold(stack, places, "big-b", "big", times=8) == 1
        assert await _hold(stack, places, "big-c", "big", times=8) == 0
        assert await _hold(stack, places, "alone", times=8) == 8


async def test_many_tenants_of_one_organization_leave_places_to_others() -> None:
    places = UploadPlaces(size=8, per_tenant=4, per_organization=200)
    async with AsyncExitStack() as stack:
        assert sum([await _hold(stack, places, f"big-{number}", "big", times=1) for number in range(20)]) == 6
        assert await _hold(stack, places, "other", times=1) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_few_places_can_all_be_used(size: int) -> None:
    places = UploadPlaces(size=size, per_tenant=8, per_organization=8)
    async with AsyncExitStack() as stack:
        assert sum([await _hold(stack, places, f"tenant-{number}", times=1) for number in range(size)]) == size


async def test_a_free_place_goes_to_the_tenant_with_the_fewest() -> None:
    places, order = UploadPlaces(size=2, per_tenant=2, per_organization=2), list[str]()

    async def upload(tenant: str) -> None:
        async with places.place(tenant, "", wait_s=LONG_S):
            order.append(tenant)

    async with AsyncExitStack() as stack:
        await _hold(stack, places, "flood", times=1)
        await _hold(stack, places, "other", times=1)
        waiting = [asyncio.create_task(upload(tenant)) for tenant in ("flood", "flood", "new")]
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == []
    await asyncio.gather(*waiting)
    assert order[0] == "new"


async def test_an_upload_that_waits_has_the_next_place_before_those_that_begin_again() -> None:
    places, order = UploadPlaces(size=4, per_tenant=4, per_organization=4), list[str]()
    slow = [AsyncExitStack() for _ in range(4)]
    for number, stack in enumerate(slow):
        assert await _hold(stack, places, f"slow-{number}", times=1) == 1

    async def upload(tenant: str) -> None:
        async with places.place(tenant, "", wait_s=LONG_S):
            order.append(tenant)

    waiting = [asyncio.create_task(upload("other"))]
    await asyncio.sleep(0)
    for number, stack in enumerate(slow):
        await stack.aclose()  # it was too slow
        waiting.append(asyncio.create_task(upload(f"slow-{number}")))
    await asyncio.gather(*waiting)
    assert order[0] == "other"


@pytest.mark.parametrize(
    ("held", "organization", "limit"),
    [
        ("me", "", "max_publishes_per_tenant is 1"),
        ("sister", "org", "max_publishes_per_organization is 1"),
        ("", "", "max_publishes"),
    ],
)
async def test_a_refusal_names_the_limit_and_when_to_try_again(held: str, organization: str, limit: str) -> None:
    places = UploadPlaces(size=2, per_tenant=1, per_organization=1)
    async with AsyncExitStack() as stack:
        for tenant in (held,) if held else ("one", "two"):
            await stack.enter_async_context(places.place(tenant, organization, wait_s=SHORT_S))
        with pytest.raises(ResourceExhaustedError, match=limit) as refusal:
            await stack.enter_async_context(places.place("me", organization, wait_s=SHORT_S))
    assert refusal.value.retry_after_s == SHORT_S


async def test_a_tenant_has_a_bounded_number_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "_MAX_WAITING_PER_TENANT", 1)
    places = UploadPlaces(size=1, per_tenant=1, per_organization=1)

    async def upload(tenant: str) -> None:
        async with places.place(tenant, "", wait_s=LONG_S):
            pass

    async with places.place("one", "", wait_s=LONG_S):
        waiting = [asyncio.create_task(upload(tenant)) for tenant in ("one", "two")]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhaustedError, match="wait for a place already"):
            await upload("one")
    await asyncio.gather(*waiting)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["", "x"]), st.booleans()), max_size=40))
def test_whatever_happens_places_are_bounded_and_all_come_back(steps: list[tuple[str, str, bool]]) -> None:
    async def run() -> None:
        places, held = UploadPlaces(size=4, per_tenant=2, per_organization=3), Counter[str]()
        most, go, tasks = [0], asyncio.Event(), list[asyncio.Task[None]]()

        async def upload(tenant: str, organization: str) -> None:
            async with places.place(tenant, organization, wait_s=LONG_S):
                held[tenant] += 1
                most[0] = max(most[0], held.total())
                try:
                    assert held[tenant] <= 2
                    await go.wait()
                finally:
                    held[tenant] -= 1

        for number, (tenant, organization, is_cancelled) in enumerate(steps):
            tasks.append(asyncio.create_task(upload(tenant, organization)))
            if number % 3:
                await asyncio.sleep(0)
            if is_cancelled:
                tasks[number // 2].cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        go.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(one is None or isinstance(one, asyncio.CancelledError) for one in ended)
        assert most[0] <= 4
        assert (places._groups.total(), places._tenants.total(), places._waiting) == (0, 0, [])

    asyncio.run(run())
