"""The process that renders a base's chat template: `python -m veneer.chat.child`, with a socket as standard input.

The template is a stranger's program. What it can do is bounded from outside of its interpreter, so that no filter, slice or
product escapes: the kernel ends the process when one rendering has used its processor time (also within one operation of the
interpreter), refuses memory above the limit, and refuses every new file and connection. The process has no secret and an empty
environment. It ends when its socket does.
"""

from __future__ import annotations

import codecs
import datetime
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from veneer.chat.wire import PREFIX, Answer, Order, pack_answer, unpack_messages, unpack_order

NO_JINJA = 3
"""Status of a process that lacks jinja2."""

_NICENESS = 5


def main() -> NoReturn:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the plane's business
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel ends the process, whatever the interpreter does just then
    os.nice(_NICENESS)
    try:
        from veneer.chat import template  # noqa: F401  before files are refused
    except ModuleNotFoundError:
        os._exit(NO_JINJA)
    for name in ("ascii", "latin-1", "raw_unicode_escape", "unicode_escape", "utf-8"):
        codecs.lookup(name)  # jinja2's lexer and templates use these; they are files of the interpreter
    _serve(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    os._exit(0)


def _serve(link: socket.socket) -> None:
    from veneer.chat.template import Template

    first = _receive(link)
    if first is None:
        return
    order = unpack_order(first[0])
    _confine(order)
    try:
        with _timed(order):
            template = Template(
                order.source,
                order.variables,
                order.controls,
                max_characters=order.max_characters,
                always_places=order.always_places,
            )
    except BaseException as error:  # noqa: BLE001  whatever a stranger's template raises is told
        link.sendall(pack_answer(_fault(error)))
        return
    link.sendall(pack_answer(Answer("ready")))
    while (received := _receive(link)) is not None:
        answer = _answer(template, order, unpack_messages(*received))
        link.sendall(pack_answer(answer))
        if answer.kind == "memory":
            return  # the plane starts another in its place


def _answer(template: object, order: Order, messages: list[dict[str, str]]) -> Answer:
    from veneer.chat.template import RefusedConversationError, Template, TooLongError, UntraceableError

    assert isinstance(template, Template), "it was made by _serve"
    try:
        with _timed(order):
            rendered = template.render(messages)
    except RefusedConversationError as refusal:
        return Answer("refused", str(refusal))
    except TooLongError:
        return Answer("characters")
    except UntraceableError:
        return Answer("untraceable")
    except BaseException as error:  # noqa: BLE001
        return _fault(error)
    return Answer("text", "", rendered.controls, rendered.text)


def _fault(error: BaseException) -> Answer:
    if isinstance(error, MemoryError):
        return Answer("memory")
    return Answer("failed", f"{type(error).__name__}: {error}"[:300])


@contextmanager
def _timed(order: Order) -> Iterator[None]:
    """Has the kernel end the process when what follows takes too much processor time."""
    signal.setitimer(signal.ITIMER_PROF, order.max_cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _confine(order: Order) -> None:
    """Limits memory, and refuses new files and connections, for good."""
    datetime.datetime.now().strftime("%c")  # noqa: DTZ005  reads the time zone's file while files may be read
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limits = {
        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGE_SIZE") + order.memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


def _receive(link: socket.socket) -> tuple[bytes, bytes] | None:
    """Returns the next message's header and body; None at the end."""
    prefix = _read(link, PREFIX.size)
    if prefix is None:
        return None
    sizes = PREFIX.unpack(prefix)
    header, body = _read(link, sizes[0]), _read(link, sizes[1])
    return None if header is None or body is None else (header, body)


def _read(link: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    start = 0
    while start < size:
        count = link.recv_into(view[start:])
        if count == 0:
            return None
        start += count
    return bytes(data)


if __name__ == "__main__":
    main()
