"""Rows, their bounds, and the two forms in which they are given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.report import Row, judge, markdown, publish


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        (Row("speed", 0.85, target=">= 0.85"), True),
        (Row("speed", 0.84, target=">= 0.85"), False),
        (Row("time", 1.2, target="<= 1.2"), True),
        (Row("time", 1.21, target="<= 1.2"), False),
        (Row("not compared", math.nan, target=">= 7"), False),
        (Row("reported", 3.0), None),
    ],
)
def test_a_row_holds_its_bound_or_has_none(row: Row, holds: bool | None) -> None:
    assert row.meets is holds


@pytest.mark.parametrize(("overhead", "counts"), [(0.9, True), (0.5, False)])
def test_a_row_counts_only_while_the_rows_that_it_needs_hold(overhead: float, counts: bool) -> None:
    rows = [Row("base", overhead, target=">= 0.85"), Row("mixed", 0.7, target=">= 0.6", needs=("base",))]
    assert judge(rows) == [counts, counts]


def test_a_row_does_not_count_without_the_rows_that_it_needs() -> None:
    assert judge([Row("mixed", 0.7, target=">= 0.6", needs=("base",)), Row("reported", 1.0)]) == [False, None]


def test_the_json_has_every_row_and_the_table_all_but_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("speed", 0.9, target=">= 0.85"), Row("sweep/streams=8/itl_p50", 12.5, unit="ms")]
    assert publish(rows, path=tmp_path / "rows.json", title="figures")
    assert json.loads((tmp_path / "rows.json").read_text()) == [
        {"id": "speed", "value": 0.9, "unit": "ratio", "target": ">= 0.85", "needs": [], "meets": True},
        {"id": "sweep/streams=8/itl_p50", "value": 12.5, "unit": "ms", "target": "", "needs": [], "meets": None},
    ]
    printed = capsys.readouterr().out
    assert "speed" in printed
    assert "sweep" not in printed


def test_one_bound_that_does_not_hold_fails_the_whole() -> None:
    assert not publish([Row("a", 1.0, target=">= 0.5"), Row("b", 0.1, target=">= 0.5")], path=None, title="figures")


def test_a_file_becomes_tables_in_markdown(tmp_path: Path) -> None:
    rows = [
        Row("speed", 0.9123, target=">= 0.85"),
        Row("step", 56.27, unit="ms"),
        Row("breakdown/1 row/head", 1.0, unit="ms"),
        Row("mixed_vs_vllm", math.nan, target=">= 7"),
    ]
    publish(rows, path=tmp_path / "rows.json", title="figures")
    assert markdown(json.loads((tmp_path / "rows.json").read_text())).splitlines() == [
        "| id | value | must be | holds |",
        "|---|---|---|---|",
        "| `speed` | 0.912 | >= 0.85 | yes |",
        "| `mixed_vs_vllm` | not compared | >= 7 | **no** |",
        "",
        "| id | value | unit |",
        "|---|---|---|",
        "| `step` | 56.3 | ms |",
    ]
