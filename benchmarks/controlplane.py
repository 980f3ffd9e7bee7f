"""The control plane in figures: `python -m benchmarks.controlplane [--json PATH] [--only SECTION …]`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.admissions import measure_admissions
from benchmarks.histories.measure import measure_histories
from benchmarks.orphans import measure_orphans
from benchmarks.probing import measure_probing
from benchmarks.publishing import measure_publishing
from benchmarks.report import Row, run_sections
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


if __name__ == "__main__":
    run_sections(sections, description="Measures the control plane on servers of its own.", title="the control plane")
