"""What an engine's process inherits."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from dataplane.engine.link import child_environment


def test_the_child_gets_huge_pages_and_keeps_other_tunables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert child_environment()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert child_environment()["GLIBC_TUNABLES"] == "glibc.malloc.check=1:glibc.malloc.hugetlb=1"


def test_an_engine_whose_parent_has_ended_already_does_not_start() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "dataplane.engine", "--fd", str(theirs.fileno()), "--parent", str(ended.pid)]
        assert subprocess.run(command, pass_fds=(theirs.fileno(),), check=False).returncode == 1
        theirs.close()
        assert ours.recv(1) == b""  # it has said nothing
