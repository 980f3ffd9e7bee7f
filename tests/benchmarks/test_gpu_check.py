"""The parts of the check for a GPU, on one; what of them runs without is tried in tests/kernels/gpu."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.gpu_check import PARTS, Part
from tests.test_layers import ROOT


@pytest.mark.gpu
@pytest.mark.timeout(100)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_finds_nothing_wrong(part: Part) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", part.name]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=part.limit_s, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout, "it found something"
