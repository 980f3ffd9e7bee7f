"""A catalogue of a million versions beside one of a thousand: what reading takes, as the service's role, under its policies."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psycopg

from benchmarks.orphans import BASE, settings_on
from benchmarks.report import Row
from controlplane.catalog import Catalog
from controlplane.db import Database
from controlplane.identities import Identities
from controlplane.node_versions import NodeVersions
from controlplane.paging import page_token
from controlplane.remembered import Freshness
from controlplane.resolve import Reference, Resolver
from controlplane.settings import Settings
from controlplane.vault import Vault, secret_digest
from veneer.local.postgres import Postgres

WIDE, DEEP = "wide", "deep"
"""The tenant with a tenth of all adapters, and the one with an adapter of a hundredth of all versions."""
_NUM_CALLERS = 200

# As the owner, without foreign keys and triggers: what they would write is not read here.
_LOAD = """
SET session_replication_role = replica;
INSERT INTO bases (digest, name, family, num_layers, modules, vocab_size, max_context, known_names)
    VALUES ('{base}', 'bench', 'llama', 1, '[]', 8, 8, '{{}}');
INSERT INTO tenants (name, fallback_allowed, weight)
    SELECT 't' || n, true, 1 FROM generate_series(1, {tenants}) n UNION ALL SELECT unnest(ARRAY['wide', 'deep']), true, 1;
CREATE TEMPORARY TABLE plan AS
    SELECT 'wide' AS tenant, 'a' || lpad(n::text, 7, '0') AS adapter, 1 AS versions FROM generate_series(1, {wide}) n
    UNION ALL SELECT 'deep', 'a', {deep}
    UNION ALL SELECT 't' || n, 'a', {each} FROM generate_series(1, {tenants}) n;
INSERT INTO adapters (tenant, name, num_versions) SELECT tenant, adapter, versions FROM plan;
INSERT INTO versions (tenant, digest, adapter, number, base_digest, state, config_digest, config_bytes, weights_digest,
        weights_bytes, max_rank, report, label)
    SELECT tenant, encode(sha256(convert_to(tenant || '/' || adapter || '/' || number, 'UTF8')), 'hex'), adapter, number,
        '{base}', 'READY', 'c', 1000, 'w', 2000000, 16, '{report}', 'loaded'
    FROM plan, generate_series(1, versions) number;
INSERT INTO aliases (tenant, adapter, name, generation) SELECT tenant, adapter, 'stable', 1 FROM plan;
INSERT INTO arms (tenant, adapter, alias, generation, position, version, weight)
    SELECT tenant, adapter, 'stable', 1, 0, encode(sha256(convert_to(tenant || '/' || adapter || '/1', 'UTF8')), 'hex'), 1
    FROM plan;
INSERT INTO grants (tenant, adapter, grantee)
    SELECT 't' || n, 'a', 't' || (mod(n, {tenants}) + 1) FROM generate_series(1, {tenants}) n WHERE {tenants} > 1;
INSERT INTO keys (tenant, id, hash, roles, label)
    SELECT 't' || n, gen_random_uuid(), decode(hashes[n], 'hex'), ARRAY['caller'], ''
    FROM (SELECT %s::text[] AS hashes) given, generate_series(1, least({callers}, {tenants})) n;
