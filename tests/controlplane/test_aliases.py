"""Moving aliases over the wire: compare-and-swap, splits, and the way back."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from dataplane.binding import bind
from dataplane.catalog_client import CatalogClient
from dataplane.fallback import FallbackMode
from dataplane.resolution import Target
from dataplane.resolve_cache import Key
from tests.controlplane.using import node_client
from tests.fixtures.controlplane import BASE_DIGEST, CALLER, Client, World, refused, tiny_base
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import catalog_pb2, nodes_pb2


@pytest.fixture
async def acme(world: World) -> Client:
    """A tenant with three versions of one adapter, the first of them stable."""
    await world.base()
    client = await world.tenant("acme")
    for seed in range(3):
        await world.publish(client, seed=seed)
    return client


async def digests(client: Client) -> list[str]:
    page = await client.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))
    return [version.digest for version in reversed(page.versions)]


async def point(client: Client, *arms: str | tuple[str, int], alias: str = "", **fields: Any) -> catalog_pb2.Alias:
    pairs = [arm if isinstance(arm, tuple) else (arm, 1) for arm in arms]
    messages = [catalog_pb2.Arm(version=version, weight=weight) for version, weight in pairs]
    request = catalog_pb2.SetAliasRequest(adapter="style", alias=alias, arms=messages, **fields)
    return (await client.catalog.SetAlias(request)).alias


async def roll_back(client: Client, **fields: Any) -> catalog_pb2.Alias:
    return (await client.catalog.Rollback(catalog_pb2.RollbackRequest(adapter="style", **fields))).alias


def served(alias: catalog_pb2.Alias) -> list[tuple[str, int]]:
    return [(arm.version, arm.weight) for arm in alias.arms]


async def test_a_move_gives_the_next_generation_and_keeps_the_order_of_arms(acme: Client) -> None:
    one, _two, three = await digests(acme)
    moved = await point(acme, (three, 90), (one, 10))

    assert (moved.name, moved.generation) == ("stable", 2)
    assert served(moved) == [(three, 90), (one, 10)]
    adapter = (await acme.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style"))).adapter
    assert list(adapter.aliases) == [moved]


async def test_a_move_from_another_generation_is_aborted(acme: Client) -> None:
    one, two, _ = await digests(acme)
    await point(acme, two, expected_generation=1)
    for expected in (0, 1, 3):
        code, text = await refused(point(acme, one, expected_generation=expected))
        assert code == grpc.StatusCode.ABORTED
        assert f"at generation 2, not {expected}" in text


async def test_a_new_alias_is_made_from_generation_zero(acme: Client) -> None:
    one, two, _ = await digests(acme)
    assert (await refused(point(acme, one, alias="canary", expected_generation=1)))[0] == grpc.StatusCode.ABORTED
    assert (await point(acme, one, alias="canary", expected_generation=0)).generation == 1
    assert (await refused(point(acme, two, alias="canary", expected_generation=0)))[0] == grpc.StatusCode.ABORTED


async def test_of_twenty_moves_from_one_generation_one_wins(acme: Client) -> None:
    _one, two, three = await digests(acme)
    calls = [point(acme, version, expected_generation=1) for version in (two, three) * 10]
    results = await asyncio.gather(*calls, return_exceptions=True)
    won = [result for result in results if not isinstance(result, BaseException)]
    lost = [result.code() for result in results if isinstance(result, grpc.aio.AioRpcError)]

    assert len(won) == 1
    assert won[0].generation == 2
    assert lost == [grpc.StatusCode.ABORTED] * 19


async def test_moves_without_a_generation_are_all_done_one_after_the_other(acme: Client) -> None:
    one, two, three = await digests(acme)
    moved = await asyncio.gather(*(point(acme, version) for version in (one, two, three) * 5))
    assert sorted(alias.generation for alias in moved) == list(range(2, 17))


async def test_an_alias_serves_ready_versions_of_its_adapter_only(world: World, acme: Client) -> None:
    one, two, three = await digests(acme)
    other = (await world.publish(acme, "other", seed=10)).version.digest
    foreign = (await world.publish(await world.tenant("rival"), seed=11)).version.digest
    await acme.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=two))
    node = await world.node()
    await node.nodes.ReportVersion(nodes_pb2.ReportVersionRequest(version=three, fault=nodes_pb2.VERSION_FAULT_NOT_FINITE))

    for version in (other, foreign, "0" * 64):
        assert await refused(point(acme, one, version)) == (grpc.StatusCode.NOT_FOUND, "there is no such version")
    for version, state in ((two, "retired"), (three, "quarantined")):
        code, text = await refused(point(acme, version))
        assert (code, state in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    code, text = await refused(point(acme, one, (one, 2)))
    assert (code, "twice" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_split_is_over_one_base(world: World, acme: Client) -> None:
    one, _, _ = await digests(acme)
    await world.base(tiny_base("a" * 64, "other"))
    moved = (await world.publish(acme, seed=20, base="other")).version.digest
    code, text = await refused(point(acme, one, moved))
    assert (code, "one base" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)


async def test_rolling_back_goes_to_what_all_traffic_went_to_before(acme: Client) -> None:
    _one, two, three = await digests(acme)
    await point(acme, two)
    await point(acme, (two, 50), (three, 50))
    await point(acme, (two, 10), (three, 90))

    back = await roll_back(acme)
    assert (served(back), back.generation) == ([(two, 1)], 5)


async def test_rolling_back_passes_over_splits_and_over_the_version_that_is_served_now(acme: Client) -> None:
    one, two, _three = await digests(acme)
    await point(acme, (one, 1), (two, 1))
    await point(acme, two)
    await point(acme, two)

    assert served(await roll_back(acme)) == [(one, 1)]


async def test_rolling_back_twice_goes_there_and_back(acme: Client) -> None:
    one, two, _ = await digests(acme)
    await point(acme, two)
    assert served(await roll_back(acme)) == [(one, 1)]
    assert served(await roll_back(acme)) == [(two, 1)]


async def test_rolling_back_passes_over_versions_that_are_not_ready(world: World, acme: Client) -> None:
    one, two, three = await digests(acme)
    await point(acme, two)
    await point(acme, three)
    node = await world.node()
    await node.nodes.ReportVersion(nodes_pb2.ReportVersionRequest(version=two, fault=nodes_pb2.VERSION_FAULT_CORRUPT))

    assert served(await roll_back(acme)) == [(one, 1)]


async def test_rolling_back_to_a_named_version_needs_that_the_alias_served_it(acme: Client) -> None:
    one, two, three = await digests(acme)
    await point(acme, (one, 1), (two, 1))
    await point(acme, one)

    assert served(await roll_back(acme, version=two)) == [(two, 1)]
    code, text = await refused(roll_back(acme, version=three))
    assert (code, "never served" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert (await refused(roll_back(acme, version="0" * 64)))[0] == grpc.StatusCode.NOT_FOUND


async def test_rolling_back_with_nothing_before_or_from_another_generation_changes_nothing(acme: Client) -> None:
    assert (await refused(roll_back(acme)))[0] == grpc.StatusCode.FAILED_PRECONDITION
    _one, two, _ = await digests(acme)
    await point(acme, two)
    assert (await refused(roll_back(acme, expected_generation=1)))[0] == grpc.StatusCode.ABORTED
    assert await refused(roll_back(acme, alias="nothing")) == (grpc.StatusCode.NOT_FOUND, "there is no such alias")
    assert (await roll_back(acme, expected_generation=2)).generation == 3


async def test_of_two_roll_backs_from_one_generation_one_wins(acme: Client) -> None:
    _, two, _ = await digests(acme)
    await point(acme, two)
    results = await asyncio.gather(*(roll_back(acme, expected_generation=2) for _ in range(10)), return_exceptions=True)
    assert sum(not isinstance(result, BaseException) for result in results) == 1


async def test_a_foreign_and_an_unknown_adapter_answer_the_same(world: World, acme: Client) -> None:
    one, _, _ = await digests(acme)
    rival = await world.tenant("rival")
    await world.publish(rival, "mine", seed=30)
    for adapter in ("style", "nothing"):
        set_alias = catalog_pb2.SetAliasRequest(adapter=adapter, arms=[catalog_pb2.Arm(version=one, weight=1)])
        calls = (rival.catalog.SetAlias(set_alias), rival.catalog.Rollback(catalog_pb2.RollbackRequest(adapter=adapter)))
        for call in calls:
            assert await refused(call) == (grpc.StatusCode.NOT_FOUND, "there is no such adapter")


async def test_callers_move_nothing(world: World, acme: Client) -> None:
    one, _, _ = await digests(acme)
    caller = await world.key("acme", CALLER)
    for call in (point(caller, one), roll_back(caller)):
        assert (await refused(call))[0] == grpc.StatusCode.PERMISSION_DENIED


async def test_a_move_is_in_the_feed_with_its_generation(world: World, acme: Client) -> None:
    node = await world.node()
    cursor = (await node.nodes.ListChanges(nodes_pb2.ListChangesRequest())).next_cursor
    one, two, _ = await digests(acme)
    await point(acme, two)
    await point(acme, (one, 1), (two, 1))
    changes = (await node.nodes.ListChanges(nodes_pb2.ListChangesRequest(cursor=cursor))).changes

    assert [(one.kind, one.tenant, one.adapter, one.version, one.generation) for one in changes] == [
        (nodes_pb2.CHANGE_KIND_ALIAS, "acme", "style", two, 2),
        (nodes_pb2.CHANGE_KIND_ALIAS, "acme", "style", "", 3),
    ]


async def promote(client: Client, **fields: Any) -> catalog_pb2.Alias:
    return (await client.catalog.Promote(catalog_pb2.PromoteRequest(adapter="style", **fields))).alias


async def freeze(client: Client, *, frozen: bool, **fields: Any) -> catalog_pb2.Alias:
    request = catalog_pb2.FreezeAliasRequest(adapter="style", frozen=frozen, **fields)
    return (await client.catalog.FreezeAlias(request)).alias


async def test_what_a_canary_serves_is_promoted_and_so_is_an_arm_of_the_alias(acme: Client) -> None:
    one, two, three = await digests(acme)
    await point(acme, two, alias="canary")
    assert served(await promote(acme, source="canary")) == [(two, 1)]
    await point(acme, (two, 9), (three, 1))
    moved = await promote(acme, version=three)
    assert (served(moved), moved.generation) == ([(three, 1)], 4)

    for fields, cause in (
        ({"version": one}, "no arm"),
        ({"source": "canary", "version": one}, "does not serve"),
    ):
        code, text = await refused(promote(acme, **fields))
        assert (code, cause in text) == (grpc.StatusCode.FAILED_PRECONDITION, True), fields
    assert (await refused(promote(acme)))[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert await refused(promote(acme, source="none")) == (grpc.StatusCode.NOT_FOUND, "there is no such alias")
    await point(acme, (one, 1), (two, 1), alias="canary")
    assert (await refused(promote(acme, source="canary")))[0] == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_frozen_alias_moves_in_no_way_until_it_is_unfrozen(world: World, acme: Client) -> None:
    _one, two, three = await digests(acme)
    await point(acme, two)
    frozen = await freeze(acme, frozen=True)
    assert (frozen.frozen, frozen.generation) == (True, 2)
    assert await freeze(acme, frozen=True) == frozen
    moves = (
        lambda: point(acme, three),
        lambda: roll_back(acme),
        lambda: promote(acme, version=two),
        lambda: world.publish(acme, seed=7, alias="stable"),
    )
    for move in moves:
        code, text = await refused(move)
        assert (code, "frozen" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert len(await digests(acme)) == 3
    assert served(await point(acme, three, alias="canary")) == [(three, 1)]

    assert not (await freeze(acme, frozen=False)).frozen
    assert served(await point(acme, three)) == [(three, 1)]


async def test_a_move_is_done_once_for_its_request_id(acme: Client) -> None:
    one, two, _three = await digests(acme)
    first = await point(acme, two, request_id="once")
    await point(acme, one)
    assert await point(acme, two, request_id="once") == first
    assert await roll_back(acme, request_id="back") == await roll_back(acme, request_id="back")
    adapter = (await acme.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style"))).adapter
    assert adapter.aliases[0].generation == 4
    for call in (point(acme, one, request_id="once"), roll_back(acme, request_id="once")):
        code, text = await refused(call)
        assert (code, "request_id" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    answers = await asyncio.gather(*(point(acme, one, request_id="at once") for _ in range(10)))
    assert all(answer == answers[0] for answer in answers)


async def test_a_dry_run_says_what_a_move_would_do_and_does_nothing(acme: Client) -> None:
    one, two, three = await digests(acme)
    await point(acme, two)
    before = (await acme.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style"))).adapter
    tried = [
        await point(acme, (two, 1), (three, 1), dry_run=True),
        await roll_back(acme, dry_run=True),
        await promote(acme, version=two, dry_run=True),
    ]
    assert [served(alias) for alias in tried] == [[(two, 1), (three, 1)], [(one, 1)], [(two, 1)]]
    assert {alias.generation for alias in tried} == {3}
    assert (await refused(point(acme, "0" * 64, dry_run=True)))[0] == grpc.StatusCode.NOT_FOUND
    assert (await acme.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style"))).adapter == before


async def test_a_version_keeps_its_labels_and_where_it_comes_from(world: World, acme: Client) -> None:
    origin = {"labels": {"team": "search"}, "training_run": "run-7", "data_digest": "cd" * 32}
    published = await world.publish(acme, seed=9, request_id="labelled", **origin)
    assert (dict(published.version.labels), published.version.training_run) == ({"team": "search"}, "run-7")
    listed = (await acme.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))).versions[0]
    assert listed == published.version
    code, _ = await refused(lambda: world.publish(acme, seed=9, request_id="labelled", **{**origin, "training_run": "run-8"}))
    assert code == grpc.StatusCode.INVALID_ARGUMENT


UNITS = [f"user-{number}" for number in range(1500)]


async def users(node: CatalogClient, client: Client) -> dict[str, set[str]]:
    """The units that each version serves, as a data plane draws them."""
    answer = await node.resolve(Key(client.digest, Target("style")))
    found: dict[str, set[str]] = {}
    for unit in UNITS:
        drawn = bind(answer, request_id="r", base_digest=BASE_DIGEST, split_unit=unit, mode=FallbackMode.NONE, priority=0)
        assert drawn.version is not None
        found.setdefault(drawn.version, set()).add(unit)
    return found


async def test_the_users_of_a_split_stay_whatever_the_order_in_which_its_arms_are_written(world: World, acme: Client) -> None:
    one, two, _ = await digests(acme)
    async with node_client(world, await world.node()) as node:
        await point(acme, (one, 90), (two, 10))
        before = await users(node, acme)
        await point(acme, (two, 10), (one, 90))
        assert await users(node, acme) == before
        await point(acme, one)
        await point(acme, (two, 100), (one, 900))
        assert await users(node, acme) == before
    assert 100 < len(before[two]) < 200


async def test_three_arms_in_another_order_with_a_weight_changed_move_the_users_that_must_move(
    world: World, acme: Client
) -> None:
    one, two, three = await digests(acme)
    async with node_client(world, await world.node()) as node:
        await point(acme, (one, 50), (two, 30), (three, 20))
        before = await users(node, acme)
        for gainer, loser, arms in (
            (two, three, [(three, 10), (one, 50), (two, 40)]),
            (three, two, [(two, 30), (three, 20), (one, 50)]),
            (one, two, [(two, 10), (one, 70), (three, 20)]),
        ):
            await point(acme, *arms)
            after = await users(node, acme)
            (third,) = {one, two, three} - {gainer, loser}
            assert before[third] == after[third]
            assert before[gainer] < after[gainer]
            before = after


async def test_a_split_that_was_set_before_points_were_kept_keeps_its_users_and_moves_as_few(
    world: World, acme: Client, database: TestDatabase
) -> None:
    one, two, _ = await digests(acme)
    first, last = sorted((one, two), reverse=True)  # against the order in which new splits are laid out
    async with node_client(world, await world.node()) as node:
        await point(acme, (first, 70), (last, 30))
        with database.connect() as connection:
            connection.execute("UPDATE arms SET points = NULL")
        before = await users(node, acme)
        await point(acme, (last, 30), (first, 70))
        assert await users(node, acme) == before
        await point(acme, (last, 40), (first, 60))
        assert before[last] < (await users(node, acme))[last]
