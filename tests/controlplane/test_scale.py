"""Plans of the hot path on a loaded catalogue: by indexes, under the policies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import event

from benchmarks.scale import Reader, load
from controlplane.db import Database
from controlplane.pipeline import Pipeline, Statement
from controlplane.settings import Settings
from controlplane.vault import Vault
from tests.fixtures.controlplane import settings_for
from tests.fixtures.services import TestDatabase


@pytest.fixture
def loaded(fresh_database: TestDatabase, tmp_path: Any) -> Settings:
    """Settings on a catalogue of 100,000 versions."""
    load(fresh_database.owner_url.replace("+psycopg", ""), Vault(bytes(32)), versions=100_000)
    return settings_for(fresh_database, tmp_path / "none", tmp_path)


@pytest.mark.slow
async def test_reads_of_a_large_catalogue_scan_no_table(loaded: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(loaded)
    plans: dict[str, str] = {}

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        if "set_config" not in statement and "FROM" in statement:
            cursor.execute(f"EXPLAIN {statement}", parameters)
            plans[statement] = "\n".join(row[0] for row in cursor.fetchall())

    event.listen(database.app.sync_engine, "before_cursor_execute", explain)
    ask = Pipeline.ask

    async def explained(self: Pipeline, *steps: tuple[Statement, Sequence[bytes | None]]) -> Any:
        for statement, parameters in steps:
            if statement.name in ("identify", "by_alias") and statement.sql not in plans:
                plan = Statement(f"plan of {statement.name}", f"EXPLAIN (GENERIC_PLAN) {statement.sql}")
                await self.prepare(plan)
                [rows] = await ask(self, (plan, parameters))
                plans[statement.sql] = "\n".join(row[0] for row in rows)
        return await ask(self, *steps)

    monkeypatch.setattr(Pipeline, "ask", explained)
    reader = Reader(database, Vault(bytes(32)), 100_000)
    for operation in reader.operations().values():
        await operation(7)
    await reader.close()

    assert len(plans) >= 6
    scans = [line for plan in plans.values() for line in plan.splitlines() if "Seq Scan" in line]
    assert scans == []


async def test_a_small_catalogue_is_read_by_the_same_calls(fresh_database: TestDatabase, tmp_path: Any) -> None:
    vault = Vault(bytes(32))
    await asyncio.to_thread(load, fresh_database.owner_url.replace("+psycopg", ""), vault, versions=1000)
    database = Database(settings_for(fresh_database, tmp_path / "none", tmp_path))
    reader = Reader(database, vault, 1000)
    operations = reader.operations()
    adapters, token = await operations["list_last"](0)  # type: ignore[misc]
    assert ([one.name for one in adapters], token) == ([f"a{number:07d}" for number in range(91, 101)], "")
    versions, token = await operations["versions_last"](0)  # type: ignore[misc]
    assert ([one.number for one in versions], token) == (list(range(9, 0, -1)), "")
    resolved: Any = await operations["resolve"](3)
    assert [arm.number for arm in resolved.outcome.arms] == [1]
    await reader.close()
