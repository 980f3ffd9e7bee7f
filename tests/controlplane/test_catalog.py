"""Reading the catalogue over the wire, and the end of a version."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.fixtures.controlplane import CALLER, Client, World, refused
from veneer.controlplane.v1 import catalog_pb2


@pytest.fixture
async def acme(world: World) -> Client:
    """A tenant, and a base to publish for."""
    await world.base()
    return await world.tenant("acme")


async def test_adapters_come_in_pages_by_name_and_only_the_callers_own(world: World, acme: Client) -> None:
    for seed, name in enumerate(("d", "a", "c", "b", "e")):
        await world.publish(acme, name, seed=seed)
    await world.publish(await world.tenant("rival"), "aa", seed=9)

    first = await acme.catalog.ListAdapters(catalog_pb2.ListAdaptersRequest(page_size=3))
    second = await acme.catalog.ListAdapters(catalog_pb2.ListAdaptersRequest(page_size=3, page_token=first.next_page_token))

    assert [one.name for one in first.adapters] == ["a", "b", "c"]
    assert [one.name for one in second.adapters] == ["d", "e"]
    assert second.next_page_token == ""
    assert all([alias.name for alias in one.aliases] == ["stable"] for one in first.adapters)


async def test_versions_come_in_pages_newest_first(world: World, acme: Client) -> None:
    for seed in range(5):
        await world.publish(acme, seed=seed)
    first = await acme.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style", page_size=2))
    await world.publish(acme, seed=5)
    request = catalog_pb2.ListVersionsRequest(adapter="style", page_size=3, page_token=first.next_page_token)
    second = await acme.catalog.ListVersions(request)

    assert [one.number for one in first.versions] == [5, 4]
    assert [one.number for one in second.versions] == [3, 2, 1]  # a version that came in between moves no page
    assert second.next_page_token == ""


@pytest.mark.parametrize("token", ["x", "e30=", "WyJ2ZXJzaW9ucy9vdGhlciIsMV0=", "WyJ2ZXJzaW9ucy9zdHlsZSIsIngiXQ==", "é"])
async def test_a_token_of_another_listing_is_refused(world: World, acme: Client, token: str) -> None:
    await world.publish(acme)
    request = catalog_pb2.ListVersionsRequest(adapter="style", page_token=token)
    code, text = await refused(acme.catalog.ListVersions(request))
    assert (code, "page_token" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_foreign_and_an_unknown_adapter_answer_the_same(world: World, acme: Client) -> None:
    published = await world.publish(acme)
    rival = await world.tenant("rival")
    for adapter in ("style", "nothing"):
        for call in (
            rival.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter=adapter)),
            rival.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter=adapter)),
            rival.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter=adapter, version=published.version.digest)),
        ):
            assert await refused(call) == (grpc.StatusCode.NOT_FOUND, "there is no such adapter")


async def test_a_version_is_retired_once_and_stays_in_the_list(world: World, acme: Client) -> None:
    await world.publish(acme, seed=1)
    digest = (await world.publish(acme, seed=2)).version.digest
    request = catalog_pb2.RetireVersionRequest(adapter="style", version=digest)
    first, again = await acme.catalog.RetireVersion(request), await acme.catalog.RetireVersion(request)
    listed = (await acme.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))).versions

    assert first.version.state == catalog_pb2.VERSION_STATE_RETIRED
    assert first.version.HasField("retire_time")
    assert again == first
    assert listed[0] == first.version
    assert (await acme.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style"))).adapter.num_versions == 2


async def test_a_version_that_an_alias_points_at_is_not_retired(world: World, acme: Client) -> None:
    one = (await world.publish(acme, seed=1)).version.digest
    two = (await world.publish(acme, seed=2, alias="canary")).version.digest
    request = catalog_pb2.RetireVersionRequest(adapter="style", version=two)
    code, text = await refused(acme.catalog.RetireVersion(request))
    assert (code, "canary" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)

    arms = [catalog_pb2.Arm(version=one, weight=1)]
    await acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", alias="canary", arms=arms))
    assert (await acme.catalog.RetireVersion(request)).version.state == catalog_pb2.VERSION_STATE_RETIRED


async def test_retiring_and_pointing_at_once_never_leaves_an_alias_on_a_retired_version(world: World, acme: Client) -> None:
    one = (await world.publish(acme, seed=1)).version.digest
    two = (await world.publish(acme, seed=2)).version.digest
    arms = [catalog_pb2.Arm(version=two, weight=1)]
    results = await asyncio.gather(
        acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms)),
        acme.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=two)),
        return_exceptions=True,
    )
    failed = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert [error.code() for error in failed] == [grpc.StatusCode.FAILED_PRECONDITION]
    assert one != two


async def test_callers_retire_nothing(world: World, acme: Client) -> None:
    digest = (await world.publish(acme)).version.digest
    caller = await world.key("acme", CALLER)
    call = caller.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=digest))
    assert (await refused(call))[0] == grpc.StatusCode.PERMISSION_DENIED
