"""Rows of a benchmark's result: printed as a table, written as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        id: Name of the figure, stable over releases.
        value: What was measured.
        unit: Unit of value; `ratio` for quotients of two measurements of the same run.
        target: Bound, e.g. `>= 0.6`; empty for a figure that is only reported.
    """

    id: str
    value: float
    unit: str = "ratio"
    target: str = ""

    @property
    def meets(self) -> bool | None:
        """Whether the bound holds; None without one."""
        if not self.target:
            return None
        relation, bound = self.target.split()
        return self.value >= float(bound) if relation == ">=" else self.value <= float(bound)


def parser(description: str) -> argparse.ArgumentParser:
    """Returns an argument parser with the options that every benchmark has."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--json", type=Path, metavar="PATH", help="write the rows there as a list of objects")
    return arguments


def publish(rows: Sequence[Row], *, path: Path | None, title: str) -> bool:
    """Prints the table, writes the JSON if asked to, and returns whether every bound holds."""
    table = Table(title=title)
    for column in ("id", "value", "unit", "target", "meets"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for row in rows:
        verdict = "" if row.meets is None else "yes" if row.meets else "NO"
        table.add_row(row.id, f"{row.value:.4g}", row.unit, row.target, verdict)
    Console(width=100).print(table)
    if path is not None:
        path.write_text(json.dumps([{**asdict(row), "meets": row.meets} for row in rows], indent=1) + "\n")
    return all(row.meets is not False for row in rows)
