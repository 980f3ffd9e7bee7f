"""The plane's end of a process that renders a chat template: it starts the process, talks to it, and can end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from veneer.chat.child import NO_JINJA
from veneer.chat.wire import MAX_HEADER_BYTES, PREFIX, Answer, Order, pack_order, unpack_answer

PATIENCE_S = 30.0
"""Time on the clock in which an answer must come, however busy the machine is; the processor time is limited separately."""


class RenderProcess:
    """One process. Owned by one user at a time.

    Attributes:
        link: This side's end of the socket; the one owner of its descriptor. Non-blocking.
        reached_limit: `fall` found that the template ended the process, or that jinja2 is missing; else the machine did.

    Args:
        order: What the process renders. The answer to it is the first one to read.
    """

    def __init__(self, order: Order) -> None:
        self.link, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "veneer.chat.child"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                )
        except BaseException:
            self.link.close()
            raise
        self.link.settimeout(0)
        self.order = order
        self.reached_limit = False
        self.greeting = pack_order(order)

    @property
    def pid(self) -> int:
        """Process id."""
        return int(self._process.pid)

    def kill(self) -> None:
        """Has the kernel end the process; its link breaks off."""
        self._process.kill()

    def end(self) -> None:
        """Ends the process if it still runs, and waits for that. Idempotent; blocks for milliseconds."""
        self._process.kill()
        self._process.wait()
        self.link.close()

    def fall(self, patience_s: float = 1.0) -> str:
        """Says why a process gives no answer, and ends it if it still runs. Blocks; `link` stays open.

        Returns:
            The cause; `reached_limit` tells whether the template is to blame. Empty: another program killed the process.
        """
        try:
            status = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            # The kernel ends a process that used up its processor time, so this one had too little of it, or was stopped.
            return f"it gave no readable answer within {PATIENCE_S:g} s, though it had processor time left"
        self.reached_limit = status == NO_JINJA or (status < 0 and status != -signal.SIGKILL)
        return _describe_status(status, self.order)

    def ask_once(self, data: bytes) -> Answer:
        """Sends a message and waits for its answer, where blocking is fine.

        Raises:
            OSError: The process ended, or gives no answer in time; `fall` says why.
            ValueError: The answer is none.
        """
        end_s = time.monotonic() + PATIENCE_S
        self.link.settimeout(PATIENCE_S)
        self.link.sendall(data)
        header_bytes, body_bytes = check_sizes(self._read(PREFIX.size, end_s), self.order)
        return unpack_answer(self._read(header_bytes, end_s), self._read(body_bytes, end_s))

    def _read(self, size: int, end_s: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self.link.settimeout(max(end_s - time.monotonic(), 0.001))
            part = self.link.recv(min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionResetError("the process ended")
            data += part
        return bytes(data)


def check_sizes(prefix: bytes, order: Order) -> tuple[int, int]:
    """Reads the sizes of header and body.

    Raises:
        ValueError: They are beyond what an answer can have.
    """
    header_bytes, body_bytes = PREFIX.unpack(prefix)
    if header_bytes > MAX_HEADER_BYTES or body_bytes > order.max_body_bytes:
        raise ValueError("the answer is too large")
    return header_bytes, body_bytes


def _describe_status(status: int, order: Order) -> str:
    """Says why a process ended before it answered."""
    if status == -signal.SIGPROF:
        return f"it took more than {order.max_cpu_s:g} s of processor time"
    if status == -signal.SIGKILL:
        return ""
    if status == NO_JINJA:
        return "the package jinja2 is not installed"
    return f"the process that rendered it ended with status {status}, or took more than {order.memory_bytes >> 20} MiB of memory"


def describe_answer(answer: Answer, order: Order) -> str:
    """Says what is wrong with a template by an answer that is no text."""
    match answer.kind:
        case "characters":
            return f"it made a text longer than {order.max_characters} characters"
        case "memory":
            return f"it took more than {order.memory_bytes >> 20} MiB of memory"
        case "untraceable":
            return "it moves contents so that their control tokens cannot be told from its own"
        case _:
            return answer.words


def _environment() -> dict[str, str]:
    """Returns what the process needs to find this package and the local time, and nothing else of this process."""
    known = {name: value for name in ("LD_LIBRARY_PATH", "TZ") if (value := os.environ.get(name))}  # noqa: TID251  no setting
    return {"PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)])} | known
