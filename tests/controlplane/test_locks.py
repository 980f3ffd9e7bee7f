"""Locks exclude each other by kind and name, and no name of one kind is a lock of another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane import locks
from controlplane.db import Database
from controlplane.locks import Lock
from tests.fixtures.controlplane import settings_for
from tests.fixtures.services import TestDatabase


@pytest.fixture
async def opened(database: TestDatabase, pepper_file: Path, tmp_path: Path) -> AsyncIterator[Database]:
    made = Database(settings_for(database, pepper_file, tmp_path))
    yield made
    await made.close()


async def test_a_lock_is_one_transactions_until_it_ends(opened: Database) -> None:
    async with opened.relay.begin() as mine:
        await locks.hold(mine, Lock.QUOTA, "acme")
        async with opened.relay.begin() as theirs:
            assert not await locks.try_hold(theirs, Lock.QUOTA, "acme")
            assert await locks.try_hold(theirs, Lock.QUOTA, "rival")
            for kind in set(Lock) - {Lock.QUOTA}:
                assert await locks.try_hold(theirs, kind, "acme")
    async with opened.relay.begin() as theirs:
        assert await locks.try_hold(theirs, Lock.QUOTA, "acme")


async def test_a_lock_of_a_session_outlives_its_transactions(opened: Database) -> None:
    async with opened.relay.connect() as mine, opened.relay.connect() as theirs:
        assert await locks.try_take(mine, Lock.LEADER, "job")
        await mine.commit()
        assert not await locks.try_take(theirs, Lock.LEADER, "job")
        await theirs.execute(locks.TAKE, locks.parameters(Lock.MIGRATION))
        await locks.let_go(mine, Lock.LEADER, "job")
        await mine.commit()
        assert await locks.try_take(theirs, Lock.LEADER, "job")
        await theirs.invalidate()
