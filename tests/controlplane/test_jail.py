"""Every denial is tried from inside: a child locks itself in, attempts the thing, and reports what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane import jail
from tests.fixtures.fork_server import Serve

ROOT = Path(__file__).resolve().parents[2]

_BEFORE = """
import sys
sys.path.insert(0, {root!r})
import ctypes, mmap, os, socket, subprocess, _posixsubprocess, _thread
from controlplane.jail import Bounds, confine
libc = ctypes.CDLL(None, use_errno=True)
victim = int(sys.argv[1])
folder = sys.argv[2]
inside = os.open(folder, os.O_RDONLY)

def call(function, *arguments):
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def attempt():
    {attempt}

{before}
try:
    attempt()
except OSError as error:
    answer = f"errno {{error.errno}}"
except (RuntimeError, MemoryError) as error:
    answer = type(error).__name__
else:
    answer = "done"
os.write(1, answer.encode())
os._exit(0)
"""
_CONFINED = "confine(Bounds(memory_bytes=64 << 20, cpu_s=20))"

_ATTEMPTS = {
    "open for writing": "os.open(folder + '/new', os.O_WRONLY | os.O_CREAT)",
    "open for reading": "os.open('/etc/passwd', os.O_RDONLY)",
    "open relative to a folder": "os.open('new', os.O_WRONLY | os.O_CREAT, dir_fd=inside)",
    "make a folder": "os.mkdir(folder + '/new')",
    "remove a folder": "os.rmdir(folder + '/old')",
    "list a folder": "os.listdir(inside)",
    "look at a path": "os.stat('/etc/passwd')",
    "write to another descriptor": "os.write(2, b'x')",
    "make a socket": "socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
    "make a local socket": "socket.socketpair()",
    "execute a program": "os.execv('/bin/true', ['true'])",
    "fork": "os.fork() or os._exit(0)",
    "fork by vfork": "call(libc.vfork) or None",
    "start a thread": "_thread.start_new_thread(print, ())",
    "make a pipe": "os.pipe()",
    "send a signal": "os.kill(victim, 0)",
    "trace a process": "call(libc.ptrace, 16, victim, 0, 0)",
    "mount": "call(libc.mount, b'none', folder.encode(), b'tmpfs', 0, None)",
    "map code": "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
    "make memory code": "call(libc.mprotect, ctypes.c_void_p(id(libc) // 4096 * 4096), 4096, 7)",
    "raise its own limits": "call(libc.prctl, 22, 0, 0, 0, 0)",
}


_IN_FORK = "import json, sys; given = json.loads(order); sys.argv = given['argv']; exec(given['code'], {})"


def test_a_forked_child_is_refused_all_the_same(tmp_path: Path, serve: Serve) -> None:
    server = serve(_IN_FORK)
    (tmp_path / "old").mkdir()
    answers = {}
    for name, attempt in _ATTEMPTS.items():
        code = _BEFORE.format(root=str(ROOT), attempt=attempt, before=_CONFINED)
        order = {"code": code, "argv": ["", str(os.getpid()), str(tmp_path)]}
        answers[name] = server.order(json.dumps(order)).read()
    assert set(answers.values()) <= {"errno 1", "RuntimeError"}, answers
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old").exists()


def test_a_forked_child_has_the_limits_that_an_executed_one_has(tmp_path: Path, serve: Serve) -> None:
    server = serve(_IN_FORK)
    for attempt, bounds, answer, status in (
        ("bytearray(256 << 20)", _CONFINED, "MemoryError", b"0"),
        ("while True: pass", "confine(Bounds(memory_bytes=64 << 20, cpu_s=1))", "", b"-24"),
    ):
        code = _BEFORE.format(root=str(ROOT), attempt=attempt, before=bounds)
        child = server.order(json.dumps({"code": code, "argv": ["", str(os.getpid()), str(tmp_path)]}))
        assert child.read() == answer
        assert child.status() == status


def _run(attempt: str, folder: Path, *, before: str = _CONFINED) -> subprocess.CompletedProcess[str]:
    (folder / "old").mkdir(exist_ok=True)
    code = _BEFORE.format(root=str(ROOT), attempt=attempt, before=before)
    return subprocess.run(
        [sys.executable, "-I", "-c", code, str(os.getpid()), str(folder)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("attempt", _ATTEMPTS.values(), ids=_ATTEMPTS.keys())
def test_the_jail_refuses_to(attempt: str, tmp_path: Path) -> None:
    result = _run(attempt, tmp_path)
    assert result.stdout in ("errno 1", "RuntimeError"), result
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old").exists()


@pytest.mark.parametrize(
    "name",
    [
        "open for writing",
        "open for reading",
        "make a socket",
        "fork",
        "start a thread",
        "make a pipe",
        "send a signal",
        "map code",
    ],
)
def test_without_the_jail_the_same_attempt_succeeds(name: str, tmp_path: Path) -> None:
    assert _run(_ATTEMPTS[name], tmp_path, before="").stdout == "done"


def test_memory_is_bounded(tmp_path: Path) -> None:
    assert _run("bytearray(256 << 20)", tmp_path, before="").stdout == "done"
    assert _run("bytearray(256 << 20)", tmp_path).stdout == "MemoryError"


def test_processor_time_is_bounded(tmp_path: Path) -> None:
    result = _run("while True: pass", tmp_path, before="confine(Bounds(memory_bytes=64 << 20, cpu_s=1))")
    assert result.returncode == -signal.SIGXCPU


def test_what_the_check_needs_still_works(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"0123456789")
    before = f"source = os.open({str(tmp_path / 'input')!r}, os.O_RDONLY)\n{_CONFINED}"
    attempt = "assert os.pread(source, 4, 3) == b'3456' and len(bytearray(32 << 20)) and os.lseek(source, 0, 2) == 10"
    assert _run(attempt, tmp_path, before=before).stdout == "done"


def test_the_kernel_reports_the_filter_and_no_new_privileges(tmp_path: Path) -> None:
    before = f"status = os.open('/proc/self/status', os.O_RDONLY)\n{_CONFINED}"
    attempt = "text = os.pread(status, 8192, 0).decode(); assert 'NoNewPrivs:\\t1' in text and 'Seccomp:\\t2' in text, text"
    assert _run(attempt, tmp_path, before=before).stdout == "done"


def test_another_machine_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail.platform, "machine", lambda: "s390x")
    with pytest.raises(jail.JailError, match="s390x"):
        jail.confine(jail.Bounds(memory_bytes=1, cpu_s=1))


def test_both_machines_have_a_number_for_every_call() -> None:
    for machine in ("x86_64", "aarch64"):
        code = jail._build_filter(machine)
        assert len(code) % 8 == 0
        assert code.count(jail._instruction(jail._RETURN, jail._ALLOW)) == len(jail._ALLOWED) + 3


def test_a_process_whose_parent_has_ended_already_is_told() -> None:
    script = "import sys; from controlplane.jail import die_with; die_with(int(sys.argv[1]))"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for parent, is_there in ((os.getpid(), True), (ended.pid, False)):
        done = subprocess.run([sys.executable, "-c", script, str(parent)], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == is_there, done.stderr
        assert ("the parent has ended" in done.stderr) != is_there
