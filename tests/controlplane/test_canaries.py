"""Canaries over the wire: what their counts lead to, that a batch counts once, and that a person's move ends them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from controlplane import aliases, canaries
from controlplane.conductor import Conductor
from tests.fixtures.controlplane import BASE_DIGEST, Client, World, refused, tiny_base
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import canaries_pb2, catalog_pb2, nodes_pb2, tenants_pb2

RUNNING, PROMOTED = canaries_pb2.CANARY_STATE_RUNNING, canaries_pb2.CANARY_STATE_PROMOTED
ROLLED_BACK, STOPPED = canaries_pb2.CANARY_STATE_ROLLED_BACK, canaries_pb2.CANARY_STATE_STOPPED


def step(weight: int, *, seconds: int = 0, requests: int = 0) -> canaries_pb2.CanaryStep:
    made = canaries_pb2.CanaryStep(weight_percent=weight, min_requests=requests)
    made.duration.FromSeconds(seconds)
    return made


LONG = step(10, seconds=3600)


@dataclasses.dataclass
class Scene:
    """A tenant with three versions of an adapter, the first of them stable, and a node that reports."""

    world: World
    acme: Client
    node: Client
    versions: list[str]
    sequences: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))
    epoch: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))

    async def start(self, *steps: canaries_pb2.CanaryStep, version: int = 1, **fields: Any) -> canaries_pb2.Canary:
        wanted = {"adapter": "style", "version": self.versions[version], "steps": steps or [LONG], **fields}
        return (await self.acme.catalog.StartCanary(canaries_pb2.StartCanaryRequest(**wanted))).canary

    async def canary(self) -> canaries_pb2.Canary:
        return (await self.acme.catalog.GetCanary(canaries_pb2.GetCanaryRequest(adapter="style"))).canary

    async def stop(self, **fields: Any) -> canaries_pb2.Canary:
        return (await self.acme.catalog.StopCanary(canaries_pb2.StopCanaryRequest(adapter="style", **fields))).canary

    async def served(self) -> list[tuple[int, int]]:
        """Place of each arm's version and its weight."""
        found = (await self.acme.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style"))).adapter
        [alias] = [one for one in found.aliases if one.name == "stable"]
        return [(self.versions.index(arm.version), arm.weight) for arm in alias.arms]

    async def point(self, version: int) -> None:
        arms = [catalog_pb2.Arm(version=self.versions[version], weight=1)]
        await self.acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms))

    def outcomes(self, place: int, ok: int, failed: int, *, generation: int, **fields: Any) -> nodes_pb2.ArmOutcomes:
        known = {"owner": "acme", "adapter": "style", "alias": "stable", "version": self.versions[place]}
        return nodes_pb2.ArmOutcomes(**{**known, **fields}, generation=generation, ok=ok, failed=failed)

    async def report(self, *outcomes: nodes_pb2.ArmOutcomes, node: Client | None = None, **fields: Any) -> bool:
        batch = {"epoch": self.epoch, "sequence": fields.pop("sequence", None) or next(self.sequences), **fields}
        request = nodes_pb2.ReportOutcomesRequest(outcomes=outcomes, **batch)
        return bool((await (node or self.node).nodes.ReportOutcomes(request)).counted)

    async def tell(self, new: tuple[int, int], stable: tuple[int, int], *, generation: int = 2) -> None:
        await self.report(self.outcomes(1, *new, generation=generation), self.outcomes(0, *stable, generation=generation))

    async def look(self) -> None:
        await self.world.plane.conductor.look()


@pytest.fixture
async def scene(world: World) -> Scene:
    await world.base()
    acme = await world.tenant("acme")
    versions = [(await world.publish(acme, seed=seed)).version.digest for seed in range(3)]
    return Scene(world, acme, await world.node(), versions)


async def test_a_good_version_goes_from_step_to_step_and_gets_all_traffic(scene: Scene) -> None:
    started = await scene.start(step(10, requests=20), step(50))
    assert (started.state, started.step, started.generation, started.stable_version) == (RUNNING, 0, 2, scene.versions[0])
    assert await scene.served() == [(0, 90), (1, 10)]
    await scene.look()
    assert (await scene.canary()).step == 0, "it has no requests yet"

    await scene.tell((20, 0), (180, 1))
    await scene.look()
    assert await scene.served() == [(0, 50), (1, 50)]
    await scene.look()
    ended = await scene.canary()
    assert await scene.served() == [(1, 1)]
    assert (ended.state, ended.step, ended.version_counts.ok, ended.stable_counts.failed) == (PROMOTED, 1, 20, 1)
    assert ended.HasField("end_time")
    await scene.look()
    assert await scene.canary() == ended


