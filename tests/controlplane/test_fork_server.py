"""The server that forks a child for each check, spoken to as the control plane does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from controlplane.fork_server import CONFIG_FD, REPORT_FD, WEIGHTS_FD
from tests.fixtures.fork_server import ROOT, TIMEOUT_S, Serve

_LOOK = """
import json, os, threading
files = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
config, weights = os.pread(0, 100, 0).decode(), os.pread(3, 100, 0).decode()
facts = dict(order=order, pid=os.getpid(), parent=os.getppid(), files=sorted(files), config=config, weights=weights,
             tasks=len(os.listdir("/proc/self/task")), names=sorted(os.environ))
os.write(1, json.dumps(facts).encode())
os._exit(0)
"""
_WAIT = "import os, signal; os.write(1, b'waiting'); signal.pause()"


def test_a_child_has_its_files_its_report_and_nothing_else(serve: Serve) -> None:
    server = serve(_LOOK)
    waiting = server.order("first")  # while one of another order is there too
    child = server.order("second", name="second")
    facts = json.loads(child.read())
    assert facts["order"] == "second"
    assert facts["files"] == sorted(str(fd) for fd in (CONFIG_FD, REPORT_FD, 2, WEIGHTS_FD))
    assert (facts["config"], facts["weights"]) == ("config of second", "weights of second")
    assert (facts["tasks"], set(facts["names"]) - {"LC_CTYPE"}) == (1, set())
    assert child.status() == b"0"
    waiting.read()


def test_every_order_is_a_process_of_its_own(serve: Serve) -> None:
    server = serve(_LOOK)
    facts = [json.loads(server.order(str(number)).read()) for number in range(5)]
    assert len({one["pid"] for one in facts}) == 5
    assert {one["parent"] for one in facts} == {server.process.pid}


def test_what_one_child_does_to_its_memory_no_other_sees(serve: Serve) -> None:
    mark = "import os, sys; os.write(1, str(hasattr(sys, 'mark')).encode()); sys.mark = order; os._exit(0)"
    server = serve(mark)
    assert [server.order("x").read() for _ in range(3)] == ["False"] * 3


def test_the_status_tells_how_a_child_ended(serve: Serve) -> None:
    server = serve("import os, signal; os.kill(os.getpid(), int(order)) if int(order) else os._exit(7)")
    for order, status in (("0", b"7"), ("11", b"-11"), ("24", b"-24")):
        child = server.order(order)
        assert child.status() == status


def test_a_child_whose_link_is_let_go_is_killed_and_others_live(serve: Serve) -> None:
    server = serve(_WAIT)
    one, other = server.order("one"), server.order("other")
    assert os.read(one.report, 7) == os.read(other.report, 7) == b"waiting"
    one.link.shutdown(socket.SHUT_WR)
    assert one.status() == b"-9"
    other.link.settimeout(0)
    with pytest.raises(BlockingIOError):
        other.link.recv(1)
    other.link.settimeout(TIMEOUT_S)
    other.link.shutdown(socket.SHUT_WR)
    assert other.status() == b"-9"


def test_a_parent_that_dies_takes_server_and_children_with_it(serve: Serve) -> None:
    server = serve(_WAIT)
    child = server.order("one")
    assert os.read(child.report, 7) == b"waiting"
    server.control.close()
    child.link.close()
    assert server.process.wait(timeout=TIMEOUT_S) == 0
    assert os.read(child.report, 1) == b""  # nobody holds the pipe any more


def test_a_server_that_is_killed_takes_its_children_with_it(serve: Serve) -> None:
    server = serve(_WAIT)
    child = server.order("one")
    assert os.read(child.report, 7) == b"waiting"
    server.process.kill()
    assert os.read(child.report, 1) == b""


def test_a_server_that_gets_no_more_orders_goes_after_its_last_child(serve: Serve) -> None:
    server = serve("import os; os.read(0, 1); os.write(1, b'ready'); os._exit(0)")
    child = server.order("one")
    server.control.close()
    assert child.read() == "ready"
    assert child.status() == b"0"
    assert server.process.wait(timeout=TIMEOUT_S) == 0


def test_a_process_with_threads_does_not_serve() -> None:
    boot = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import threading, time; "
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); "
        "from controlplane.fork_server import serve; serve(print)"
    )
    control, other = socket.socketpair()
    with control, other:
        done = subprocess.run([sys.executable, "-I", "-c", boot], stdin=other, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 3