"""
_REPORT = (
    '{"num_pairs": 1, "min_rank": 16, "max_rank": 16, "total_rank_rows": 16, "dtype": "F32", "modules": ["q_proj"],'
    ' "num_layers": 1, "min_scaling": 1, "max_scaling": 1, "max_abs": 1, "warnings": []}'
)


def load(url: str, vault: Vault, *, versions: int, callers: int = _NUM_CALLERS) -> None:
    """Fills a migrated, empty database: a tenth as many tenants as versions, one of them wide and one deep. Blocks.

    Args:
        url: Address of the database, as the owner of its tables.
        vault: Derives the callers' stored credentials; see `secret_of`.
        versions: At least 1,000.
        callers: Tenants with a key.
    """
    tenants, wide, deep = versions // 10, versions // 10, versions // 100
    hashes = [vault.key_hash(secret_digest(secret_of(number))).hex() for number in range(1, callers + 1)]
    each = math.ceil((versions - wide - deep) / tenants)
    script = _LOAD.format(base=BASE.digest, tenants=tenants, wide=wide, deep=deep, each=each, report=_REPORT, callers=callers)
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in script.split(";\n"):
            if statement.strip():
                connection.execute(statement, [hashes] if "%s" in statement else None)
        connection.execute("VACUUM ANALYZE")


def secret_of(number: int) -> str:
    """Key of one of the first tenants."""
    return f"vnr_{number:043d}"


@dataclass(slots=True)
class Reader:
    """The reads of a loaded catalogue, none from memory. Owned by one event loop, and closed at its end."""

    database: Database
    vault: Vault
    versions: int
    freshness: Freshness = field(init=False)

    def __post_init__(self) -> None:
        self.freshness = Freshness(self.database)

    async def close(self) -> None:
        """Closes the database too."""
        await self.freshness.close()
        await self.database.close()

    def operations(self) -> Mapping[str, Callable[[int], Awaitable[object]]]:
        """Reads by name; each takes a number that says of what."""
        catalog = Catalog(self.database)
        identities = Identities(self.database, self.vault, self.freshness)
        resolver = Resolver(self.database, identities, self.vault, self.freshness, NodeVersions(self.database, self.freshness))

        def resolve(number: int) -> Awaitable[object]:
            self.freshness.forget_all()
            key = secret_digest(secret_of(number % tenants + 1))
            return resolver.resolve(key, Reference(adapter="a"), base_digest=BASE.digest)

        wide = self.versions // 10
        last_adapters = page_token("adapters", [f"a{wide - 10:07d}"])
        last_versions = page_token("versions/a", [10])
        tenants = min(_NUM_CALLERS, self.versions // 10)
        return {
            "list_first": lambda _: catalog.adapters(WIDE, page_size=10, token=""),
            "list_last": lambda _: catalog.adapters(WIDE, page_size=10, token=last_adapters),
            "versions_first": lambda _: catalog.versions(DEEP, "a", page_size=10, token=""),
            "versions_last": lambda _: catalog.versions(DEEP, "a", page_size=10, token=last_versions),
            "resolve": resolve,
        }


def measure_scale(folder: Path, *, versions: int, calls: int) -> list[Row]:
    """Reads from both catalogues in turn; the bounded figure is the worst of the operations' quotients of 99th percentiles."""
    vault = Vault(bytes(32))
    with Postgres(folder / "postgres", durable=False, settings={"shared_buffers": "512MB", "max_wal_size": "4GB"}) as postgres:
        sizes = {"small": 1000, "large": versions}
        settings: dict[str, Settings] = {}
        for name, size in sizes.items():
            with psycopg.connect(postgres.url(scheme="postgresql"), autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {name}")
            settings[name] = settings_on(postgres, folder, database=name)
            start = time.monotonic()
            load(postgres.url(scheme="postgresql", database=name), vault, versions=size)
            print(f"{size} versions loaded in {time.monotonic() - start:.0f} s", flush=True)
        times = asyncio.run(_read(settings, sizes, vault, calls=calls))
    rows = []
    worst = 0.0
    for operation in times["small"]:
        small, large = (float(np.percentile(times[name][operation], 99)) for name in ("small", "large"))
        medians = [float(np.median(times[name][operation])) for name in ("small", "large")]
        milliseconds = [f"{value * 1e3:.2f}" for value in (small, large, *medians)]
        print("{}: p99 {} → {} ms, median {} → {} ms".format(operation, *milliseconds), flush=True)
        rows.append(Row(f"scale/{operation}", large / small))
        worst = max(worst, large / small)
    return [Row("scale_p99", worst, "ratio", "<= 2"), *rows]


async def _read(
    settings: Mapping[str, Settings], sizes: Mapping[str, int], vault: Vault, *, calls: int
) -> dict[str, dict[str, list[float]]]:
    readers = {name: Reader(Database(settings[name]), vault, sizes[name]) for name in sizes}
    operations = {name: reader.operations() for name, reader in readers.items()}
    times: dict[str, dict[str, list[float]]] = {name: {one: [] for one in operations[name]} for name in sizes}
    for number in range(-20, calls):  # the first ones open connections
        for operation in operations["small"]:
            for name in sizes:
                start = time.perf_counter()
                await operations[name][operation](number)
                if number >= 0:
                    times[name][operation].append(time.perf_counter() - start)
    for reader in readers.values():
        await reader.close()
    return times
