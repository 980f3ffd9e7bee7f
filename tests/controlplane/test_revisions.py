"""What is in a database comes through each revision of its schema and back, or keeps the newer one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from psycopg.types.json import Jsonb
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from controlplane import schema
from controlplane.catalog import Version
from controlplane.schema import migrate
from controlplane.settings import Settings
from tests.controlplane.test_schema import GLOBAL_TABLES, unforced
from tests.fixtures.controlplane import serve, settings_for
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import nodes_pb2
from veneer.local.postgres import Postgres


def take_down(url: str, revision: str) -> None:
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            config = Config()
            config.set_main_option("script_location", str(schema._MIGRATIONS))
            config.attributes["connection"] = connection
            command.downgrade(config, revision)
            connection.commit()
    finally:
        engine.dispose()


def test_the_schema_can_be_taken_down(fresh_database: TestDatabase) -> None:
    take_down(fresh_database.owner_url, "base")
    with fresh_database.connect() as connection:
        left = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    assert left == [("alembic_version",)]


_DIGEST = "ab" * 32
_ANSWERS = "SELECT tenant, request_id, fingerprint, version, alias, create_time FROM publish_requests ORDER BY request_id"
_PUBLISHED = f"""
    SELECT set_config('app.tenant', 'acme', false), set_config('app.scope', 'tenant', false);
    INSERT INTO bases (digest, name, family, num_layers, modules, vocab_size, max_context, known_names)
        VALUES ('{_DIGEST}', 'tiny', 'llama', 1, '[]', 8, 8, '{{}}');
    INSERT INTO tenants (name, fallback_allowed, weight) VALUES ('acme', true, 1);
    INSERT INTO adapters (tenant, name, num_versions) VALUES ('acme', 'style', 1);
    INSERT INTO versions (tenant, digest, adapter, number, base_digest, state, config_digest, config_bytes, weights_digest,
            weights_bytes, max_rank, report, label)
        VALUES ('acme', '{_DIGEST}', 'style', 1, '{_DIGEST}', 'READY', 'c', 1, 'w', 2, 4, '{{"max_rank": 4}}', 'first');
    INSERT INTO publish_requests (tenant, request_id, fingerprint, version, alias)
        VALUES ('acme', 'once', 'f', '{_DIGEST}', '{{"name": "stable"}}'), ('acme', 'other', 'f', '{_DIGEST}', NULL);
