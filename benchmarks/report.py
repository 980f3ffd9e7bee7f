"""Rows of a benchmark's result: a table, JSON, and from JSON Markdown (`python -m benchmarks.report FILE …`)."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

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
        needs: Rows without whose bounds this one's does not count: what it divides by must be good for something.
    """

    id: str
    value: float
    unit: str = "ratio"
    target: str = ""
    needs: tuple[str, ...] = ()

    @property
    def meets(self) -> bool | None:
        """Whether the bound holds, seen alone; None without one. A value that is no number holds none."""
        if not self.target:
            return None
        relation, bound = self.target.split()
        return self.value >= float(bound) if relation == ">=" else self.value <= float(bound)


def judge(rows: Sequence[Row]) -> list[bool | None]:
    """Returns whether each row's bound holds, and those of the rows that it needs as well; None without a bound."""
    held = {row.id for row in rows if row.meets}
    return [row.meets and held.issuperset(row.needs) for row in rows]


def parser(description: str) -> argparse.ArgumentParser:
    """Returns an argument parser with the options that every benchmark has."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--json", type=Path, metavar="PATH", help="write the rows there as a list of objects")
    return arguments


def publish(rows: Sequence[Row], *, path: Path | None, title: str) -> bool:
    """Prints the table, writes the JSON if asked to, and returns whether every bound holds.

    Rows with a slash in their id are cells of a table that their section has printed; they are in the JSON only.
    """
    table = Table(title=title)
    for column in ("id", "value", "unit", "target", "meets"):
        table.add_column(column, justify="right" if column == "value" else "left")
    verdicts = judge(rows)
    for row, holds in zip(rows, verdicts, strict=True):
        if "/" in row.id:
            continue
        verdict = "" if holds is None else "yes" if holds else "NO"
        table.add_row(row.id, f"{row.value:.4g}", row.unit, row.target, verdict)
    Console(width=100).print(table)
    if path is not None:
        listed = [
            {**asdict(row), "value": None if math.isnan(row.value) else row.value, "meets": holds}
            for row, holds in zip(rows, verdicts, strict=True)
        ]
        path.write_text(json.dumps(listed, indent=1) + "\n")
    return all(holds is not False for holds in verdicts)


class Sections(Protocol):
    """What a program can measure, by name; each section has a folder of its own name in `folder`, made before it runs."""

    def __call__(self, folder: Path, *, short: bool) -> dict[str, Callable[[], list[Row]]]:
        """Returns the sections; `short` asks for a small part of each."""


def run_sections(sections: Sections, *, description: str, title: str) -> None:
    """Runs the sections that the command line names, each in a folder of its own, prints their rows, and ends the program.

    The exit status is 0 if every bound holds.
    """
    arguments = parser(description)
    arguments.add_argument("--only", nargs="+", metavar="SECTION", help="sections to measure (default: all)")
    arguments.add_argument("--short", action="store_true", help="a small part of it, to see that it works")
    options = arguments.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="veneer-bench-") as folder:
        known = sections(Path(folder), short=options.short)
        if unknown := set(options.only or ()) - set(known):
            arguments.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        for section in options.only or known:
            start_s = time.monotonic()
            Path(folder, section).mkdir()
            rows += known[section]()
            print(f"── {section}: {time.monotonic() - start_s:.0f} s ──", flush=True)
    raise SystemExit(0 if publish(rows, path=options.json, title=title) else 1)


def markdown(listed: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows, as the JSON has them, as tables: bounded figures, then what is only reported; no cells of other tables."""
    bounded = ["| id | value | must be | holds |", "|---|---|---|---|"]
    reported = ["| id | value | unit |", "|---|---|---|"]
    for row in listed:
        if "/" in row["id"]:
            continue
        value = "not compared" if row["value"] is None else f"{row['value']:.3g}"
        if row["target"]:
            bounded.append(f"| `{row['id']}` | {value} | {row['target']} | {'yes' if row['meets'] else '**no**'} |")
        else:
            reported.append(f"| `{row['id']}` | {value} | {row['unit']} |")
    return "\n".join([*bounded, "", *reported])


def main() -> None:
    """Prints files that `--json` wrote."""
    arguments = argparse.ArgumentParser(description="Prints results as tables in Markdown.")
    arguments.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what --json wrote")
    print(markdown([row for path in arguments.parse_args().files for row in json.loads(path.read_text())]))


if __name__ == "__main__":
    main()
