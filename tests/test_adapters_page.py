"""The page of adapter formats is what the table says."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "adapters.py"))["render"]()
    assert (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8") == page, "run: make format"
