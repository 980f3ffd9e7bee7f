"""The process that checks constraints: `python -m dataplane.frontend.grammar_child`, with a socket as standard input.

A constraint is a stranger's program, and no limit of the library bounds how long or in how much memory it compiles. So each is
compiled in a child of its own: the kernel ends that when its processor time is used, and refuses memory beyond the limit. The
process itself only holds the tokenizer and one thread. It ends, and its children with it, when its socket does.

A message is a length (unsigned, four bytes, network order) and JSON. First comes the order: the model's folder and the limits.
Then `[number, kind, text, is_heavy]` for each constraint, and for each an answer `[number, status, words]`: `grammar` with the
constraint as the engine takes it, `invalid` or `missing` with what is wrong, or the status with which its process ended.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

PREFIX = struct.Struct("!I")
_NICENESS = 19
_LIGHT_NICENESS = 5


def main() -> NoReturn:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the plane's business
    link = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    order = receive(link)
    if order is not None:
        _serve(link, order)
    os._exit(0)


def _serve(link: socket.socket, order: dict[str, Any]) -> None:
    from dataplane.engine.grammar import GrammarCompiler

    compiler = GrammarCompiler(Path(order["folder"]), vocab_size=order["vocab_size"], eos_ids=order["eos_ids"])
    parts: dict[int, bytearray] = {}
    children: dict[int, tuple[int, int]] = {}
    selector = selectors.DefaultSelector()
    selector.register(link, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is link:
                asked = receive(link)
                if asked is None:
                    for pid, _ in children.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                reader, pid = _fork(compiler, asked, order, link)
                selector.register(reader, selectors.EVENT_READ)
                parts[reader], children[reader] = bytearray(), (pid, asked[0])
                continue
            reader = key.fd
            part = os.read(reader, 1 << 16)
            if part:
                parts[reader] += part
                continue
            selector.unregister(reader)
            os.close(reader)
            pid, number = children.pop(reader)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            data = bytes(parts.pop(reader))
            send(link, [number, *json.loads(data)] if status == 0 else [number, status, ""])


def _fork(compiler: Any, asked: list[Any], order: dict[str, Any], link: socket.socket) -> tuple[int, int]:
    """Starts a child for a constraint; returns the end of the pipe on which it answers, and its process id."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return reader, pid
    try:
        link.close()  # else the plane would not see the end of this process's parent before that of this one
        os.close(sys.stdin.fileno())
        _, kind, text, is_heavy = asked
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS if is_heavy else _LIGHT_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel ends the process, whatever the library does just then
        _limit(order["memory_bytes"])
        signal.setitimer(signal.ITIMER_PROF, order["max_cpu_s"])
        answer = json.dumps(_check(compiler, kind, text)).encode()
        while answer:
            answer = answer[os.write(writer, answer) :]
        os._exit(0)
    except BaseException:  # noqa: BLE001 - memory, mostly; the status says that it did not answer
        os._exit(1)


def _limit(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    for kind, value in ((resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


def _check(compiler: Any, kind: str, text: str) -> tuple[str, str]:
    """Compiles a constraint and finds its first mask; returns what is to be answered."""
    from dataplane.engine.grammar import explain
    from dataplane.frontend.grammar_texts import reading_of, translate
    from veneer.errors import FailedPreconditionError, InvalidArgumentError

    try:
        compiler.check()
        grammar = translate(kind, text)
        matcher = compiler.compile(grammar)
    except FailedPreconditionError as error:
        return "missing", error.message
    except InvalidArgumentError as error:
        return "invalid", reading_of(kind, text) + error.violations[0].description
    except ValueError as error:
        return "invalid", reading_of(kind, text) + str(error).partition("\n")[0][:200]
    matcher.compute_bitmask()
    if matcher.is_error():
        return "invalid", reading_of(kind, text) + explain(matcher.get_error())
    return "grammar", grammar


def send(link: socket.socket, message: Any) -> None:
    """Sends a message; blocks."""
    data = json.dumps(message).encode()
    link.sendall(PREFIX.pack(len(data)) + data)


def receive(link: socket.socket) -> Any:
    """Returns the next message, None at the end; blocks."""
    prefix = _read(link, PREFIX.size)
    data = None if prefix is None else _read(link, PREFIX.unpack(prefix)[0])
    return None if data is None else json.loads(data)


def _read(link: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = link.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
