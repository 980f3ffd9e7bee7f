"""The control plane in figures: `python -m benchmarks.controlplane [--json PATH] [--only SECTION …]`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import report
from benchmarks.admissions import measure_admissions
from benchmarks.histories.measure import measure_histories
from benchmarks.orphans import measure_orphans
from benchmarks.probing import measure_probing
from benchmarks.publishing import measure_publishing
from benchmarks.report import Row
from benchmarks.resolving import measure_resolving
from benchmarks.scale import measure_scale


def sections(folder: Path, *, short: bool) -> dict[str, Callable[[], list[Row]]]:
    """Returns what there is to measure, by name; servers and stores go into the folder."""
    return {
        "scale": lambda: measure_scale(folder / "scale", versions=50_000 if short else 1_000_000, calls=50 if short else 500),
        "histories": lambda: measure_histories(folder / "histories", count=3 if short else 50),
        "orphans": lambda: measure_orphans(folder / "orphans", cycles=25 if short else 500),
        "resolving": lambda: measure_resolving(folder / "resolving", callers=200 if short else 1000, rounds=3 if short else 7),
        "publishing": lambda: measure_publishing(folder / "publishing", uploads=24 if short else 200, rounds=5 if short else 30),
        "probing": lambda: measure_probing(folder / "probing", rounds=5 if short else 30),
        "admissions": lambda: measure_admissions(folder / "admissions", moves=10 if short else 100, revokes=3 if short else 20),
    }


def main() -> None:
    """Entry point."""
    parser = report.parser("Measures the control plane on servers of its own.")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="sections to measure (default: all)")
    parser.add_argument("--short", action="store_true", help="a twentieth of it, to see that it works")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="veneer-bench-") as name:
        known = sections(Path(name), short=arguments.short)
        if unknown := set(arguments.only or ()) - set(known):
            parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        for section in arguments.only or known:
            start = time.monotonic()
            (Path(name) / section).mkdir()
            rows += known[section]()
            print(f"── {section}: {time.monotonic() - start:.0f} s ──", flush=True)
    raise SystemExit(0 if report.publish(rows, path=arguments.json, title="the control plane") else 1)


if __name__ == "__main__":
    main()
