"""Abuse in figures: `python -m benchmarks.abuse [--json PATH] [--only SECTION …] [--short]`.

Each section starts a system of its own, measures a victim alone, attacks, and measures the victim again in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.abuse.bursts import measure_bursts
from benchmarks.abuse.grammars import measure_grammars
from benchmarks.abuse.templates import measure_templates
from benchmarks.abuse.unknown_keys import measure_unknown_keys
from benchmarks.abuse.uploads import measure_uploads
from benchmarks.report import Row, run_sections


def sections(folder: Path, *, short: bool) -> dict[str, Callable[[], list[Row]]]:
    """Returns what there is to measure, by name; servers and stores go into the folder of each section."""
    return {
        "uploads": lambda: measure_uploads(folder / "uploads", rounds=3 if short else 15),
        "grammars": lambda: measure_grammars(folder / "grammars", short=short),
        "templates": lambda: measure_templates(folder / "templates", short=short),
        "bursts": lambda: measure_bursts(folder / "bursts", calls=300 if short else 6000, seconds=1.0 if short else 5.0),
        "unknown_keys": lambda: measure_unknown_keys(folder / "unknown_keys", calls=100 if short else 500),
    }


if __name__ == "__main__":
    run_sections(sections, description="Measures what attacks of one caller do to others, on systems of its own.", title="abuse")
