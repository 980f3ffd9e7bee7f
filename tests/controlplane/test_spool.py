"""Folders of uploads: gone when an upload ends, and swept when its process was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.spool import CONFIG, WEIGHTS, Part, Spool, remove_abandoned

_LIMITS = {CONFIG: 100, WEIGHTS: 100}
# Ends as a kill would: no block is left, nothing is cleaned up.
_KILLED = """
import asyncio, os, sys
from pathlib import Path
from controlplane.spool import Spool
async def main():
    async with Spool(Path(sys.argv[1]), {}, part_timeout_s=1):
        os._exit(9)
asyncio.run(main())
"""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The folder of an upload whose process was killed."""
    assert subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False).returncode == 9
    [folder] = tmp_path.iterdir()
    return folder


async def test_what_a_killed_process_left_is_removed_and_a_running_upload_stays(tmp_path: Path, left: Path) -> None:
    other = tmp_path / "something-else"
    other.mkdir()
    async with Spool(tmp_path, _LIMITS, part_timeout_s=1) as spool:
        received = await spool.receive(_parts())
        for folder in tmp_path.iterdir():
            os.utime(folder, (0, 0))

        assert remove_abandoned(tmp_path) == 1

        assert not left.exists()
        assert received[WEIGHTS].path.read_bytes() == b"weights"
    assert list(tmp_path.iterdir()) == [other]


def test_a_folder_that_was_just_made_is_left_the_time_to_be_locked(tmp_path: Path) -> None:
    (tmp_path / "veneer-publish-new").mkdir()
    assert remove_abandoned(tmp_path) == 0
    assert remove_abandoned(tmp_path / "absent") == 0


async def _parts() -> AsyncIterator[Part]:
    yield Part(CONFIG, b"{}")
    yield Part(WEIGHTS, b"weights")
