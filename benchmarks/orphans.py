"""What crashes leave in the object store: processes that publish, delete and collect are killed, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import itertools
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from prometheus_client import CollectorRegistry
from safetensors.numpy import save

from benchmarks.report import Row
from controlplane.bases import Bases
from controlplane.blobs import Blobs, upload_folder
from controlplane.catalog import Catalog
from controlplane.collector import Collector
from controlplane.db import OPERATOR, Database
from controlplane.deletion import Deletion
from controlplane.publish import Publisher, PublishMetrics
from controlplane.publish_order import PublishOrder
from controlplane.schema import migrate
from controlplane.settings import Settings
from controlplane.spool import CONFIG, WEIGHTS, Part
from veneer.artifact import BaseDescription, Limits, Report, TargetModule, check
from veneer.errors import VeneerError
from veneer.local.postgres import Postgres

_TENANT = "bench"
_HIDDEN, _RANK = 256, 8
_NUM_ADAPTERS = 5
_GRACE_S = 4.0
_LONGEST_S = 0.5
"""A process is killed after a random part of this, counted from its first answer of the database."""
BASE = BaseDescription(
    "ba" * 32,
    "bench",
    "llama",
    1,
    (TargetModule("model.layers.{layer}.self_attn.q_proj", "qkv", _HIDDEN, _HIDDEN),),
    vocab_size=32,
    max_context=64,
)
"""One layer with one projection."""


def small_adapter(seed: int) -> tuple[bytes, bytes]:
    """Config and weights of an adapter of 16 KiB for `BASE`."""
    generator = np.random.default_rng(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": generator.standard_normal((_RANK, _HIDDEN)).astype(np.float32),
        f"{prefix}.lora_B.weight": generator.standard_normal((_HIDDEN, _RANK)).astype(np.float32),
    }
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}
    return json.dumps(config).encode(), save(tensors)


async def check_unjailed(
    config_path: Path, weights_path: Path, base: BaseDescription, limits: Limits, *, timeout_s: float
) -> Report:
    """Checks files of ours without a jail."""
    del timeout_s

    def run() -> Report:
        return check(config_path.read_bytes(), io.BytesIO(weights_path.read_bytes()), base, limits).report

    return await asyncio.to_thread(run)


class Plane:
    """The use cases of a control-plane process without its listeners. Owned by one event loop."""

    def __init__(self, settings: Settings) -> None:
        registry = CollectorRegistry()
        self.database = Database(settings)
        self.blobs = Blobs(settings.store_url)
        self.publisher = Publisher(
            self.database, self.blobs, settings, check=check_unjailed, metrics=PublishMetrics(CollectorRegistry())
        )
        self.deletion = Deletion(self.database, grace_s=settings.delete_grace_s)
        self.catalog = Catalog(self.database)
        self.collector = Collector(self.database, self.blobs, settings, registry=registry)

    async def publish(self, number: int, *, tenant: str = _TENANT) -> None:
        """Publishes a version, under a request_id that is its number."""
        config, weights = small_adapter(number)

        async def parts() -> AsyncIterator[Part]:
            yield Part(CONFIG, config)
            yield Part(WEIGHTS, weights)

        order = PublishOrder(adapter=f"adapter-{number % _NUM_ADAPTERS}", base=BASE.digest, request_id=f"publish-{number}")
        await self.publisher.publish(tenant, order, parts=parts())


def settings_on(postgres: Postgres, folder: Path, *, database: str = "postgres", **more: object) -> Settings:
    """Settings of a control plane on a server of the benchmark's own; migrates the database."""
    fields = {
        "database_url": postgres.url(user="nobody", scheme="postgresql", database=database),
        "owner_url": postgres.url(scheme="postgresql", database=database),
        "store_url": (folder / "store").as_uri(),
        "spool_folder": folder,
        "pool_size": 2,
        "pool_overflow": 2,
        "connect_timeout_s": 10,
        **more,
    }
    settings = Settings.model_validate(fields)
    migrate(settings)
    return settings


async def make_tenant(database: Database, *names: str) -> None:
    """Registers the base, and makes tenants."""
    await Bases(database).register(BASE)
    async with database.transaction(OPERATOR) as connection:
        driver = await connection.get_raw_connection()
        assert driver.driver_connection is not None
        for name in names:
            await driver.driver_connection.execute(
                "INSERT INTO tenants (name, fallback_allowed, weight) VALUES (%s, true, 1)", [name]
            )


