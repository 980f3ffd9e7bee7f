"""The process that renders is lean, confined, and ends with its plane."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from veneer.chat.process import RenderProcess, check_sizes
from veneer.chat.wire import PREFIX, Order, pack_messages

ORDER = Order("{{ messages[0].content }}", {}, ())


def test_it_imports_no_tensors_and_no_transport() -> None:
    code = "import sys, veneer.chat.child, veneer.chat.template; print(*sorted(name.split('.')[0] for name in sys.modules))"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "jinja2" in names
    assert not {"torch", "grpc", "numpy", "tokenizers", "dataplane", "controlplane"} & set(names)


def test_it_answers_until_its_link_closes() -> None:
    process = RenderProcess(ORDER)
    assert process.ask_once(process.greeting).kind == "ready"
    assert process.ask_once(pack_messages([("user", "größer 你")])).text == "größer 你"
    process.link.shutdown(socket.SHUT_RDWR)
    assert process._process.wait(30) == 0
    process.end()


def test_it_ends_when_its_plane_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from veneer.chat.process import RenderProcess; from veneer.chat.wire import Order\n"
        "process = RenderProcess(Order('x', {}, ())); process.ask_once(process.greeting); print(process.pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as plane:
        assert plane.stdout is not None
        watched = os.pidfd_open(int(plane.stdout.readline()))
        plane.kill()
    assert select.select([watched], [], [], 30)[0], "the end of a process makes its descriptor readable"
    os.close(watched)


def test_a_terminal_does_not_interrupt_it() -> None:
    process = RenderProcess(ORDER)
    process.ask_once(process.greeting)
    os.kill(process.pid, signal.SIGINT)
    assert process.ask_once(pack_messages([("user", "x")])).text == "x"
    process.end()


@pytest.mark.parametrize("sizes", [(1 << 31, 0), (0, 1 << 31)])
def test_an_answer_beyond_what_it_can_have_is_none(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="too large"):
        check_sizes(PREFIX.pack(*sizes), ORDER)
