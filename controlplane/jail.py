"""A jail for a process that reads files of strangers: after `confine` it can compute, read what is open, answer, and end.

Three walls, none of which needs a privilege, so they work as root, as a user and inside a container: `no_new_privs`; a seccomp
filter that lists the system calls that are allowed and answers EPERM to every other one, so nothing is opened, connected,
executed or forked; and resource limits on memory, time and files. Linux on x86-64 and aarch64; elsewhere `confine` fails and
nothing is read.

Source: numbers from the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h); filter
format from Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

REPORT_FD = 1
"""The only descriptor that may be written."""

_ALLOWED = (
    "read pread64 lseek close brk munmap mremap madvise futex rt_sigaction rt_sigprocmask rt_sigreturn restart_syscall "
    "sched_yield clock_gettime gettimeofday getrandom getpid gettid getrusage exit exit_group"
).split()

_NUMBERS = {
    "x86_64": {
        "read": 0, "write": 1, "close": 3, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13,
        "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "sched_yield": 24, "mremap": 25, "madvise": 28, "getpid": 39,
        "exit": 60, "gettimeofday": 96, "getrusage": 98, "gettid": 186, "futex": 202, "restart_syscall": 219,
        "clock_gettime": 228, "exit_group": 231, "seccomp": 317, "getrandom": 318,
    },
    "aarch64": {
        "close": 57, "lseek": 62, "read": 63, "write": 64, "pread64": 67, "exit": 93, "exit_group": 94, "futex": 98,
        "clock_gettime": 113, "sched_yield": 124, "restart_syscall": 128, "rt_sigaction": 134, "rt_sigprocmask": 135,
        "rt_sigreturn": 139, "getrusage": 165, "gettimeofday": 169, "getpid": 172, "gettid": 178, "brk": 214, "munmap": 215,
        "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233, "seccomp": 277, "getrandom": 278,
    },
}  # fmt: skip
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_TSYNC = 1
_PROT_EXEC = 4

# Classic BPF: load a word, compare, test bits, return. Offsets into struct seccomp_data.
_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM


class JailError(Exception):
    """The jail cannot be set up here; the message names the cause."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the confined process may use.

    Attributes:
        memory_bytes: Address space on top of what it has already.
        cpu_s: Processor time in all, in whole seconds; above it the kernel ends the process.
    """

    memory_bytes: int
    cpu_s: int


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def confine(bounds: Bounds) -> None:
    """Locks this process in, for good. Everything that it needs must be imported and open by now.

    Raises:
        JailError: A wall could not be put up; the process must then not read its input.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _NUMBERS:
        raise JailError(f"the jail needs Linux on {' or '.join(_NUMBERS)}, this is {sys.platform} on {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    _limit_resources(bounds)
    _control(libc, _PR_SET_DUMPABLE, 0, "PR_SET_DUMPABLE")
    _control(libc, _PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    code = _build_filter(machine)
    program = _Program(len(code) // 8, code)
    # With TSYNC the filter holds for every thread of the process, should a library have started one.
    result = libc.syscall(
        ctypes.c_long(_NUMBERS[machine]["seccomp"]),
        ctypes.c_ulong(_SECCOMP_SET_MODE_FILTER),
        ctypes.c_ulong(_SECCOMP_FILTER_FLAG_TSYNC),
        ctypes.byref(program),
    )
    if result != 0:
        raise JailError(f"the kernel refused the seccomp filter: {os.strerror(ctypes.get_errno())}")


def die_with(parent: int) -> None:
    """Has the kernel end this process when its parent ends.

    Args:
        parent: The parent's number, which the parent itself took before it forked.

    Raises:
        JailError: The parent has ended already, so that no signal would come.
    """
    _control(ctypes.CDLL(None, use_errno=True), _PR_SET_PDEATHSIG, signal.SIGKILL, "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        raise JailError("the parent has ended")


def _limit_resources(bounds: Bounds) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    memory = pages * os.sysconf("SC_PAGE_SIZE") + bounds.memory_bytes
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: bounds.cpu_s,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # At the soft limit of processor time comes SIGXCPU, which tells the parent what happened; at the hard one SIGKILL.
        grace = 1 if kind == resource.RLIMIT_CPU else 0
        last = allowed + grace if hard == resource.RLIM_INFINITY else min(allowed + grace, hard)
        try:
            resource.setrlimit(kind, (allowed, last))
        except (OSError, ValueError) as error:
            raise JailError(f"resource limit {kind} could not be set: {error}") from error


def _control(libc: ctypes.CDLL, option: int, value: int, name: str) -> None:
    zero = ctypes.c_ulong(0)
    if libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero) != 0:
        raise JailError(f"prctl {name} failed: {os.strerror(ctypes.get_errno())}")


def _build_filter(machine: str) -> bytes:
    """Writes the filter: wrong architecture → kill; a listed call → allow; any other → EPERM."""
    numbers = _NUMBERS[machine]
    code = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_EQUAL, _AUDIT_ARCH[machine], if_true=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
    ]
    for name in _ALLOWED:
        code += _when(numbers[name], [_instruction(_RETURN, _ALLOW)])
    report_only = [
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_EQUAL, REPORT_FD, if_false=1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _REFUSE),
    ]
    no_code = [
        _instruction(_LOAD, _FIRST_ARGUMENT_AT + 2 * 8),
        _instruction(_BITS, _PROT_EXEC, if_true=1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _REFUSE),
    ]
    code += _when(numbers["write"], report_only) + _when(numbers["mmap"], no_code) + _when(numbers["mprotect"], no_code)
    code.append(_instruction(_RETURN, _REFUSE))
    return b"".join(code)


def _when(number: int, body: Iterable[bytes]) -> list[bytes]:
    """Runs the body, which must return, for one call number; it is skipped for others."""
    steps = list(body)
    return [_instruction(_EQUAL, number, if_false=len(steps)), *steps]


def _instruction(operation: int, operand: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, operand)
