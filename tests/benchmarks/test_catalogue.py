"""A catalogue behind both planes, on a tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.catalogue import Stack, measure_cycles, measure_store
from tests.fixtures.stack import write_tiny_model


@pytest.mark.slow
def test_a_catalogue_is_published_once_and_served_from_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model")
    stack = Stack(tmp_path / "stack", model, catalogue=12, room=9)
    with stack.running():
        rows = {row.id: row.value for row in asyncio.run(measure_store(stack, count=2))}
    assert rows["cold_ttft_store_loads"] == 2
    again = Stack(tmp_path / "stack", model, catalogue=12, room=9)
    with again.running():
        rows = {row.id: row.value for row in asyncio.run(measure_cycles(again, first=1, last=2))}
    assert rows["rss_cycles"] > 0.5
    assert capsys.readouterr().out.count("published 12 adapters") == 1
