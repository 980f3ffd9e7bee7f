"""Plans of what the service asks of a loaded catalogue, as the server made them: by indexes, under the policies."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
from google.protobuf import duration_pb2
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from benchmarks.scale import DEEP, WIDE, Reader, load
from controlplane import publish_staging
from controlplane.blob_grants import BlobGrants
from controlplane.changes import ChangeFeed
from controlplane.db import NODE
from controlplane.identities import Identities
from controlplane.locate import Locator
from controlplane.models import metadata
from controlplane.node_versions import NodeVersion, NodeVersions
from controlplane.nodes import Nodes
from controlplane.outcomes import ArmOutcomes, Outcomes
from controlplane.paging import page_token
from controlplane.placer import _NODES, _VERSIONS
from controlplane.probes import Probes
from controlplane.quotas import Amounts, Demand, QuotaLeases
from controlplane.remembered import Freshness
from controlplane.tickets import ticket
from controlplane.usage import Counts, Entry, Records, UsageLedger
from controlplane.vault import Vault, open_vault
from tests.fixtures.controlplane import AUDITOR, CALLER, OWNER, PUBLISHER, World, serve, settings_for
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import canaries_pb2, catalog_pb2, organizations_pb2, signatures_pb2, tenants_pb2
from veneer.errors import VeneerError
from veneer.local.postgres import Postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_NUM_VERSIONS = 100_000

# Beside the catalogue: what tenants, requests and data planes leave behind. As the owner, without foreign keys and triggers.
_MORE = """
SET session_replication_role = replica;
INSERT INTO organizations (name, max_adapters, max_stored_bytes)
    SELECT 'o' || n, 1000000, 1::bigint << 49 FROM generate_series(1, 20000) n;
UPDATE tenants SET organization = 'o' || (1 + mod(substr(name, 2)::int, 1000)) WHERE name ~ '^t[1-4]...$';
UPDATE tenants SET max_adapters = 1000000, max_stored_bytes = 1::bigint << 49, max_streams = 10 WHERE name IN ('t1000', 'wide');
INSERT INTO nodes (id, name, base_digest, hash)
    SELECT gen_random_uuid(), 'n' || n, (SELECT min(digest) FROM bases), sha256(int8send(n)) FROM generate_series(1, 2000) n;
INSERT INTO organization_keys (organization, id, hash, roles, label)
    SELECT 'o' || (1 + mod(n, 1000)), gen_random_uuid(), sha256(int8send(n)), ARRAY['owner'], '' FROM generate_series(1, 10000) n;
INSERT INTO keys (tenant, id, hash, roles, label)
    SELECT 't' || (1 + mod(n, 10000)), gen_random_uuid(), sha256(int8send(n)), ARRAY['caller'], ''
    FROM generate_series(1, 20000) n;
INSERT INTO requests (tenant, request_id, fingerprint, answer)
    SELECT 't' || (1 + mod(n, 10000)), 'r' || n, '', '{}' FROM generate_series(1, 50000) n;
INSERT INTO organization_requests (organization, request_id, fingerprint, method, answer)
    SELECT 'o' || (1 + mod(n, 1000)), 'r' || n, '', 'm', '{}' FROM generate_series(1, 10000) n;
INSERT INTO uploads (tenant, folder, taken, collect_time)
    SELECT 't' || (1 + mod(n, 10000)), 'f' || n, n <= 20, now() + (CASE WHEN n <= 20 THEN '-1 h' ELSE '1 day' END)::interval
    FROM generate_series(1, 20000) n;
INSERT INTO blob_leases (tenant, folder, node, end_time)
    SELECT 't' || (1 + mod(n, 10000)), 'f' || n, gen_random_uuid(), now() + '1 h'::interval FROM generate_series(1, 50000) n;
INSERT INTO node_versions (tenant, adapter, node, version)
    SELECT v.tenant, v.adapter, n.id, v.digest FROM versions v CROSS JOIN (SELECT id FROM nodes LIMIT 2) n;
INSERT INTO changes (kind, tenant, adapter, version, generation)
    SELECT 1, 't' || (1 + mod(n, 10000)), 'a', '', 0 FROM generate_series(1, 50000) n;
