"""The process that forks one jailed child for each check: what a check imports is imported once, before any upload.

It is started by exec with an empty environment, reads no file of a stranger, holds no secret and no connection but the socket to
its parent, and stays on one thread. So every child begins as the same clean copy, and nothing of one upload reaches the next.

On its standard input, a socket, come orders: one byte, with four descriptors beside it: configuration, weights, a socket for the
report, and a link. The child reads what it is to do from the link, a line of JSON, and gives the link up before it locks itself
in. The server answers on the link with the child's status as text when that has ended, and ends the child when the other side of
the link goes away; a parent that dies thus takes all children with it. When no more orders can come, the server goes after its
last child.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from controlplane.jail import die_with

CONTROL_FD = 0
"""Where orders come in."""
CONFIG_FD, REPORT_FD, WEIGHTS_FD = 0, 1, 3
"""What a child has, beside standard error, which leads nowhere."""

_NUM_FDS = 4
_FIRST_FREE_FD = 16
_MAX_ORDER_BYTES = 16 << 20

Work = Callable[[str], NoReturn]
"""What a child does with its order."""


def serve(work: Work) -> NoReturn:
    """Forks children until no order can come any more and the last one has ended. The process must have one thread.

    Args:
        work: Locks the child in and ends it.
    """
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        os._exit(3)  # a lock that another thread holds would be held for ever in a child
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages that all share
    _Server(work).run()
    os._exit(0)


class _Server:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._control = socket.socket(fileno=CONTROL_FD)
        self._poll = select.poll()
        self._links: dict[int, int] = {}  # of each child
        self._wake, wake = socket.socketpair()
        for end in (self._wake, wake):
            end.settimeout(0)
        self._waker = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        is_open = True
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        while is_open or self._links:
            for fd, _ in self._poll.poll():
                if fd == CONTROL_FD:
                    is_open = self._take()
                elif fd == self._wake.fileno():
                    self._wake.recv(4096)
                else:
                    self._end(fd)
            self._reap()

    def _take(self) -> bool:
        """Takes an order and forks its child; says whether more can come."""
        data, fds, _, _ = socket.recv_fds(self._control, 1, _NUM_FDS)
        if not data:
            self._poll.unregister(self._control)
            return False
        if len(fds) == _NUM_FDS:
            with contextlib.suppress(OSError):  # no room for a process: the parent sees the link close
                server = os.getpid()
                child = os.fork()
                if child == 0:
                    _become(self._work, fds, server=server)
                link = fds.pop()  # kept until the child has ended
                self._links[child] = link
                self._poll.register(link, select.POLLRDHUP)
        for fd in fds:
            os.close(fd)
        return True

    def _end(self, link: int) -> None:
        """Ends the child whose result nobody waits for any more."""
        self._poll.unregister(link)
        for child, its in self._links.items():
            if its == link:
                os.kill(child, signal.SIGKILL)  # it is not reaped yet, so the number is still its own

    def _reap(self) -> None:
        while self._links:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            link = self._links.pop(child)
            with contextlib.suppress(KeyError):
                self._poll.unregister(link)
            with contextlib.suppress(OSError):
                os.write(link, b"%d" % os.waitstatus_to_exitcode(status))
            os.close(link)


def _become(work: Work, fds: list[int], *, server: int) -> NoReturn:
    """Turns a fresh copy of the server into a child: it keeps its own files and nothing of the server's."""
    try:
        die_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        config, weights, report, link = (_above(fd) for fd in fds)
        order = _read_order(link)
        for source, target in ((config, CONFIG_FD), (report, REPORT_FD), (weights, WEIGHTS_FD)):
            os.dup2(source, target)
        _close_above(WEIGHTS_FD)
        work(order)
    finally:
        os._exit(1)


def _above(fd: int) -> int:
    """The file under a number that no place of a child's has."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FREE_FD)


def _close_above(last: int) -> None:
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) > last:
            with contextlib.suppress(OSError):  # what read this list is closed already
                os.close(int(entry.name))


def _read_order(link: int) -> str:
    data = bytearray()
    while not data.endswith(b"\n"):
        more = os.read(link, 1 << 16)
        if not more or len(data) > _MAX_ORDER_BYTES:
            raise EOFError
        data += more
    return data[:-1].decode()