def measure_orphans(folder: Path, *, cycles: int) -> list[Row]:
    """Publishes, deletes and collects in processes that are killed, then collects once more and looks at every file.

    Raises:
        RuntimeError: A version has lost a file, or there are two for one publish.
    """
    with Postgres(folder / "postgres", durable=False) as postgres:
        settings = settings_on(postgres, folder, upload_grace_s=_GRACE_S, delete_grace_s=0.0)
        _in_child(lambda: _prepare(settings))
        chance = random.Random(7)
        start = time.monotonic()
        for number in range(cycles):
            _kill_within(functools.partial(_cycle, settings, number), seconds=chance.uniform(0, _LONGEST_S))
        left = _files(folder / "store")
        time.sleep(_GRACE_S)  # the grace of what was written last; the one after it is below
        _in_child(lambda: _collect_all(settings))
        with psycopg.connect(postgres.url(scheme="postgresql")) as connection:
            rows = connection.execute(
                "SELECT digest, upload, config_digest, config_bytes, weights_digest, weights_bytes FROM versions"
            ).fetchall()
            doubled = connection.execute(
                "SELECT count(*) FROM (SELECT FROM versions GROUP BY tenant, adapter, number HAVING count(*) > 1) t"
            ).fetchone()
            [published] = connection.execute("SELECT coalesce(sum(num_versions), 0)::bigint FROM adapters").fetchone() or (0,)
        owned = {f"{upload_folder(row[0], row[1])}/{row[at]}": row[at + 1] for row in rows for at in (2, 4)}
    found = _files(folder / "store")
    lost = {path for path, size in owned.items() if found.get(path) != size}
    if lost or doubled != (0,):
        raise RuntimeError(f"{len(lost)} files of versions are lost or cut short, {doubled} numbers were given twice")
    orphans = sum(size for path, size in found.items() if path not in owned)
    seconds = time.monotonic() - start
    print(
        f"{cycles} processes killed in {seconds:.0f} s; {published} versions were published, {len(rows)} are left; "
        f"{len(left)} files before the last collection, {len(found)} after",
        flush=True,
    )
    return [Row("orphan_bytes", orphans, "bytes", "<= 0"), Row("orphan_versions", published, "versions")]


def _in_child(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a coroutine in a forked process to its end.

    Raises:
        RuntimeError: It failed.
    """
    child = _fork(make)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError("a process of the benchmark failed")


def _kill_within(make: Callable[[int], Coroutine[Any, Any, None]], *, seconds: float) -> None:
    """Runs a coroutine in a forked process, and kills that so long after it has written to the pipe that it is given."""
    reader, writer = os.pipe()
    child = _fork(lambda: make(writer))
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _fork(make: Callable[[], Coroutine[Any, Any, None]]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            asyncio.run(make())
            status = 0
        finally:
            os._exit(status)
    return child


async def _prepare(settings: Settings) -> None:
    database = Database(settings)
    await make_tenant(database, _TENANT)
    await database.close()


async def _cycle(settings: Settings, number: int, writer: int) -> None:
    """Publishes, deletes and collects without end; the publish that was cut off is repeated first, as its caller would."""
    plane = Plane(settings)
    chance = random.Random(number)
    await Bases(plane.database).find(BASE.digest)
    os.write(writer, b"!")
    for again in itertools.count():
        this = number * 1000 + again
        for what in (max(this - 1000, 0), this) if again == 0 else (this,):
            with contextlib.suppress(VeneerError):
                await plane.publish(what)
        with contextlib.suppress(VeneerError):
            adapter = f"adapter-{chance.randrange(_NUM_ADAPTERS)}"
            versions, _ = await plane.catalog.versions(_TENANT, adapter, page_size=50, token="")
            if chance.random() < 0.05:
                await plane.deletion.adapter(_TENANT, adapter, force=True)
            elif len(versions) > 2:
                await plane.deletion.version(_TENANT, adapter, chance.choice(versions).digest, force=True)
        with contextlib.suppress(VeneerError):
            await plane.collector.collect()


async def _collect_all(settings: Settings) -> None:
    """Collects until the list is empty: what is due now, and a grace later what was never published."""
    plane = Plane(settings)
    deadline = time.monotonic() + 5 * _GRACE_S
    while time.monotonic() < deadline:
        await plane.collector.collect()
        async with plane.database.relay.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            cursor = await driver.execute("SELECT count(*) FROM uploads")
            if await cursor.fetchone() == (0,):
                return
        await asyncio.sleep(0.2)
    raise RuntimeError("the collector's list does not become empty")


def _files(store: Path) -> dict[str, int]:
    """Size of every file of the store by path, what no listing shows included."""
    return {str(path.relative_to(store)): path.stat().st_size for path in store.rglob("*") if path.is_file()}
