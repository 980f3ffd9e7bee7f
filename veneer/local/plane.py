"""One plane as a process: its settings through the environment, its addresses from its ready file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from veneer.errors import UnavailableError
from veneer.local.process import Process


@dataclass(frozen=True, slots=True)
class PlaneAddresses:
    """Where a plane listens, as `host:port`."""

    callers: str
    operators: str
    metrics: str


class Plane:
    """`python -m MODULE serve` with its log, pid and ready file in one folder. Owned by one thread.

    Attributes:
        process: The process, for signals.
    """

    def __init__(self, module: str, folder: Path) -> None:
        """Prepares it; nothing is started.

        Args:
            module: `controlplane` or `dataplane`.
            folder: Exists.
        """
        self.process = Process(module, folder)
        self._module = module
        self._prefix = f"VENEER_{module.upper()}_"
        self._ready_file = folder / f"{module}.ready.json"
        self._settings: dict[str, str] = {}

    @property
    def addresses(self) -> PlaneAddresses:
        """Where it listens.

        Raises:
            UnavailableError: It does not.
        """
        try:
            return PlaneAddresses(**json.loads(self._ready_file.read_text()))
        except FileNotFoundError as error:
            raise UnavailableError(f"{self._module} does not listen; see {self.process.log}") from error

    def configure(self, settings: Mapping[str, str]) -> None:
        """States its settings by their names in lower case. They hold from its next start on."""
        self._settings = {**settings, "ready_file": str(self._ready_file)}

    def run(self, command: str) -> str:
        """Runs a command of the module that ends by itself, such as `migrate`, and returns what it printed.

        Raises:
            UnavailableError: It failed; the message carries its last words.
        """
        done = subprocess.run(self._command(command), env=self._environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UnavailableError(f"{self._module} {command} failed:\n{done.stderr.strip()[-2000:]}")
        return done.stdout

    def start(self, *, timeout_s: float = 180.0) -> PlaneAddresses:
        """Starts it and waits until it listens. A later start takes the same addresses again.

        Raises:
            FailedPreconditionError: It runs already.
            UnavailableError: It ended; the message carries its last words.
            DeadlineExceededError: It did not listen in time.
        """
        if self.process.pid is None:
            self._ready_file.unlink(missing_ok=True)
        self.process.start(self._command("serve"), env=self._environment())
        self.process.wait_for_file(self._ready_file, timeout_s=timeout_s)
        addresses = self.addresses
        for name in ("callers", "operators", "metrics"):
            self._settings[f"listen_{name}"] = getattr(addresses, name)
        return addresses

    def stop(self, *, timeout_s: float = 45.0) -> None:
        """Lets it drain, and ends it."""
        self.process.stop(timeout_s=timeout_s)
        self._ready_file.unlink(missing_ok=True)

    def kill(self) -> None:
        """Ends it as a crash would."""
        self.process.kill()
        self._ready_file.unlink(missing_ok=True)

    def _command(self, command: str) -> list[str]:
        return [sys.executable, "-m", self._module, command]

    def _environment(self) -> dict[str, str]:
        settings = {f"{self._prefix}{name.upper()}": value for name, value in self._settings.items()}
        # gRPC's handlers of forks crash children of the planes: see `veneer.server.run_main`.
        return {"GRPC_ENABLE_FORK_SUPPORT": "false", **os.environ, **settings}
