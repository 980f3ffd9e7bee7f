"""What a wheel holds: the generated code although git ignores it, and nothing that is not a package of ours."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from this checkout, without isolation, so without any download."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return zipfile.ZipFile(next(folder.glob("veneer-*.whl")))


def test_it_holds_the_generated_code_of_every_api_file(wheel: zipfile.ZipFile) -> None:
    sources = sorted(path.relative_to(ROOT / "proto") for path in (ROOT / "proto").rglob("*.proto"))

    expected = [f"{source.with_suffix('').as_posix()}_pb2.{ending}" for source in sources for ending in ("py", "pyi")]

    assert [name for name in expected if name not in wheel.namelist()] == []


def test_it_holds_every_tracked_module_of_the_packages(wheel: zipfile.ZipFile) -> None:
    packages = ["veneer", "controlplane", "dataplane", "kernels", "demo"]
    command = ["git", "ls-files", "-z", "--", *packages]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")

    missing = [name for name in tracked if name and (ROOT / name).exists() and name not in wheel.namelist()]

    assert missing == []


def test_it_holds_the_migrations_beside_the_module_that_runs_them(wheel: zipfile.ZipFile) -> None:
    revisions = sorted(path.name for path in (ROOT / "migrations" / "versions").glob("*.py"))

    assert revisions
    assert [name for name in revisions if f"controlplane/migrations/versions/{name}" not in wheel.namelist()] == []
    assert "controlplane/migrations/env.py" in wheel.namelist()


def test_it_installs_no_other_top_level_name(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}

    assert top == {"veneer", "controlplane", "dataplane", "kernels", "demo", "buf"}


def test_the_generated_code_is_found_from_an_unpacked_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    script = "import veneer.dataplane.v1.generation_pb2_grpc as stubs, buf.validate.validate_pb2; print(stubs.__file__)"

    result = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout.startswith(str(tmp_path))


def test_it_holds_the_native_form_as_source_alone(wheel: zipfile.ZipFile) -> None:
    assert "kernels/cpu.cpp" in wheel.namelist()
    assert [name for name in wheel.namelist() if name.endswith(".so")] == []
