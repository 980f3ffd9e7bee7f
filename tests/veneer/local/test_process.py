from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from veneer.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from veneer.local.process import Process

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w').close(); time.sleep(600)"
)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process("worker", tmp_path)
    yield process
    process.kill()


def test_another_object_finds_and_stops_the_process(process: Process, tmp_path: Path) -> None:
    process.start(SLEEP)
    other = Process("worker", tmp_path)
    assert other.pid == process.pid is not None
    assert other.stop() is True
    assert process.pid is None


def test_a_pid_that_belongs_to_another_process_now_is_left_alone(process: Process, tmp_path: Path) -> None:
    process.start(SLEEP)
    saved = json.loads((tmp_path / "worker.pid").read_text())
    (tmp_path / "stranger.pid").write_text(json.dumps({**saved, "birth": "1"}))
    stranger = Process("stranger", tmp_path)
    stranger.kill()
    assert stranger.pid is None
    assert process.pid == saved["pid"]


def test_a_process_that_ignores_the_request_is_ended(process: Process, tmp_path: Path) -> None:
    process.start([sys.executable, "-c", STUBBORN, tmp_path / "deaf"])
    process.wait_for_file(tmp_path / "deaf", timeout_s=60)
    assert process.stop(number=signal.SIGTERM, timeout_s=0.05) is False
    assert process.pid is None


def test_the_end_of_a_process_shows_its_own_last_words(process: Process, tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text("words of an earlier run\n")
    process.start([sys.executable, "-c", "raise SystemExit('no such model')"])
    with pytest.raises(UnavailableError, match="no such model") as caught:
        process.wait_for_file(tmp_path / "never", timeout_s=60)
    assert "earlier run" not in str(caught.value)


def test_waiting_has_an_end(process: Process, tmp_path: Path) -> None:
    process.start(SLEEP)
    with pytest.raises(DeadlineExceededError, match="worker was not ready"):
        process.wait_for_file(tmp_path / "never", timeout_s=0.05)


def test_a_second_start_is_refused(process: Process) -> None:
    process.start(SLEEP)
    with pytest.raises(FailedPreconditionError, match="runs already"):
        process.start(SLEEP)
