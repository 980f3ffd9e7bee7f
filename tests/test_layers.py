"""What may import what, as it is at run time: the linter sees import statements, a child process sees what they pull in."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEVICE_PACKAGES = ("dataplane.engine", "dataplane.model", "dataplane.lora", "kernels")
DEVICE_LIBRARIES = ("torch", "triton", "numpy", "safetensors", "tokenizers")
INTEGER_MODULES = (
    "dataplane.engine.messages",
    "dataplane.engine.sequence",
    "dataplane.engine.scheduler",
    "dataplane.engine.requests",
    "dataplane.engine.prefill",
    "dataplane.engine.draft",
    "dataplane.engine.decoders",
    "dataplane.engine.commits",
    "dataplane.engine.plan",
    "dataplane.engine.line",
    "dataplane.engine.pace",
    "dataplane.engine.limits",
    "dataplane.engine.queue_times",
    "dataplane.engine.seating",
    "dataplane.engine.leases",
    "dataplane.engine.kv_cache",
    "dataplane.engine.prefix",
    "dataplane.engine.prefix_cache",
    "dataplane.engine.fairness",
    "dataplane.engine.relief",
    "dataplane.engine.admission",
    "dataplane.engine.intake",
    "dataplane.lora.residency",
    "dataplane.lora.holdings",
    "dataplane.lora.entries",
    "dataplane.lora.eviction",
    "dataplane.lora.shares",
    "dataplane.lora.units",
    "dataplane.lora.wants",
)

WATCH = """
import sys
from importlib.abc import MetaPathFinder

OWN = {own!r}
BANNED = {banned!r}
ALLOWED = {allowed!r}

class Watch(MetaPathFinder):
    # Refuses a foreign module that one of our own files imports; what an allowed library imports in turn is its own affair.
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in BANNED:
            raise ImportError(f"{{name}} was imported")
        if ALLOWED is None or top in sys.stdlib_module_names or top in ALLOWED:
            return None
        frame = sys._getframe(1)
        while frame and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        importer = frame.f_globals.get("__name__", "") if frame else ""
        if importer.partition(".")[0] in OWN and not allowed_own(name):
            raise ImportError(f"{{importer}} imports {{name}}")
        return None

def allowed_own(name):
    return any(name == package or name.startswith(package + ".") or package.startswith(name + ".") for package in OWN_PACKAGES)

OWN_PACKAGES = {packages!r}
sys.meta_path.insert(0, Watch())
for module in {modules!r}:
    __import__(module)
{then}
print("imported")
"""

OWN = ("veneer", "controlplane", "dataplane", "kernels", "demo", "benchmarks")


def import_watched(
    modules: list[str],
    *,
    banned: tuple[str, ...] = (),
    allowed: tuple[str, ...] | None = None,
    packages: tuple[str, ...] = (),
    then: str = "",
) -> subprocess.CompletedProcess[str]:
    """Imports modules, and runs something then, in a process of their own that refuses what they must not reach."""
    script = WATCH.format(own=OWN, banned=banned, allowed=allowed, packages=packages, modules=modules, then=then)
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def modules_of(package: str) -> list[str]:
    folder = ROOT / package.replace(".", "/")
    below = (module.name for module in pkgutil.walk_packages([str(folder)], prefix=f"{package}."))
    return [package, *(name for name in below if not name.endswith("__main__"))]


def test_the_device_part_imports_only_its_few_libraries_and_the_errors() -> None:
    """Engine, model, lora and kernels run on a machine that has no service library; a failure names importer and module."""
    modules = [module for package in DEVICE_PACKAGES for module in modules_of(package)]
    result = import_watched(modules, allowed=DEVICE_LIBRARIES, packages=(*DEVICE_PACKAGES, "veneer.errors"))

    assert result.returncode == 0, result.stderr
    assert result.stdout == "imported\n"


def test_what_decides_in_integers_is_imported_without_torch() -> None:
    """All of it in one process, since what is banned is refused at its first import, whatever came before; the trace names it."""
    result = import_watched(list(INTEGER_MODULES), banned=("torch", "triton"))

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("package", "banned"),
    [
        ("controlplane", ("dataplane", "kernels", "torch", "triton", "transformers", "peft")),
        ("dataplane", ("controlplane", "sqlalchemy", "alembic", "psycopg", "transformers", "peft")),
        ("kernels", ("controlplane", "dataplane", "sqlalchemy", "transformers", "peft")),
        ("veneer", ("controlplane", "dataplane", "kernels", "torch", "triton", "sqlalchemy", "psycopg", "transformers", "peft")),
    ],
)
def test_a_package_does_not_reach_what_it_must_not_know(package: str, banned: tuple[str, ...]) -> None:
    result = import_watched(modules_of(package), banned=banned)

    assert result.returncode == 0, result.stderr


def test_importing_veneer_imports_nothing_else() -> None:
    script = "import sys; before = set(sys.modules); import veneer; print(sorted(set(sys.modules) - before))"

    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)

    assert result.stdout == "['veneer']\n"


def test_the_watch_catches_a_forbidden_import() -> None:
    """The tests above can fail: a module that reaches for a service library is refused."""
    direct = import_watched(["veneer.controlplane.v1.bases_pb2"], allowed=DEVICE_LIBRARIES, packages=("veneer",))
    measured = import_watched(["benchmarks.catalogue"], allowed=DEVICE_LIBRARIES, packages=("benchmarks",))
    indirect = import_watched(["dataplane.model.layers"], banned=("torch",))

    assert "imports google" in direct.stderr
    assert "benchmarks.catalogue imports" in measured.stderr
    assert "torch was imported" in indirect.stderr


def test_the_version_is_not_one_that_transformers_takes_for_the_hub_package_kernels() -> None:
    """transformers takes a top-level package `kernels` for the hub's when its distribution's version is in this window."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

    assert not (0, 18, 2) <= tuple(int(part) for part in declared.split(".")) < (0, 20, 0)