async def test_a_step_that_is_taken_while_it_is_looked_at_is_no_move_of_somebody_else(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.start(step(10), step(50, seconds=3600))
    await scene.tell((20, 0), (180, 0))
    is_first = True

    async def take_a_step_first(*arguments: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            await scene.look()
        return await aliases.present_alias(*arguments)

    monkeypatch.setattr(canaries, "present_alias", take_a_step_first)
    found = await scene.canary()
    assert (found.state, found.step) == (RUNNING, 1)


async def test_a_step_lasts_as_long_as_it_says(scene: Scene) -> None:
    await scene.start(step(10, seconds=3600), step(50))
    await scene.tell((1000, 0), (9000, 0))
    await scene.look()
    assert (await scene.canary()).step == 0


@pytest.mark.parametrize("stable", [0, 1])
async def test_a_version_with_nothing_to_weigh_it_against_gets_no_more_traffic(scene: Scene, stable: int) -> None:
    await scene.start(step(10, requests=20), step(50))
    await scene.tell((500, 0), (stable, 0))
    await scene.look()
    assert (await scene.canary()).step == 0
    await scene.tell((0, 0), (9, 1))
    await scene.look()
    assert (await scene.canary()).step == 1


async def test_a_version_of_which_most_requests_failed_gets_no_more_traffic_whatever_the_others_do(scene: Scene) -> None:
    await scene.start(step(10), step(50))
    await scene.tell((0, 5), (0, 0))
    await scene.look()
    assert (await scene.canary()).step == 0


async def test_a_bad_version_is_rolled_back_with_the_counts_as_the_reason(scene: Scene) -> None:
    await scene.start()
    await scene.tell((4, 16), (180, 2))
    await scene.look()
    ended = await scene.canary()
    assert await scene.served() == [(0, 1)]
    assert (ended.state, ended.reason) == (ROLLED_BACK, "16 of 20 requests failed on the version, 2 of 182 on the stable one")
    assert ended.evidence >= 100


async def test_a_bad_hour_of_the_whole_service_rolls_nothing_back(scene: Scene) -> None:
    await scene.start()
    for _ in range(10):
        await scene.tell((12, 8), (108, 72))
        await scene.look()
    assert (await scene.canary()).state == RUNNING


async def test_what_comes_in_small_parts_is_weighed_in_windows_and_leads_to_the_same(scene: Scene) -> None:
    await scene.start()
    for _ in range(30):
        await scene.tell((0, 1), (9, 0))
        await scene.look()
    ended = await scene.canary()
    assert ended.state == ROLLED_BACK
    assert ended.version_counts.failed < 30


async def test_a_batch_that_comes_again_or_from_behind_is_counted_once(scene: Scene) -> None:
    await scene.start()
    first, second = scene.outcomes(1, 5, 1, generation=2), scene.outcomes(0, 7, 0, generation=2)
    results = await asyncio.gather(*(scene.report(first, second, sequence=3) for _ in range(8)))
    assert sorted(results) == [False] * 7 + [True]
    assert not await scene.report(first, sequence=2)
    assert await scene.report(first, epoch=str(uuid.uuid4()), sequence=1), "another start of the process"
    assert not await scene.report(first, sequence=3)
    other = await scene.world.node("node-2")
    assert await scene.report(second, node=other, sequence=3), "another node"

    found = await scene.canary()
    assert (found.version_counts.ok, found.version_counts.failed, found.stable_counts.ok) == (10, 2, 14)


async def test_batches_about_many_canaries_at_once_do_not_lose_anything(scene: Scene) -> None:
    await scene.point(0)
    names = [f"alias-{place}" for place in range(4)]
    for name in names:
        arms = [catalog_pb2.Arm(version=scene.versions[0], weight=1)]
        await scene.acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", alias=name, arms=arms))
        await scene.start(alias=name)
    nodes = [await scene.world.node(f"other-{place}") for place in range(4)]

    async def report(place: int) -> None:
        turned = names[place:] + names[:place]
        for sequence in range(1, 6):
            batch = [scene.outcomes(1, 1, 1, generation=2, alias=name) for name in turned]
            assert await scene.report(*batch, node=nodes[place], sequence=sequence)

    await asyncio.gather(*map(report, range(4)))
    for name in names:
        found = (await scene.acme.catalog.GetCanary(canaries_pb2.GetCanaryRequest(adapter="style", alias=name))).canary
        assert (found.version_counts.ok, found.version_counts.failed) == (20, 20)


async def test_only_what_belongs_to_the_canary_counts_and_only_from_a_node_that_may_serve_it(scene: Scene) -> None:
    await scene.start()
    rival = await scene.world.tenant("rival")
    foreign = (await scene.world.publish(rival, seed=9)).version.digest
    await scene.report(
        scene.outcomes(2, 1, 1, generation=2),  # no arm of it
        scene.outcomes(1, 1, 1, generation=1),  # before it began
        scene.outcomes(1, 1, 1, generation=3),  # no step of it yet
        scene.outcomes(1, 1, 1, generation=2, alias="other"),
        scene.outcomes(1, 1, 1, generation=2, owner="rival"),
        scene.outcomes(1, 1, 1, generation=2, version=foreign),
        scene.outcomes(1, 1, 1, generation=2, adapter="none"),
    )
    other_base = await scene.world.base(tiny_base("cd" * 32, "other"))
    stranger = await scene.world.node("stranger", other_base)
    assert await scene.report(scene.outcomes(1, 1, 1, generation=2), node=stranger)
    found = await scene.canary()
    assert (found.version_counts.ok, found.version_counts.failed, found.stable_counts.ok) == (0, 0, 0)
    assert other_base != BASE_DIGEST


async def test_a_persons_move_ends_it_and_stays(scene: Scene) -> None:
    await scene.start()
    await scene.point(2)
    assert (await scene.canary()).state == STOPPED, "even before the next look"
    await scene.tell((0, 50), (50, 0))
    await scene.look()
    ended = await scene.canary()
    assert (ended.state, ended.reason, await scene.served()) == (STOPPED, "the alias was moved", [(2, 1)])
    await scene.start(version=1)
    assert (await scene.canary()).state == RUNNING


async def test_another_may_start_at_once_after_a_move(scene: Scene) -> None:
    await scene.start()
    await scene.point(2)
    again = await scene.start()
    assert (again.state, again.stable_version, await scene.served()) == (RUNNING, scene.versions[2], [(2, 90), (1, 10)])
    await scene.look()
    assert (await scene.canary()).state == RUNNING


async def test_stopping_gives_all_traffic_back(scene: Scene) -> None:
    await scene.start()
    assert (await scene.stop(dry_run=True)).state == STOPPED
    assert (await scene.canary()).state == RUNNING
    stopped = await scene.stop(request_id="once")
    assert (stopped.state, await scene.served()) == (STOPPED, [(0, 1)])
    assert await scene.stop(request_id="once") == stopped
    assert (await refused(scene.stop()))[0] == grpc.StatusCode.FAILED_PRECONDITION


async def test_starting_is_done_once_by_request_id_and_not_at_all_as_a_trial(scene: Scene) -> None:
    tried = await scene.start(dry_run=True)
    assert (tried.state, await scene.served()) == (RUNNING, [(0, 1)])
    assert (await refused(scene.canary()))[0] == grpc.StatusCode.NOT_FOUND
    started = await scene.start(step(10, seconds=2), step(20), request_id="once", expected_generation=1)
    await scene.tell((5, 0), (5, 0))
    assert await scene.start(step(10, seconds=2), step(20), request_id="once", expected_generation=1) == started
    code, text = await refused(scene.start(request_id="once"))
    assert (code, "request_id" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize(
    ("steps", "fields", "code", "words"),
    [
        ([step(10), step(10)], {}, grpc.StatusCode.INVALID_ARGUMENT, "steps[1].weight_percent"),
        ([step(100)], {}, grpc.StatusCode.INVALID_ARGUMENT, "weight_percent"),
        ([], {"steps": []}, grpc.StatusCode.INVALID_ARGUMENT, "steps"),
        ([], {"version": 0}, grpc.StatusCode.FAILED_PRECONDITION, "serves this version already"),
        ([], {"alias": "none"}, grpc.StatusCode.NOT_FOUND, "no such alias"),
        ([], {"adapter": "none"}, grpc.StatusCode.NOT_FOUND, "no such adapter"),
        ([], {"expected_generation": 7}, grpc.StatusCode.ABORTED, "generation 1"),
    ],
)
async def test_what_cannot_be_started_is_refused(
    scene: Scene, steps: list[canaries_pb2.CanaryStep], fields: dict[str, Any], code: grpc.StatusCode, words: str
) -> None:
    if "steps" in fields:
        request = canaries_pb2.StartCanaryRequest(adapter="style", version=scene.versions[1])
        assert (await refused(scene.acme.catalog.StartCanary(request)))[0] == code
        return
    found, text = await refused(scene.start(*steps, **fields))
    assert (found, words in text) == (code, True), text


async def test_an_alias_with_a_split_or_frozen_and_a_version_that_is_not_ready_are_refused(scene: Scene) -> None:
    await scene.acme.catalog.FreezeAlias(catalog_pb2.FreezeAliasRequest(adapter="style", frozen=True))
    assert (await refused(scene.start()))[0] == grpc.StatusCode.FAILED_PRECONDITION
    await scene.acme.catalog.FreezeAlias(catalog_pb2.FreezeAliasRequest(adapter="style", frozen=False))
    await scene.acme.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=scene.versions[2]))
    assert (await refused(scene.start(version=2)))[0] == grpc.StatusCode.FAILED_PRECONDITION
    await scene.start()
    assert "split" in (await refused(scene.start()))[1]


async def test_a_frozen_alias_holds_it_until_it_is_free(scene: Scene) -> None:
    await scene.start()
    await scene.acme.catalog.FreezeAlias(catalog_pb2.FreezeAliasRequest(adapter="style", frozen=True))
    await scene.tell((0, 50), (450, 0))
    await scene.look()
    assert ((await scene.canary()).state, await scene.served()) == (RUNNING, [(0, 90), (1, 10)])
    await scene.acme.catalog.FreezeAlias(catalog_pb2.FreezeAliasRequest(adapter="style", frozen=False))
    await scene.look()
    assert (await scene.canary()).state == ROLLED_BACK


@pytest.mark.parametrize(("bad", "state", "served"), [(1, ROLLED_BACK, [(0, 1)]), (0, STOPPED, [(0, 90), (1, 10)])])
async def test_a_version_that_is_quarantined_ends_it(scene: Scene, bad: int, state: int, served: list[tuple[int, int]]) -> None:
    await scene.start()
    fault = nodes_pb2.VERSION_FAULT_NOT_FINITE
    await scene.node.nodes.ReportVersion(nodes_pb2.ReportVersionRequest(version=scene.versions[bad], fault=fault))
    await scene.look()
    ended = await scene.canary()
    assert (ended.state, await scene.served()) == (state, served)
    assert "quarantined" in ended.reason or "stable" in ended.reason


async def test_deleted_versions_and_adapters_leave_no_canary(scene: Scene, database: TestDatabase) -> None:
    await scene.start()
    await scene.point(2)
    await scene.acme.catalog.DeleteVersion(catalog_pb2.DeleteVersionRequest(adapter="style", version=scene.versions[1]))
    assert (await refused(scene.canary()))[0] == grpc.StatusCode.NOT_FOUND
    await scene.start(version=0)
    await scene.acme.catalog.DeleteAdapter(catalog_pb2.DeleteAdapterRequest(adapter="style", force=True))
    await scene.look()
    with database.connect() as connection:
        for table in ("canaries", "canary_steps"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


async def test_every_move_is_in_the_audit_log_and_the_feed(scene: Scene) -> None:
    cursor = (await scene.node.nodes.ListChanges(nodes_pb2.ListChangesRequest())).next_cursor
    await scene.start()
    await scene.tell((0, 20), (180, 0))
    await scene.look()
    changes = (await scene.node.nodes.ListChanges(nodes_pb2.ListChangesRequest(cursor=cursor))).changes
    assert [(one.kind, one.generation) for one in changes] == [(nodes_pb2.CHANGE_KIND_ALIAS, 2), (nodes_pb2.CHANGE_KIND_ALIAS, 3)]
    entries = (await scene.acme.tenants.ListAudit(tenants_pb2.ListAuditRequest())).entries
    [ended] = [one for one in entries if (one.object, one.action) == ("canaries", "update")]
    assert (ended.actor, json.loads(ended.after)["state"]) == ("service", "ROLLED_BACK")
    [moved, begun] = [one for one in entries if (one.object, one.action) == ("aliases", "update")]
    assert (moved.actor, begun.actor.split()[0]) == ("service", "tenant")


async def test_two_conductors_at_once_take_each_step_once(scene: Scene) -> None:
    await scene.start(*(step(weight) for weight in range(1, 15)))
    settings = scene.world.settings
    others = [Conductor(scene.world.plane.database, settings, registry=CollectorRegistry()) for _ in range(3)]
    for _ in range(20):
        await asyncio.gather(*(one.take("acme", "style", "stable") for one in others))
    ended = await scene.canary()
    assert (ended.state, ended.generation) == (PROMOTED, 15)
    found = (await scene.acme.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style"))).adapter
    assert found.aliases[0].generation == 16


async def test_a_failure_about_one_canary_leaves_the_others_their_look(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        arms = [catalog_pb2.Arm(version=scene.versions[0], weight=1)]
        await scene.acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", alias=name, arms=arms))
        await scene.start(step(10), alias=name)
    conductor = scene.world.plane.conductor
    take = conductor.take

    async def fail_on_first(owner: str, adapter: str, alias: str) -> None:
        if alias == "first":
            raise RuntimeError
        await take(owner, adapter, alias)

    monkeypatch.setattr(conductor, "take", fail_on_first)
    await conductor.look()
    states = [
        (await scene.acme.catalog.GetCanary(canaries_pb2.GetCanaryRequest(adapter="style", alias=name))).canary.state
        for name in ("first", "second")
    ]
    assert states == [RUNNING, PROMOTED]
