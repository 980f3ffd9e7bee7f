"""A process that is found again by its pid file, by whoever started it or by a later command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from veneer.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError

_POLL_S = 0.01
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class _Identity:
    """A process for good: a pid alone may belong to another process later, a pid with its birth may not."""

    pid: int
    birth: str


class Process:
    """One background process with a log file and a pid file.

    Owned by one thread. It may be built again over the same folder, even in another program, and then controls the same process.

    Attributes:
        name: What it is called in messages; stem of `NAME.pid` and `NAME.log`.
        log: File that takes its standard output and error.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._pid_file = folder / f"{name}.pid"
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Its process id, or None when it does not run."""
        identity = self._identity()
        return None if identity is None else identity.pid

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        run_as: tuple[int, int] | None = None,
    ) -> None:
        """Starts it in a session of its own, so that it outlives the terminal.

        Args:
            command: Program and arguments.
            env: Its whole environment; None inherits ours.
            run_as: User and group id to run as, for a starter that is root.

        Raises:
            FailedPreconditionError: It runs already.
        """
        if self.pid is not None:
            raise FailedPreconditionError(f"{self.name} runs already as process {self.pid}")
        user, group = run_as if run_as is not None else (None, None)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            child = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=None if env is None else dict(env),
                user=user,
                group=group,
                extra_groups=None if run_as is None else [],
                start_new_session=True,
            )
        child.returncode = 0  # it outlives this object, so Popen has no more say in it: the pid file has, and `_reap`
        self._pid_file.write_text(json.dumps({"pid": child.pid, "birth": _birth(child.pid)}))

    def check(self) -> None:
        """Checks that it still runs.

        Raises:
            UnavailableError: It has ended; the message carries the end of its log.
        """
        if self.pid is None:
            raise UnavailableError(f"{self.name} has ended; the end of {self.log}:\n{self.log_tail()}")

    def wait_for_file(self, path: Path, *, timeout_s: float) -> None:
        """Waits until `path` exists.

        Raises:
            UnavailableError: The process ended first.
            DeadlineExceededError: The time is up.
        """
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            self.check()
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"{self.name} was not ready within {timeout_s:g} s; see {self.log}")
            time.sleep(_POLL_S)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; nothing happens when it does not run."""
        identity = self._identity()
        if identity is not None:
            os.kill(identity.pid, number)

    def stop(self, *, number: signal.Signals = signal.SIGTERM, timeout_s: float = 15.0) -> bool:
        """Asks it to end, and after `timeout_s` ends it.

        Returns:
            True when it ended by itself (or did not run), False when it had to be killed.
        """
        self.send(number)
        if self._wait(timeout_s):
            return True
        self.kill()
        return False

    def kill(self) -> None:
        """Ends it at once, as a crash would, and waits until it is gone."""
        self.send(signal.SIGKILL)
        self._wait(10.0)

    def log_tail(self) -> str:
        """The last lines that it wrote to its log since this object started it."""
        try:
            return self.log.read_bytes()[self._log_start :][-_LOG_TAIL_BYTES:].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.pid is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        self._pid_file.unlink(missing_ok=True)
        return True

    def _identity(self) -> _Identity | None:
        try:
            saved = json.loads(self._pid_file.read_text())
            identity = _Identity(saved["pid"], saved["birth"])
        except (FileNotFoundError, ValueError, KeyError):
            return None
        _reap(identity.pid)
        return identity if _birth(identity.pid) == identity.birth != "" else None


def _reap(pid: int) -> None:
    """Lets the kernel forget a child of ours that has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _birth(pid: int) -> str:
    """When a process started, in the kernel's own words; empty when it is gone or a zombie."""
    try:
        # The command in parentheses may hold spaces: count the fields after it. 0 is the state, 19 the start in ticks.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return ""
        return subprocess.run(
            ["/bin/ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout.strip()
    return "" if fields[0] == "Z" else fields[19]
