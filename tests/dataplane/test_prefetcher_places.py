"""Where the prefetcher believes a version to be, and what those who wait for it hear of that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dataplane.engine.messages import Unloaded
from tests.dataplane.doubles import VERSION
from tests.dataplane.test_prefetcher import Rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    await rig.prefetcher.close()


async def test_who_waits_hears_that_the_device_has_a_copy(rig: Rig) -> None:
    claim = rig.prefetcher.ensure(VERSION)
    await claim.loaded
    assert not claim.placed.done()
    rig.prefetcher.moved(VERSION, "device", seconds=0.1)
    assert claim.placed.done()
    assert rig.prefetcher.ensure(VERSION).placed.done()
    rig.prefetcher.moved(VERSION, "host", seconds=0.0, reason="room")
    assert not rig.prefetcher.ensure(VERSION).placed.done()


@pytest.mark.parametrize("came_back", [False, True])
async def test_a_move_that_was_told_late_leaves_nothing_behind_what_is_proved_gone(rig: Rig, came_back: bool) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.unload(VERSION)
    rig.prefetcher.moved(VERSION, "device", seconds=0.1)  # sent before the engine heard that it goes
    rig.prefetcher.unloaded(Unloaded(VERSION, came_back=came_back))
    assert rig.prefetcher.ensure(VERSION).level == ("device" if came_back else "store")
