"""What the measurement of a large catalogue reads."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.scale import Reader, load
from controlplane.db import Database
from controlplane.vault import Vault
from tests.fixtures.controlplane import settings_for
from tests.fixtures.services import TestDatabase


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