INSERT INTO audit (tenant, actor, action, object)
    SELECT 't' || (1 + mod(n, 10000)), 'a', 'INSERT', 'keys' FROM generate_series(1, 100000) n;
INSERT INTO usage (tenant, hour, owner, adapter, requests, failed_requests, prompt_tokens, cached_tokens, output_tokens)
    SELECT 't' || (1 + mod(n, 10000)), date_trunc('hour', now()) - n * '1 h'::interval, '', '', 1, 0, 1, 0, 1
    FROM generate_series(1, 50000) n;
INSERT INTO quota_leases (tenant, node, requests_reserved, tokens_reserved, streams_reserved, requests_wanted, tokens_wanted,
        streams_wanted, end_time)
    SELECT 't' || (1 + mod(n, 10000)), gen_random_uuid(), 0, 0, 0, 0, 0, 0, now() + '1 h'::interval
    FROM generate_series(1, 20000) n;
INSERT INTO canaries (tenant, adapter, alias, generation, version, stable, steps, step, state, reason, end_time)
    SELECT tenant, adapter, 'stable', 1, digest, digest, '[]', 0, 'STOPPED', '', now() FROM versions WHERE number = 1;
INSERT INTO canary_steps (tenant, adapter, alias, generation, canary, evidence)
    SELECT tenant, adapter, 'stable', 1, 1, '{}' FROM versions WHERE number = 1;
INSERT INTO trusted_keys (tenant, id, name, kind, algorithm, subject, pem)
    SELECT 't' || n, encode(sha256(int8send(n)), 'hex'), 'k', 'KEY', 'ed25519', '', '' FROM generate_series(2, 10000) n;
INSERT INTO signature_policies (tenant, policy) SELECT 't' || n, 'OFF' FROM generate_series(1, 10000) n;
INSERT INTO signatures (tenant, version, bundle, judge_time) SELECT tenant, digest, '', now() FROM versions WHERE number = 2;
INSERT INTO reports (tenant, version, node, fault)
    SELECT tenant, digest, gen_random_uuid(), 'CORRUPT' FROM versions WHERE number = 2;
"""

_EXPLAIN = {
    "session_preload_libraries": "auto_explain",
    "auto_explain.log_min_duration": "0",
    "auto_explain.log_nested_statements": "on",  # inside functions too
}

_LARGE: Final = frozenset(metadata.tables) - {
    "bases", "operators", "nodes", "enrollments", "leaders", "change_floor", "outcome_batches", "usage_journals",  # by data plane
    "outbox",  # what Redis did not take yet
}  # fmt: skip
"""Tables whose rows grow with tenants, adapters, versions, requests."""
_NOT_READ: Final = {"operators", "enrollments", "leaders", "change_floor"}
"""Small ones whose plans are not looked for."""

# A whole table at a time, every ten minutes: what is past its retention.
_TRIM = re.compile(r"DELETE FROM (changes|requests|organization_requests|outbox) WHERE create_time <")


_STEP: Final = canaries_pb2.CanaryStep(weight_percent=50, duration=duration_pb2.Duration(seconds=60), min_requests=10)


@dataclass(frozen=True, slots=True)
class Plan:
    """A statement, and how the server ran it."""

    statement: str
    steps: str


class Plans:
    """What the server logged of one database's statements since this was made."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._start = log.stat().st_size

    def __iter__(self) -> Iterator[Plan]:
        with self._log.open(encoding="utf-8") as log:
            log.seek(self._start)
            for entry in re.split(r"^(?!\t)", log.read(), flags=re.MULTILINE):
                if " plan:\n" in entry:
                    query, nodes = re.split(
                        r"^\t(?=[A-Z][^\n]*\(cost=)", entry.split("Query Text: ", 1)[1], maxsplit=1, flags=re.MULTILINE
                    )
                    yield Plan(" ".join(query.split()), nodes)


