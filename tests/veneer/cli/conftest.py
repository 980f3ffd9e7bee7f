from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from veneer.cli import main


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command did.

    Attributes:
        status: Exit status.
        out: Standard output.
        err: Standard error.
    """

    status: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("publish", folder, …)` runs the command in this process; the environment names no key and no plane."""
    for name in (
        "API_KEY",
        "OPERATOR_KEY",
        "OPERATOR_KEY_FILE",
        "ORG_KEY",
        "CONTROL",
        "DATA",
        "CONTROL_OPERATORS",
        "DATA_OPERATORS",
        "CA",
        "STATE",
    ):
        monkeypatch.delenv(f"VENEER_{name}", raising=False)

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["veneer", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return Outcome(int(caught.value.code or 0), captured.out, captured.err)

    return run
