"""The collector: what no version owns goes, after its time, and nothing else; wherever a publish was cut off."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controlplane.blobs import Blobs
from controlplane.collector import Collector
from controlplane.db import Database
from controlplane.publish import Published, Publisher, PublishMetrics
from controlplane.publish_order import PublishOrder
from controlplane.settings import Settings
from controlplane.spool import CONFIG, WEIGHTS, Part
from tests.fixtures.controlplane import BASE_DIGEST, Client, World, adapter_files, check_here
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import catalog_pb2, nodes_pb2
from veneer.errors import AbortedError, DataLossError, UnavailableError

NEVER = PublishOrder(adapter="style", base=BASE_DIGEST, request_id="once")


@pytest.fixture
async def acme(world: World) -> Client:
    """A tenant, and a base to publish for."""
    await world.base()
    return await world.tenant("acme")


@pytest.fixture
def collector(world: World) -> Collector:
    """A collector whose grace is over at once."""
    settings = world.settings.model_copy(update={"upload_grace_s": 0.0})
    return Collector(world.plane.database, world.plane.blobs, settings, registry=CollectorRegistry())


def make_due(database: TestDatabase) -> None:
    """Lets the grace of everything pass."""
    with database.connect() as connection:
        connection.execute("UPDATE uploads SET collect_time = now()")


def end_leases(database: TestDatabase) -> None:
    with database.connect() as connection:
        connection.execute("UPDATE blob_leases SET end_time = now()")


def stored(settings: Settings) -> list[Path]:
    folder = Path(settings.store_url.removeprefix("file://"))
    return sorted(path for path in folder.rglob("*") if path.is_file())


def count(database: TestDatabase, table: str) -> int:
    with database.connect() as connection:
        row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    assert row is not None
    return int(row[0])


async def test_what_was_taken_of_a_journal_is_forgotten_only_when_nothing_of_it_can_come(
    world: World, collector: Collector, database: TestDatabase
) -> None:
    await world.base()
    kept, gone = await world.node("kept"), await world.node("gone")
    ages = {"running": None, "just": "1 hour", "over": "25 hours"}
    with database.connect() as connection:
        nodes = dict(connection.execute("SELECT name, id FROM nodes").fetchall())
        for name, age in ages.items():
            connection.execute(
                "INSERT INTO usage_journals (node, journal, last_sequence, update_time, end_time) "
                "VALUES (%s, %s, 1, now() - interval '1 year', now() - %s::interval)",
                (nodes["kept"], name, age),
            )
        connection.execute(
            "INSERT INTO usage_journals (node, journal, last_sequence) VALUES (%s, 'revoked', 1)", (nodes["gone"],)
        )

    def left() -> set[str]:
        with database.connect() as connection:
            return {row[0] for row in connection.execute("SELECT journal FROM usage_journals").fetchall()}

    await world.operator.nodes.RevokeNode(nodes_pb2.RevokeNodeRequest(id=str(nodes["gone"])))
    await collector.collect()
    assert left() == {"running", "just", "revoked"}
    with database.connect() as connection:
        connection.execute("UPDATE nodes SET revoke_time = now() - interval '25 hours' WHERE revoke_time IS NOT NULL")
    await collector.collect()
    assert left() == {"running", "just"}
    assert kept.secret != gone.secret


class Crash(BaseException):
    """The process ended here."""


@dataclasses.dataclass
class Fate:
    """Ends the process at its nth step; a step is everything that outlives it."""

    at: int
    num_steps: int = 0

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps == self.at:
            raise Crash


class DoomedDatabase:
    """Transactions that end before or after they are committed."""

    def __init__(self, database: Database, fate: Fate) -> None:
        self._database, self._fate = database, fate
        self.app, self.relay = database.app, database.relay

    @asynccontextmanager
    async def transaction(self, *arguments: Any, **more: Any) -> AsyncIterator[Any]:
        async with self._database.transaction(*arguments, **more) as connection:
            yield connection
            self._fate.step()
        self._fate.step()


class DoomedBlobs(Blobs):
    """Writes that end before, in the middle, or after."""

    def __init__(self, url: str, fate: Fate) -> None:
        super().__init__(url)
        self._fate = fate
        self._place = Path(url.removeprefix("file://"))

    async def put(self, folder: str, digest: str, file: Path) -> None:
        self._fate.step()
        try:
            self._fate.step()
        except Crash:
            staged = self._place / folder / f"{digest}#1"
            staged.parent.mkdir(parents=True, exist_ok=True)
            staged.write_bytes(file.read_bytes()[:10])
            raise
        await super().put(folder, digest, file)
        self._fate.step()


async def parts(seed: int) -> AsyncIterator[Part]:
    files = adapter_files(seed)
    yield Part(CONFIG, files.config)
    yield Part(WEIGHTS, files.weights)


async def publish(world: World, fate: Fate, *, seed: int, order: PublishOrder = NEVER) -> Published:
    database: Any = DoomedDatabase(world.plane.database, fate)
    blobs = DoomedBlobs(world.settings.store_url, fate)
    metrics = PublishMetrics(CollectorRegistry())
    publisher = Publisher(database, blobs, world.settings, check=check_here, metrics=metrics)
    return await publisher.publish("acme", order, parts=parts(seed))


async def test_wherever_a_publish_is_cut_off_it_is_done_once_and_leaves_nothing(
    world: World, acme: Client, collector: Collector, database: TestDatabase
) -> None:
    whole = Fate(at=0)
    await publish(world, whole, seed=0, order=dataclasses.replace(NEVER, request_id="whole"))
    # transactions: quotas, base, trusted keys, answer, upload; two files, three places each; commit
    assert whole.num_steps == 5 * 2 + 2 * 3 + 2

    for point in range(1, whole.num_steps + 1):
        order = dataclasses.replace(NEVER, request_id=f"cut-{point}")
        before = count(database, "versions")
        with pytest.raises(Crash):
            await publish(world, Fate(at=point), seed=point, order=order)
        assert count(database, "versions") - before == (1 if point == whole.num_steps else 0), point

        published = await publish(world, Fate(at=0), seed=point, order=order)
        assert published.version.number == point + 1
        make_due(database)
        await collector.collect()
        assert count(database, "uploads") == 0, point
        assert len(stored(world.settings)) == 2 * (point + 1), point

    node = await world.node()
    listed = (await acme.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))).versions
    for version in listed:
        await world.ask(node, acme, version=version.digest)
        grant = await node.nodes.GrantBlobs(nodes_pb2.GrantBlobsRequest(version=version.digest))
        for blob in grant.blobs:
            request = nodes_pb2.ReadBlobRequest(grant=grant.grant, digest=blob.digest)
            assert sum([len(part.data) async for part in node.nodes.ReadBlob(request)]) == blob.size_bytes


async def test_files_are_not_removed_before_their_time(world: World, acme: Client, collector: Collector) -> None:
    with pytest.raises(Crash):
        await publish(world, Fate(at=13), seed=1)
    assert await collector.collect() == 0
    assert len(stored(world.settings)) > 0


async def test_a_publish_that_the_collector_overtook_is_refused_and_what_it_wrote_late_goes_too(
    world: World, acme: Client, collector: Collector, database: TestDatabase
) -> None:
    class SlowBlobs(Blobs):
        async def put(self, folder: str, digest: str, file: Path) -> None:
            if not stored(world.settings):
                make_due(database)
                late = Collector(world.plane.database, self, world.settings, registry=CollectorRegistry())
                await late.collect()  # takes it a first time; the second is a whole grace later
            await super().put(folder, digest, file)

    slow = SlowBlobs(world.settings.store_url)
    metrics = PublishMetrics(CollectorRegistry())
    publisher = Publisher(world.plane.database, slow, world.settings, check=check_here, metrics=metrics)
    with pytest.raises(AbortedError, match="publish again"):
        await publisher.publish("acme", NEVER, parts=parts(1))
    assert len(stored(world.settings)) > 0
    make_due(database)
    await collector.collect()
    assert stored(world.settings) == []
    assert count(database, "uploads") == count(database, "versions") == 0


async def test_files_of_a_deleted_version_stay_while_a_node_may_read_them(
    world: World, acme: Client, collector: Collector, database: TestDatabase
) -> None:
    digest = (await world.publish(acme)).version.digest
    node = await world.node()
    await world.ask(node, acme)
    grant = await node.nodes.GrantBlobs(nodes_pb2.GrantBlobsRequest(version=digest))
    await acme.catalog.DeleteVersion(catalog_pb2.DeleteVersionRequest(adapter="style", version=digest, force=True))
    make_due(database)

    assert await collector.collect() == 0
    request = nodes_pb2.ReadBlobRequest(grant=grant.grant, digest=grant.blobs[0].digest)
    assert sum([len(part.data) async for part in node.nodes.ReadBlob(request)]) == grant.blobs[0].size_bytes
    end_leases(database)
    assert await collector.collect() == 1
    assert stored(world.settings) == []
    with pytest.raises(DataLossError):
        [part async for part in world.plane.blobs.read(f"{digest[:2]}/{digest}", grant.blobs[0].digest, offset=0)]


async def test_a_grant_and_a_deletion_at_once_never_leave_a_reader_without_files(
    world: World, acme: Client, collector: Collector, database: TestDatabase
) -> None:
    node = await world.node()
    for seed in range(8):
        digest = (await world.publish(acme, seed=seed)).version.digest
        await world.ask(node, acme, version=digest)
        delete = catalog_pb2.DeleteVersionRequest(adapter="style", version=digest, force=True)
        grant, _ = await asyncio.gather(
            node.nodes.GrantBlobs(nodes_pb2.GrantBlobsRequest(version=digest)),
            acme.catalog.DeleteVersion(delete),
            return_exceptions=True,
        )
        make_due(database)
        await collector.collect()
        if not isinstance(grant, BaseException):
            assert len(stored(world.settings)) == 2
        end_leases(database)
        make_due(database)
        await collector.collect()
        assert stored(world.settings) == []


async def test_a_store_that_is_away_delays_the_collector_only(
    world: World, acme: Client, database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = world.settings.model_copy(update={"upload_grace_s": 0.2})
    collector = Collector(world.plane.database, world.plane.blobs, settings, registry=CollectorRegistry())
    digest = (await world.publish(acme)).version.digest
    await acme.catalog.DeleteVersion(catalog_pb2.DeleteVersionRequest(adapter="style", version=digest, force=True))
    make_due(database)

    async def away(folder: str) -> int:
        raise UnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(world.plane.blobs, "remove", away)
        assert await collector.collect() == 0
    make_due(database)
    assert await collector.collect() == 1
    assert stored(world.settings) == []


async def test_two_collectors_at_once_remove_everything_once(
    world: World, acme: Client, collector: Collector, database: TestDatabase
) -> None:
    for seed in range(6):
        await world.publish(acme, seed=seed)
    await acme.catalog.DeleteAdapter(catalog_pb2.DeleteAdapterRequest(adapter="style", force=True))
    make_due(database)
    other = Database(world.settings)
    second = Collector(other, Blobs(world.settings.store_url), world.settings, registry=CollectorRegistry())
    gone = await asyncio.gather(collector.collect(), second.collect())
    await other.close()
    assert sum(gone) == 6
    assert stored(world.settings) == []