@pytest.fixture
def plans(fresh_database: TestDatabase, postgres: Postgres) -> Plans:
    """Plans of a catalogue of 100,000 versions with all that goes with it."""
    url = fresh_database.owner_url.replace("+psycopg", "")
    load(url, Vault(bytes(32)), versions=_NUM_VERSIONS)
    with fresh_database.connect() as connection:
        for statement in _MORE.split(";\n"):
            if statement.strip():
                connection.execute(statement.encode())
        connection.execute("VACUUM ANALYZE")
        name = url.rpartition("/")[2].partition("?")[0]
        for setting, value in _EXPLAIN.items():
            connection.execute(f"ALTER DATABASE {name} SET {setting} = '{value}'".encode())
    return Plans(postgres.process.log)


@pytest.fixture
async def world(fresh_database: TestDatabase, plans: Plans, pepper_file: Path, tmp_path: Path) -> AsyncIterator[World]:
    """A control plane on it."""
    async for one in serve(settings_for(fresh_database, pepper_file, tmp_path)):
        yield one


async def test_nothing_that_is_asked_of_a_large_catalogue_scans_a_table(world: World, plans: Plans) -> None:
    await world.base()
    node = await world.node()
    await _list(world)
    await _write(world)
    await _organize(world)
    await _serve(world, node.secret)

    seen = list(plans)
    told = " ".join(plan.steps for plan in seen)
    assert set(metadata.tables) - {name for name in metadata.tables if re.search(rf"\bon {name}\b", told)} <= _NOT_READ
    scans = {
        f"{found[1]}: {plan.statement}"
        for plan in seen
        if not _TRIM.search(plan.statement)
        for found in re.finditer(r"Seq Scan on (\w+)", plan.steps)
        if found[1] in _LARGE
    }
    assert scans == set()


async def _list(world: World) -> None:
    """Pages, first and last, and resolving."""
    reader = Reader(world.plane.database, Vault(bytes(32)), _NUM_VERSIONS)
    for operation in reader.operations().values():
        await operation(7)
    await reader.freshness.close()
    wide, deep = await world.key(WIDE), await world.key(DEEP)
    await wide.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="a0000007"))
    await deep.tenants.ListKeys(tenants_pb2.ListKeysRequest(page_size=1))
    auditor = await world.key("t77", AUDITOR, OWNER)
    await auditor.tenants.ListAudit(tenants_pb2.ListAuditRequest(page_size=3))
    await auditor.tenants.ListUsage(tenants_pb2.ListUsageRequest(page_size=3))
    await auditor.tenants.ListGrants(tenants_pb2.ListGrantsRequest(page_size=3))
    last = page_token("tenants", ["t9998"])
    for token in ("", last):
        await world.operator.tenants.ListTenants(tenants_pb2.ListTenantsRequest(page_size=5, page_token=token))
    await world.operator.tenants.ListKeys(tenants_pb2.ListKeysRequest(tenant="t77"))


async def _write(world: World) -> None:
    """Publishing under quotas and ceilings, releases, deletion and what collects after it."""
    for tenant in (WIDE, "t1000"):
        client = await world.key(tenant, OWNER, PUBLISHER, CALLER)
        one, two = [(await world.publish(client, "style", seed=seed)).version.digest for seed in (1, 2)]
        for _ in range(2):  # the second is answered from what is stored
            arms = [catalog_pb2.Arm(version=two, weight=1)]
            await client.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms, request_id="move"))
        await client.catalog.Rollback(catalog_pb2.RollbackRequest(adapter="style"))
        await client.catalog.FreezeAlias(catalog_pb2.FreezeAliasRequest(adapter="style", frozen=False))
        await client.catalog.StartCanary(canaries_pb2.StartCanaryRequest(adapter="style", version=two, steps=[_STEP]))
        await world.plane.conductor.look()
        await client.catalog.GetCanary(canaries_pb2.GetCanaryRequest(adapter="style"))
        await client.catalog.StopCanary(canaries_pb2.StopCanaryRequest(adapter="style"))
        await client.catalog.Promote(catalog_pb2.PromoteRequest(adapter="style", version=one))
        await client.tenants.CreateGrant(tenants_pb2.CreateGrantRequest(adapter="style", grantee="t5"))
        await client.tenants.RevokeGrant(tenants_pb2.RevokeGrantRequest(adapter="style", grantee="t5"))
        await client.signatures.ListTrustedKeys(signatures_pb2.ListTrustedKeysRequest())
        await client.signatures.SetSignaturePolicy(
            signatures_pb2.SetSignaturePolicyRequest(policy=signatures_pb2.SIGNATURE_POLICY_OFF)
        )
        await client.tenants.SetFallback(tenants_pb2.SetFallbackRequest(fallback=tenants_pb2.FALLBACK_POLICY_ALLOWED))
        await client.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=two))
        await client.catalog.DeleteVersion(catalog_pb2.DeleteVersionRequest(adapter="style", version=two))
        await client.catalog.DeleteAdapter(catalog_pb2.DeleteAdapterRequest(adapter="style", force=True))
    await world.plane.collector.collect()
    await world.plane.relay.relay_batch()
    await world.plane.relay.measure()