"""


def test_what_was_published_comes_through_the_revision_of_releases_and_back(plain_owner: str) -> None:
    settings = Settings(owner_url=plain_owner)
    migrate(settings, revision="0003")
    url = plain_owner.replace("+psycopg", "")
    with psycopg.connect(url.replace("plain_owner@", "postgres@"), autocommit=True) as connection:
        connection.execute(_PUBLISHED)
        before = connection.execute(
            "SELECT tenant, request_id, fingerprint, version, alias, create_time FROM publish_requests ORDER BY request_id"
        ).fetchall()
        migrate(settings, revision="0004")
        rows = connection.execute("SELECT answer FROM requests ORDER BY request_id").fetchall()
        assert [row[0]["alias"] for row in rows] == [{"name": "stable"}, None]
        assert rows[0][0]["version"]["digest"] == _DIGEST
        assert rows[0][0]["version"]["size_bytes"] == 3
        assert rows[0][0]["version"].keys() == {one.name for one in dataclasses.fields(Version)} - {"probe", "signature"}

        take_down(plain_owner, "0003")
        assert (
            connection.execute(
                "SELECT tenant, request_id, fingerprint, version, alias, create_time FROM publish_requests ORDER BY request_id"
            ).fetchall()
            == before
        )
        migrate(settings)
        connection.execute("UPDATE versions SET upload = gen_random_uuid()")
        with pytest.raises(DBAPIError, match="would not find"):
            take_down(plain_owner, "0003")
        assert unforced(TestDatabase(url=url, owner_url=plain_owner.replace("plain_owner@", "postgres@"))) == GLOBAL_TABLES


def test_tenants_of_the_first_schema_have_no_limits_of_their_own_and_keep_the_rest(fresh_database: TestDatabase) -> None:
    from alembic import command
    from alembic.config import Config

    from controlplane import schema

    identify = text("SELECT tenant, weight FROM identify('\\x01')")
    engine = create_engine(fresh_database.owner_url)
    with engine.connect() as connection:
        config = Config()
        config.set_main_option("script_location", str(schema._MIGRATIONS))
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
        connection.execute(text("INSERT INTO tenants (name, fallback_allowed, weight) VALUES ('acme', true, 7)"))
        connection.execute(
            text(
                "INSERT INTO keys (tenant, id, hash, roles, label) "
                "VALUES ('acme', gen_random_uuid(), '\\x01', ARRAY['caller'], '')"
            )
        )
        assert connection.execute(identify).all() == [("acme", 7)]
        command.upgrade(config, "0002")
        assert connection.execute(identify).all() == [("acme", 7)]
        limits = text("SELECT max_rank_rows, max_arena_bytes, max_host_bytes FROM identify('\\x01')")
        assert connection.execute(limits).all() == [(0, 0, 0)]
        connection.execute(text("UPDATE tenants SET max_host_bytes = 1::bigint << 40"))
        assert connection.execute(limits).all() == [(0, 0, 1 << 40)]
        command.downgrade(config, "0001")
        assert connection.execute(text("SELECT * FROM tenants")).mappings().one()["weight"] == 7
        command.upgrade(config, "head")
        connection.commit()
    engine.dispose()


@pytest.fixture
def plain_owner(postgres: Postgres) -> Iterator[str]:
    """Address of a database whose owner is no superuser, as on managed servers."""
    with psycopg.connect(postgres.url(scheme="postgresql"), autocommit=True) as connection:
        connection.execute("CREATE ROLE plain_owner LOGIN CREATEROLE")
        connection.execute("CREATE DATABASE plain OWNER plain_owner")
    yield postgres.url(user="plain_owner", database="plain")
    with psycopg.connect(postgres.url(scheme="postgresql"), autocommit=True) as connection:
        connection.execute("DROP DATABASE plain WITH (FORCE)")
        connection.execute("DROP ROLE plain_owner")


async def test_an_owner_without_the_rights_of_a_superuser_is_enough(plain_owner: str, pepper_file: Path, tmp_path: Path) -> None:
    settings = settings_for(TestDatabase(url=plain_owner, owner_url=plain_owner), pepper_file, tmp_path)
    await asyncio.to_thread(migrate, settings)
    async for world in serve(settings):
        await world.base()
        tenant, node = await world.tenant("acme"), await world.node()
        published = await world.publish(tenant)
        report = nodes_pb2.ReportVersionRequest(version=published.version.digest, fault=nodes_pb2.VERSION_FAULT_CORRUPT)
        assert (await node.nodes.ReportVersion(report)).quarantined

    with psycopg.connect(plain_owner.replace("+psycopg", "")) as connection:
        assert connection.execute("SELECT count(*) FROM versions").fetchone() == (0,)  # the wall is forced on the owner too


def test_tenants_come_through_the_revision_of_quotas_and_back(fresh_database: TestDatabase) -> None:
    quotas = "SELECT max_requests_per_minute, max_stored_bytes FROM quotas_of('acme')"
    take_down(fresh_database.owner_url, "0005")
    with fresh_database.connect() as connection:
        connection.execute("INSERT INTO tenants (name, fallback_allowed, weight) VALUES ('acme', true, 7)")
        migrate(Settings(owner_url=fresh_database.owner_url), revision="0006")
        assert connection.execute(quotas).fetchall() == [(0, 0)]
        connection.execute("UPDATE tenants SET max_stored_bytes = 5")
        with pytest.raises(DBAPIError, match="tenants have quotas"):
            take_down(fresh_database.owner_url, "0005")
        assert connection.execute(quotas).fetchall() == [(0, 5)]
        connection.execute("UPDATE tenants SET max_stored_bytes = 0")
        take_down(fresh_database.owner_url, "0005")
        migrate(Settings(owner_url=fresh_database.owner_url))
        assert connection.execute(quotas).fetchall() == [(0, 0)]
        assert connection.execute("SELECT weight FROM tenants").fetchall() == [(7,)]


def test_auditors_go_with_the_revision_that_brought_them(fresh_database: TestDatabase) -> None:
    made = """
        INSERT INTO tenants (name, fallback_allowed, weight) VALUES ('acme', true, 7);
        INSERT INTO keys (tenant, id, hash, roles, label) VALUES
            ('acme', gen_random_uuid(), '\\x01', ARRAY['auditor'], ''),
            ('acme', gen_random_uuid(), '\\x02', ARRAY['auditor', 'owner'], '')
    """
    with fresh_database.connect() as connection:
        connection.execute(made)
        take_down(fresh_database.owner_url, "0006")
        assert connection.execute("SELECT roles FROM keys").fetchall() == [(["owner"],)]
        migrate(Settings(owner_url=fresh_database.owner_url))
        assert connection.execute("SELECT roles, successor FROM keys").fetchall() == [(["owner"], None)]


def test_tenants_and_keys_of_before_go_on_under_the_revision_of_organisations_and_back(plain_owner: str) -> None:
    made = """
        INSERT INTO tenants (name, fallback_allowed, weight) VALUES ('acme', true, 7);
        INSERT INTO keys (tenant, id, hash, roles, label) VALUES ('acme', gen_random_uuid(), '\\x01', ARRAY['owner'], '');
    """
    added = """
        INSERT INTO organizations (name) VALUES ('group');
        INSERT INTO organization_keys (organization, id, hash, roles, label)
            VALUES ('group', gen_random_uuid(), '\\x02', ARRAY['auditor'], '');
        UPDATE tenants SET organization = 'group';
    """
    removed = "UPDATE tenants SET organization = NULL; DELETE FROM organization_keys; DELETE FROM organizations"
    known = "SELECT kind, tenant, weight FROM identify('\\x01') UNION ALL SELECT kind, tenant, weight FROM identify('\\x02')"
    migrate(Settings(owner_url=plain_owner), revision="0012")
    url = plain_owner.replace("+psycopg", "").replace("plain_owner@", "postgres@")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(made)
        migrate(Settings(owner_url=plain_owner))
        assert connection.execute("SELECT organization FROM tenants").fetchall() == [(None,)]
        connection.execute(added)
        assert connection.execute(known).fetchall() == [("tenant", "acme", 7), ("organization", "group", 0)]
        told = "SELECT object, organization FROM audit WHERE tenant = '' ORDER BY id"
        assert connection.execute(told).fetchall() == [("organizations", "group"), ("organization_keys", "group")]
        with pytest.raises(DBAPIError, match="organisations would be lost"):
            take_down(plain_owner, "0012")
        connection.execute(removed)
        take_down(plain_owner, "0012")
        assert connection.execute(known).fetchall() == [("tenant", "acme", 7)]
        connection.execute("UPDATE tenants SET weight = 8")
        last = "SELECT object, after ->> 'weight' FROM audit ORDER BY id DESC LIMIT 1"
        assert connection.execute(last).fetchall() == [("tenants", "8")]
        migrate(Settings(owner_url=plain_owner))
        assert connection.execute(known).fetchall() == [("tenant", "acme", 8)]


@pytest.mark.parametrize(
    ("part", "kind", "waits", "gone", "revision"),
    [
        ("probe", 5, {"awaits": ""}, [("RetireVersion", {"probe": {"state": "PASSED"}})], "0009"),
        (
            "signature",
            6,
            {},
            [("RetireVersion", {"signature": {"state": "VERIFIED"}}), ("SetSignaturePolicy", "OFF")],
            "0013",
        ),
    ],
    ids=["probe", "signature"],
)
def test_answers_and_changes_lose_what_is_new_on_the_way_back(
    fresh_database: TestDatabase, part: str, kind: int, waits: dict[str, str], gone: list[tuple[str, object]], revision: str
) -> None:
    answered = [("Publish", {"version": {"digest": "d", part: None}, "alias": None} | waits), *gone]
    with fresh_database.connect() as connection:
        connection.execute("INSERT INTO tenants (name, fallback_allowed, weight) VALUES ('acme', true, 7)")
        for number, (method, answer) in enumerate(answered):
            query = "INSERT INTO requests (tenant, request_id, fingerprint, method, answer) VALUES ('acme', %s, '\\x01', %s, %s)"
            connection.execute(query, [str(number), method, Jsonb(answer)])
        for table, one in (("changes", 1), ("changes", kind), ("outbox", kind)):
            query = f"INSERT INTO {table} (kind, tenant, adapter, version, generation) VALUES (%s, 'acme', 'a', 'v', 0)"
            connection.execute(query, [one])
        take_down(fresh_database.owner_url, revision)
        left = connection.execute("SELECT method, answer FROM requests").fetchall()
        assert left == [("Publish", {"version": {"digest": "d"}, "alias": None})]
        assert connection.execute("SELECT kind FROM changes UNION ALL SELECT kind FROM outbox").fetchall() == [(1,)]
        migrate(Settings(owner_url=fresh_database.owner_url))
        assert connection.execute(f"SELECT {part} FROM versions").fetchall() == []


def test_a_version_keeps_its_last_signature_on_the_way_back(plain_owner: str) -> None:
    migrate(Settings(owner_url=plain_owner))
    url = plain_owner.replace("+psycopg", "").replace("plain_owner@", "postgres@")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_PUBLISHED.partition("INSERT INTO publish_requests")[0])
        for number in range(3):
            values = f"('acme', '{_DIGEST}', {number}, '\\x0{number}', now())"
            connection.execute(f"INSERT INTO signatures (tenant, version, number, bundle, judge_time) VALUES {values}")
        connection.execute("""
            INSERT INTO requests (tenant, request_id, fingerprint, method, answer)
                VALUES ('acme', 'attached', '\\x01', 'AttachSignature', '{"state": "VERIFIED"}')
        """)
        take_down(plain_owner, "0014")
        assert connection.execute("SELECT version, bundle FROM signatures").fetchall() == [(_DIGEST, b"\x02")]
        assert connection.execute("SELECT request_id FROM requests").fetchall() == []
        migrate(Settings(owner_url=plain_owner))
        assert connection.execute("SELECT number, bundle FROM signatures").fetchall() == [(0, b"\x02")]


_CANARY = f"""
    INSERT INTO aliases (tenant, adapter, name, generation) VALUES ('acme', 'style', 'stable', 1);
    INSERT INTO canaries (tenant, adapter, alias, generation, version, stable, steps, step, state, reason)
        VALUES ('acme', 'style', 'stable', 1, '{_DIGEST}', '{_DIGEST}', '[]', 0, 'RUNNING', '')
