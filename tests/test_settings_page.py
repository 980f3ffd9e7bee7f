"""The page of settings is what the classes say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = runpy.run_path(str(ROOT / "docs" / "settings.py"))


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == PAGE["render"](), "run: make format"


@pytest.mark.parametrize("plane", PAGE["PLANES"])
def test_every_setting_is_described_and_nothing_else_is(plane: str) -> None:
    settings = __import__(f"{plane}.settings", fromlist=["Settings"]).Settings

    assert sorted(PAGE["descriptions"](settings)) == sorted(settings.model_fields)
    assert settings.model_config["env_prefix"] == f"VENEER_{plane.upper()}_"
