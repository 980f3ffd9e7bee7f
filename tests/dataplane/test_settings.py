"""Settings come from the environment, and a bad one stops the start by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import controlplane.settings
from dataplane.__main__ import main
from dataplane.settings import Settings


def test_settings_are_read_by_prefix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VENEER_DATAPLANE_MODEL_DIR", str(tmp_path))
    monkeypatch.setenv("VENEER_DATAPLANE_KV_BYTES", "1000000")
    monkeypatch.setenv("VENEER_DATAPLANE_ENROLLMENT_TOKEN", "vnr_secret")
    settings = Settings()
    assert (settings.model_dir, settings.kv_budget) == (tmp_path, 1_000_000)
    assert "vnr_secret" not in repr(settings)


def test_sizes_that_are_not_set_follow_from_the_machine(tmp_path: Path) -> None:
    settings = Settings(model_dir=tmp_path)
    assert 0 < settings.kv_budget <= 8 << 30
    assert 0 < settings.arena_budget < settings.host_cache_budget * 2


@pytest.mark.parametrize(
    "fault",
    [
        {"max_rank": "0"},
        {"dtype": "int8"},
        {"t_stale_s": "1", "resolve_age_s": "2"},
        {"tls_certificate": "cert.pem"},
        {"resolve_age_s": "6"},
        {"render_processes": "1"},
        {"render_processes": "65"},
        {"max_render_s": "0"},
        {"max_render_s": "61"},
        {"drain_delay_s": "-1"},
        {"unknown": "1"},
        {"grammar_bytes": "1000"},
        {"grammar_timeout_s": "0"},
        {"grammar_ms_price": "-1"},
    ],
)
def test_a_bad_value_is_refused(tmp_path: Path, fault: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Settings(model_dir=tmp_path, **fault)


def test_a_drain_waits_by_default_until_the_router_of_the_example_has_noticed() -> None:
    envoy = (Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml").read_text()
    interval_s, threshold = (int(re.search(rf"{name}: (\d+)", envoy)[1]) for name in ("  interval", "unhealthy_threshold"))  # type: ignore[index]
    for settings in (Settings, controlplane.settings.Settings):
        assert settings.model_fields["drain_delay_s"].default > interval_s * threshold


def test_a_bad_value_stops_the_start_and_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VENEER_DATAPLANE_MAX_RANK", "many")
    assert main(["serve"]) == 2
    said = capsys.readouterr().err
    assert "VENEER_DATAPLANE_MAX_RANK: " in said
    assert "VENEER_DATAPLANE_MODEL_DIR: " in said
    assert "many" not in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODEL_DIR", "/nonexistent"),
        ("MODEL_DIR", ""),
        ("ENROLLMENT_TOKEN", ""),
        ("LOG_LEVEL", "loud"),
        ("LISTEN_CALLERS", "nowhere"),
        ("LISTEN_OPERATORS", "0.0.0.0:0"),
        ("LISTEN_METRICS", "nowhere"),
        ("REDIS_URL", "127.0.0.1:6379"),
        ("CONTROL_PLANE_CA", "/nonexistent/ca.pem"),
        ("TLS_KEY", "/nonexistent/key.pem"),
        ("T_STALE_S", "1"),
    ],
)
def test_a_setting_that_cannot_be_used_stops_the_start_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, value: str
) -> None:
    fields = {"MODEL_DIR": str(tmp_path), "NODE_KEY_FILE": str(tmp_path / "node.key"), "ENROLLMENT_TOKEN": "x", name: value}
    for field, text in fields.items():
        monkeypatch.setenv(f"VENEER_DATAPLANE_{field}", text)
    assert main(["serve"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"VENEER_DATAPLANE_{name}" in line


def test_a_model_folder_without_a_model_is_a_wrong_setting_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for field, text in {"MODEL_DIR": str(tmp_path), "NODE_KEY_FILE": str(tmp_path / "k"), "ENROLLMENT_TOKEN": "x"}.items():
        monkeypatch.setenv(f"VENEER_DATAPLANE_{field}", text)
    done = subprocess.run([sys.executable, "-m", "dataplane", "serve"], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "config.json: is missing from the model folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_secrets_are_read_from_a_folder_that_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "veneer_dataplane_enrollment_token").write_text("vnr_secret\n")
    token = Settings(_secrets_dir=[tmp_path], model_dir=tmp_path).enrollment_token
    assert token is not None
    assert token.get_secret_value() == "vnr_secret"
    with pytest.raises(SystemExit):
        main(["--secrets-dir", str(tmp_path / "absent"), "serve"])
    assert "is not a folder" in capsys.readouterr().err


def test_the_serving_process_never_loads_torch() -> None:
    code = "import sys, dataplane.__main__, dataplane.node; print({'torch', 'sqlalchemy', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_what_is_published_by_default_is_served_by_default() -> None:
    published = controlplane.settings.Settings.model_fields["max_rank"].default
    assert Settings.model_fields["max_rank"].default == published