"""
_USE = """
    INSERT INTO usage (tenant, hour, owner, adapter, requests, failed_requests, prompt_tokens, cached_tokens, output_tokens)
        VALUES ('acme', now(), 'acme', 'style', 1, 0, 2, 0, 3)
"""


@pytest.mark.parametrize(
    ("made", "ended", "revision", "refusal"),
    [
        (_USE, "DELETE FROM usage", "0008", "ledger of use would be lost"),
        (
            "INSERT INTO signature_policies (tenant, policy) VALUES ('acme', 'REQUIRE')",
            "UPDATE signature_policies SET policy = 'OFF'",
            "0013",
            "nothing would check",
        ),
        (_CANARY, "UPDATE canaries SET state = 'STOPPED', end_time = now()", "0007", "canaries are running"),
    ],
    ids=["use", "signatures", "canary"],
)
def test_what_an_older_schema_would_lose_keeps_the_newer_one(
    plain_owner: str, made: str, ended: str, revision: str, refusal: str
) -> None:
    migrate(Settings(owner_url=plain_owner))
    url = plain_owner.replace("+psycopg", "").replace("plain_owner@", "postgres@")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_PUBLISHED.partition("INSERT INTO publish_requests")[0])
        connection.execute(made)
        with pytest.raises(DBAPIError, match=refusal):
            take_down(plain_owner, revision)
        connection.execute(ended)
        take_down(plain_owner, revision)
