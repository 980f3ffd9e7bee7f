"""The commands, in this process but for serving."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from sqlalchemy.engine import URL, make_url

from controlplane.__main__ import main
from tests.fixtures.services import TestDatabase
from tests.fixtures.signing import Authority

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
    assert main(["bootstrap"]) == 2
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
    capsys.readouterr()
    for command in ("migrate", "bootstrap"):
        assert main([command]) == 2
        assert capsys.readouterr().err == f"{PREFIX}OWNER_URL: is not set\n"


_SECRET = "postgresql+psycopg://owner:hush"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("POOL_SIZE", "0"),
        ("MAX_RANK", "many"),
        ("DATABASE_URL", "nonsense"),
        ("DATABASE_URL", "mysql://127.0.0.1/veneer"),
        ("DATABASE_URL", "postgresql://127.0.0.1:port/veneer"),
        ("OWNER_URL", _SECRET),
        ("OWNER_URL", "mysql://owner:hush@127.0.0.1/veneer"),
        ("CHANGE_RETENTION_S", "60"),
        ("AUDIT_RETENTION_DAYS", "3"),
        ("LOG_LEVEL", "loud"),
        ("LISTEN_CALLERS", "nowhere"),
        ("LISTEN_CALLERS", "127.0.0.1:65536"),
        ("LISTEN_OPERATORS", "0.0.0.0:0"),
        ("LISTEN_METRICS", "nowhere"),
        ("REDIS_URL", "127.0.0.1:6379"),
        ("PEPPER_FILE", "/nonexistent/pepper"),
        ("PEPPER", "x" * 40),
        ("TLS_CERTIFICATE", "/nonexistent/certificate"),
    ],
)
def test_a_bad_setting_stops_the_start_and_is_named(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    assert main(["bootstrap"]) == 0
    capsys.readouterr()
    monkeypatch.setenv(PREFIX + name, value)
    assert main(["serve"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert PREFIX + name in line
    assert "hush" not in line


@pytest.mark.parametrize("store", ["ftp://store", "file:///proc/store"])
def test_a_store_that_cannot_be_opened_stops_the_start(environment: dict[str, str], store: str) -> None:
    assert main(["bootstrap"]) == 0
    assert run_serve(environment | {PREFIX + "STORE_URL": store}) == (2, f"{PREFIX}STORE_URL: ")


def test_a_ready_file_that_cannot_be_written_ends_the_start_in_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    assert main(["bootstrap"]) == 0
    status, told = run_serve(environment | {PREFIX + "READY_FILE": str(tmp_path / "absent" / "ready")})
    assert (status, "No such file" in told) == (1, True)


def run_serve(environment: dict[str, str]) -> tuple[int, str]:
    """The exit status of a start that fails, and the one line that it tells beside its log; of a variable the name."""
    done = subprocess.run(
        [sys.executable, "-m", "controlplane", "serve"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    variable, separator, _ = line.partition(": ")
    return done.returncode, variable + separator if variable.startswith(PREFIX) else line


def test_a_pepper_that_is_short_or_missing_stops_the_start(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(PREFIX + "PEPPER_FILE")
    for pepper, words in ((None, "set it, or"), ("short", "at least 32")):
        if pepper is not None:
            monkeypatch.setenv(PREFIX + "PEPPER", pepper)
        for command in ("serve", "bootstrap"):
            assert main([command]) == 2
            told = capsys.readouterr().err
            assert told.startswith(f"{PREFIX}PEPPER: ")
            assert words in told


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [("ours.pem", None, "set together"), ("ours.pem", "text", "no PEM"), ("text", "ours.key", "no PEM"),
     ("ours.pem", "other.key", "is not the key of"), ("ours.pem", "locked.key", "no PEM")],
)  # fmt: skip
def test_tls_files_that_cannot_be_used_stop_the_start(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    certificate: str,
    key: str | None,
    words: str,
) -> None:
    ours, other = Authority("ours"), Authority("other")
    (tmp_path / "ours.pem").write_bytes(ours.pem)
    for name, owner, lock in (("ours", ours, None), ("other", other, None), ("locked", ours, b"word")):
        locked = NoEncryption() if lock is None else BestAvailableEncryption(lock)
        (tmp_path / f"{name}.key").write_bytes(owner.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    (tmp_path / "text").write_text("no key")
    monkeypatch.setenv(PREFIX + "TLS_CERTIFICATE", str(tmp_path / certificate))
    if key is not None:
        monkeypatch.setenv(PREFIX + "TLS_KEY", str(tmp_path / key))
    assert main(["serve"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{PREFIX}TLS_")
    assert words in line


@pytest.mark.parametrize("command", ["migrate", "bootstrap"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda url: url.set(port=1, host="127.0.0.1", query={}), "cannot be reached"),
        (lambda url: url.set(database="absent"), "does not exist"),
        (lambda url: url.set(username="veneer_app"), "the database refuses: permission denied"),
    ],
    ids=["away", "absent", "not the owner"],
)
def test_a_database_that_cannot_be_used_is_told_in_one_line(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    change: Callable[[URL], URL],
    words: str,
) -> None:
    url = change(make_url(environment[PREFIX + "OWNER_URL"]))
    monkeypatch.setenv(PREFIX + "OWNER_URL", url.render_as_string(hide_password=False))
    assert main([command]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_database_without_tables_is_told_in_one_line(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = make_url(environment[PREFIX + "OWNER_URL"]).set(database="postgres")
    monkeypatch.setenv(PREFIX + "OWNER_URL", url.render_as_string(hide_password=False))
    assert main(["bootstrap"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "does not exist" in line


def revision_of(database: TestDatabase) -> str:
    with database.connect() as connection:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    assert row is not None
    return str(row[0])


def test_the_schema_goes_down_a_revision_and_up_again_by_command(
    environment: dict[str, str],
    fresh_database: TestDatabase,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(PREFIX + "OWNER_URL", fresh_database.owner_url)
    newest = revision_of(fresh_database)
    before = f"{int(newest) - 1:04}"
    assert main(["bootstrap"]) == 0
    capsys.readouterr()
    assert main(["migrate", "--to", before]) == 0
    assert (capsys.readouterr().out, revision_of(fresh_database)) == (
        f"the schema is at revision {before}, from {newest}\n",
        before,
    )
    assert main(["migrate", "--to", before]) == 0
    assert capsys.readouterr().out == f"the schema is at revision {before}\n"
    assert main(["migrate"]) == 0
    assert revision_of(fresh_database) == newest
    assert main(["bootstrap"]) == 1, "the first operator is still there"
    capsys.readouterr()
    assert main(["migrate", "--to", "9999"]) == 2
    assert "--to: '9999' is no revision; there are 0001, 0002" in capsys.readouterr().err
    with fresh_database.connect() as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    assert main(["migrate"]) == 1
    assert "revision 9999, which this release does not know" in capsys.readouterr().err


def test_a_way_back_that_would_lose_something_is_refused_in_one_line(
    environment: dict[str, str],
    fresh_database: TestDatabase,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(PREFIX + "OWNER_URL", fresh_database.owner_url)
    newest = revision_of(fresh_database)
    with fresh_database.connect() as connection:
        connection.execute("INSERT INTO tenants (name, fallback_allowed, weight, max_streams) VALUES ('acme', true, 1, 5)")
    assert main(["migrate", "--to", "0005"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("the database refuses: ")
    assert "tenants have quotas" in line
    assert int(revision_of(fresh_database)) > 5, "each revision is taken away whole or not at all"
    assert main(["migrate"]) == 0
    assert revision_of(fresh_database) == newest


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
