"""Crashes of publishing, deleting and collecting, a few of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.orphans import measure_orphans


@pytest.mark.slow
def test_nothing_is_left_of_what_no_version_owns(tmp_path: Path) -> None:
    rows = {row.id: row for row in measure_orphans(tmp_path, cycles=10)}
    assert rows["orphan_bytes"].value == 0
    assert rows["orphan_versions"].value > 0