async def _organize(world: World) -> None:
    """Organisations, their tenants and keys, what tenants may use."""
    owner = await world.organization_key("o1")
    for token in ("", page_token("organizations", ["o998"])):
        request = organizations_pb2.ListOrganizationsRequest(page_size=3, page_token=token)
        await world.operator.organizations.ListOrganizations(request)
    await owner.organizations.GetOrganization(organizations_pb2.GetOrganizationRequest())
    await owner.organizations.ListOrganizationKeys(organizations_pb2.ListOrganizationKeysRequest(page_size=3))
    await world.tenant_of(owner, "o1--fresh")
    await owner.tenants.ListTenants(tenants_pb2.ListTenantsRequest(page_size=3))
    await owner.tenants.ListAudit(tenants_pb2.ListAuditRequest(page_size=3))
    await owner.tenants.ListUsage(tenants_pb2.ListUsageRequest(tenant="o1--fresh", page_size=3))
    quotas = tenants_pb2.TenantQuotas(max_streams=7)
    await world.operator.tenants.SetTenantQuotas(tenants_pb2.SetTenantQuotasRequest(tenant="t9", quotas=quotas))


async def _serve(world: World, secret: str) -> None:
    """What data planes ask and tell."""
    plane, vault = world.plane, open_vault(world.settings)
    database = plane.database
    async with database.transaction(NODE) as connection:
        nodes = (await connection.execute(_NODES)).all()
        digest = (await connection.execute(text("SELECT digest FROM versions WHERE tenant = 't7' AND number = 2"))).scalar_one()
        await connection.execute(_VERSIONS, {"digests": [digest]})
    node = str(next(one.id for one in nodes if one.base_digest == "ba" * 32))
    freshness = Freshness(database)
    told = NodeVersions(database, freshness)
    await told.note([NodeVersion("t7", "a", node, digest)])
    identities = Identities(database, vault, freshness)
    grants = BlobGrants(database, vault, plane.blobs, identities=identities, lifetime_s=60, registry=CollectorRegistry())
    await grants.give(node, digest)
    async with database.transaction(NODE) as connection:
        await connection.execute(publish_staging._VERSIONS, {"digests": [digest]})
    await freshness.close()
    feed = ChangeFeed(database)
    await feed.read((await feed.read("", max_changes=9)).next_cursor, max_changes=9)
    await Locator(database, None).locate("t8", "a", owner="t7")
    none = Amounts(0, 0, 0)
    await QuotaLeases(database, vault, lifetime_s=6).lease(
        node, [Demand(tenant="t1000", ticket=ticket(vault, node, "t1000"), held=none, used=none, wanted=none)]
    )
    arm = ArmOutcomes(owner="t7", adapter="a", alias="stable", generation=1, version=digest, ok=1, failed=0)
    await Outcomes(database).add(node, str(uuid.uuid4()), 1, [arm])
    used = Entry(
        tenant="t7", owner="t7", adapter="a", version=digest, ticket=ticket(vault, node, "t7", "t7", "a", digest),
        hour=datetime.now(UTC), counts=Counts(1, 0, 1, 0, 1),
    )  # fmt: skip
    ledger = UsageLedger(database, vault)
    await ledger.take(node, Records("journal", 1, 1), [used])
    await ledger.end(node, "journal")
    with suppress(VeneerError):
        await Probes(database, world.settings).take(node, digest)
    await Nodes(database, vault, world.settings).report(node, digest, fault="CORRUPT")
    await Nodes(database, vault, world.settings).page(page_size=3, token="")
