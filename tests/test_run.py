"""The runner of the suites: every test belongs to one, and what goes wrong is told by the exit status."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(name="runner")
def _runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("suite_runner", ROOT / "tests" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "suite_runner", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("marker", ["none", "oracle", "e2e"])
@pytest.mark.parametrize("folder", ["tests/controlplane", "tests/dataplane"])
def test_every_test_belongs_to_one_suite(runner: ModuleType, marker: str, folder: str) -> None:
    marks = {"oracle": marker == "oracle", "e2e": marker == "e2e"}

    chosen = [
        suite.name
        for suite in runner.SUITES
        if not suite.postgres
        and eval(suite.markers, {}, marks)
        and suite.paths[0] in ("tests", folder)
        and f"--ignore={folder}" not in suite.paths
    ]

    assert len(chosen) == 1


def test_a_suite_on_another_postgres_is_run_with_the_slow_tests_alone(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(runner, "run", lambda suite, *, long: (ran.append(suite.name) or 0, 1.0))
    for arguments in ([], ["--long"]):
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        runner.main()
    capsys.readouterr()
    names = [suite.name for suite in runner.SUITES]
    assert ran == [name for name in names if name != "controlplane-17"] + names


@pytest.mark.parametrize(
    ("statuses", "expected", "told"),
    [
        ([0, 0, 0, 0, 0], 0, "ok"),
        ([0, 1, 0, 0, 0], 1, "failed (1)"),
        ([0, 0, 5, 0, 0], 1, "ran no test"),
    ],
)
def test_one_bad_suite_fails_the_run_and_the_others_still_run(
    runner: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    statuses: list[int],
    expected: int,
    told: str,
) -> None:
    left = list(statuses)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(runner, "run", lambda suite, *, long: (left.pop(0), 1.0))

    assert runner.main() == expected
    assert left == []
    assert told in capsys.readouterr().out


def test_a_suite_over_its_budget_is_named_and_fails_nothing(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "unit"])
    monkeypatch.setattr(runner, "run", lambda suite, *, long: (0, suite.budget_s + 1.0))

    assert runner.main() == 0
    assert "over its budget" in capsys.readouterr().out


def test_slow_tests_run_in_the_long_form_only(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def remember(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", remember)
    runner.run(runner.SUITES[0], long=False)
    runner.run(runner.SUITES[0], long=True)

    assert ["not slow" in " ".join(command) for command in commands] == [True, False]
