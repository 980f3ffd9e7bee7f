"""`make demo`, whole: its exit status is the check of all that it claims."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_ends_well_without_a_terminal() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "demo.run"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    for claim in ("refused: NOT_FOUND", "most adapters in one step", "[pirate v1]", "[pirate v2]", "[haiku]", "[counsel]"):
        assert claim in run.stdout
