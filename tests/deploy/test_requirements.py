"""What the image installs is what the extras name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def printed(*arguments: str) -> list[str]:
    command = [sys.executable, str(ROOT / "deploy" / "requirements.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_an_extra_that_names_extras_of_the_project_is_unfolded(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(
        "[project]\nname = 'veneer'\ndependencies = ['a>=1']\n[project.optional-dependencies]\n"
        "inner = ['b[x]>=2', 'a>=1']\nouter = ['veneer[inner]', 'c', \"d; sys_platform == 'linux'\"]\nother = ['e']\n"
    )

    assert printed(str(project), "outer") == ["a>=1", "b[x]>=2", "c", "d; sys_platform == 'linux'"]
    assert printed(str(project), "outer", "--without", "d", "--without", "c") == ["a>=1", "b[x]>=2"]


def test_both_planes_find_what_they_need_in_the_image() -> None:
    names = " ".join(printed(str(ROOT / "pyproject.toml"), "controlplane", "dataplane", "--without", "triton"))

    assert all(name in names for name in ("grpcio", "alembic", "psycopg[binary]", "pydantic-settings", "torch", "tokenizers"))
    assert "triton" not in names
    assert "veneer" not in names
