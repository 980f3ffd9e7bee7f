"""The commands, in this process but for serving."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.__main__ import main
from tests.fixtures.services import TestDatabase

PREFIX = "VENEER_CONTROLPLANE_"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, database: TestDatabase, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Settings in the environment, and the root logger as it was."""
    fields = {
        "DATABASE_URL": database.url,
        "OWNER_URL": database.owner_url,
        "PEPPER_FILE": str(tmp_path / "pepper"),
        "STORE_URL": f"file://{tmp_path}/store",
        "LISTEN_CALLERS": "127.0.0.1:0",
        "LISTEN_OPERATORS": "127.0.0.1:0",
        "LISTEN_METRICS": "127.0.0.1:0",
        "READY_FILE": str(tmp_path / "ready"),
        "LOG_LEVEL": "WARNING",
    }
    named = {PREFIX + name: value for name, value in fields.items()}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield named
    root.handlers[:] = handlers
    root.setLevel(level)


def test_bootstrap_shows_the_first_operators_key_once(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bootstrap", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operator_key"].startswith("vnr_")
    assert main(["bootstrap"]) == 1
    again = capsys.readouterr()
    assert again.out == ""
    assert "cannot be shown again" in again.err


def test_bootstrap_with_a_key_file_can_be_run_again(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key_file = tmp_path / "operator.key"
    for _ in range(2):
        assert main(["bootstrap", "--key-file", str(key_file)]) == 0
        assert capsys.readouterr().out == ""
    assert main(["bootstrap", "--key-file", str(key_file), "--show"]) == 0
    assert capsys.readouterr().out.strip() == key_file.read_text()
    assert main(["bootstrap", "--key-file", str(tmp_path / "another.key")]) == 1
    assert "made before" in capsys.readouterr().err


def test_settings_are_read_from_a_folder_of_secrets_too(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv(PREFIX + "PEPPER_FILE")
    assert main(["bootstrap"]) == 1
    assert main(["secrets", "--owner", str(tmp_path / "owner"), "--service", str(tmp_path / "service")]) == 0
    assert main(["--secrets-dir", str(tmp_path / "service"), "bootstrap"]) == 0
    assert "VENEER_CONTROLPLANE_PEPPER" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--secrets-dir", str(tmp_path / "absent"), "serve"])
    assert "is not a folder" in capsys.readouterr().err


def test_migrating_needs_the_owner(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate"]) == 0
    monkeypatch.delenv(PREFIX + "OWNER_URL")
    assert main(["migrate"]) == 1
    assert PREFIX + "OWNER_URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [("POOL_SIZE", "0"), ("MAX_RANK", "many"), ("DATABASE_URL", "nonsense"), ("CHANGE_RETENTION_S", "60")],
)
def test_a_bad_setting_stops_the_start_and_is_named(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    assert main(["serve"]) == 2
    assert PREFIX + name in capsys.readouterr().err


def test_the_process_serves_until_it_is_asked_to_stop(environment: dict[str, str], tmp_path: Path) -> None:
    assert main(["bootstrap"]) == 0
    process = subprocess.Popen([sys.executable, "-m", "controlplane", "serve"], env={**os.environ, **environment})
    try:
        ready = tmp_path / "ready"
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        addresses = json.loads(ready.read_text())
        assert set(addresses) == {"callers", "operators", "metrics"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not ready.exists()
    finally:
        process.kill()
        process.wait()
