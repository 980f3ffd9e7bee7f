"""Both planes, Postgres and Valkey on this machine, all as processes of one state folder."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from veneer.artifact import BaseDescription, describe_base
from veneer.errors import AlreadyExistsError, FailedPreconditionError, UnavailableError
from veneer.local.plane import Plane
from veneer.local.ports import is_free
from veneer.local.postgres import Postgres
from veneer.local.state import StackState, command_for, read_state, remove_state, write_secret, write_state
from veneer.local.valkey import Valkey
from veneer.operator_client import OperatorClient

ALL_ROLES = ("owner", "publisher", "caller")

_MARK = "local-stack"
_SECRET = re.compile(r"vnr_[A-Za-z0-9_-]{43}")
_NODE = "local"
_CONTROL_PORTS = {"callers": 7600, "operators": 7601, "metrics": 7609}
_DATA_PORTS = {"callers": 7700, "operators": 7701, "metrics": 7709}
_AT_ONCE = {"drain_delay_s": "0"}
"""All of it stops together: there is no other replica that clients could notice in time."""


class LocalStack:
    """The whole system in one folder: data, logs, pid files, keys.

    Owned by one thread; no event loop may run in it (from a coroutine use `asyncio.to_thread(stack.start)`). As a context manager
    it starts, and stops at the end. A second object over the same folder, in another program too, can stop what the first one
    started. What tenants published stays in the folder and is there again after the next start.

    Attributes:
        folder: The state folder.
        postgres: The database server; `stop`, `kill` and `start` it to see what happens.
        valkey: The server for hints; likewise.
        control_plane: The control plane; likewise. It comes back at its old addresses.
        data_plane: The data plane; likewise.
    """

    def __init__(
        self,
        folder: Path,
        model_dir: Path | None = None,
        *,
        control_settings: Mapping[str, str] | None = None,
        data_settings: Mapping[str, str | None] | None = None,
        default_ports: bool = False,
        durable: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Prepares a stack; nothing is started.

        Args:
            folder: Made when absent.
            model_dir: Hugging Face folder of the base; needed to start.
            control_settings: Settings of the control plane by name, e.g. `{"quarantine_reports": "2"}`; they win over ours.
            data_settings: Settings of the data plane by name, e.g. `{"dtype": "float32"}`; they win over ours, and
                None takes one of ours away.
            default_ports: Takes the planes' default ports where they are free; else any.
            durable: The database survives a crash of the machine.
            report: Told in a few words what is being started.

        Raises:
            FailedPreconditionError: The folder holds something that is not a local stack.
        """
        self.folder = _claim(folder.absolute())
        self.postgres = Postgres(self.folder / "postgres", durable=durable)
        self.valkey = Valkey(self.folder / "valkey")
        self.control_plane = Plane("controlplane", self.folder)
        self.data_plane = Plane("dataplane", self.folder)
        self._model_dir = model_dir
        self._control_settings = dict(control_settings or {})
        self._data_settings = dict(data_settings or {})
        self._default_ports = default_ports
        self._report = report or (lambda _: None)
        self._state: StackState | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def state(self) -> StackState:
        """Addresses and keys.

        Raises:
            FailedPreconditionError: Nothing runs.
        """
        state = self._state or read_state(self.folder)
        if state is None:
            raise FailedPreconditionError(f"nothing runs in {self.folder}: run `{command_for(self.folder, 'up')}`")
        return state

    def operator(self) -> OperatorClient:
        """A client with the first operator's key, for the caller to close."""
        state = self.state
        return OperatorClient(control=state.control_operators, data=state.data_operators, key=state.operator_key)

    def start(self) -> StackState:
        """Starts everything and waits until both planes serve. If one part fails, the others are stopped again.

        Raises:
            FailedPreconditionError: Something runs already, no model folder was given, or a package is missing.
            InvalidArgumentError: The model folder is not one that can be served.
            UnavailableError: A process ended; the message carries its last words.
            DeadlineExceededError: A process was not ready in time.
        """
        if self._model_dir is None:
            raise FailedPreconditionError("no model folder was given")
        for process in (self.data_plane.process, self.control_plane.process, self.valkey.process, self.postgres.process):
            if process.pid is not None:
                stop = command_for(self.folder, "down")
                raise FailedPreconditionError(f"{process.name} runs already in {self.folder}; `{stop}` stops what runs there")
        try:
            self._report("describing the base model")
            base = describe_base(self._model_dir)
            self._report("starting postgres")
            self.postgres.start()
            self._report("starting valkey")
            self.valkey.start()
            operator_key = self._start_control_plane()
            self._report("starting the data plane: loading the model")
            self._start_data_plane(self._model_dir, base, operator_key)
            self._state = self._describe(base, operator_key)
            write_state(self.folder, self._state)
        except BaseException:
            self.stop()
            raise
        return self._state

    def add_tenant(self, name: str) -> StackState:
        """Makes a tenant with a key of all roles, unless an earlier start did, and keeps the key in the state."""
        key_file = self.folder / f"tenant-{name}.key"
        if not key_file.exists():
            write_secret(key_file, asyncio.run(self._create_tenant(name)))
        self._state = replace(self.state, tenant=name, tenant_key=key_file.read_text())
        write_state(self.folder, self._state)
        return self._state

    def stop(self) -> None:
        """Stops everything that runs, by its own process ids. Nothing is lost; `start` goes on from here."""
        self.data_plane.stop()
        self.control_plane.stop()
        self.valkey.stop()
        self.postgres.stop()
        self._state = None
        remove_state(self.folder)

    def remove(self) -> None:
        """Stops everything and removes the folder with all that was published."""
        self.stop()
        shutil.rmtree(self.folder)

    def _start_control_plane(self) -> str:
        """Returns the operator's key."""
        self.control_plane.configure(
            {
                "database_url": self.postgres.url(user="veneer_app", scheme="postgresql"),
                "owner_url": self.postgres.url(scheme="postgresql"),
                "redis_url": self.valkey.url(),
                "store_url": self._folder("store").as_uri(),
                "spool_folder": str(self._folder("spool")),
                "pepper_file": str(self.folder / "pepper"),
                "reflection": "true",
                **_AT_ONCE,
                **self._listen(_CONTROL_PORTS),
                **self._control_settings,
            }
        )
        self._report("making the tables")
        self.control_plane.run("migrate")
        key_file = self.folder / "operator.key"
        if not key_file.exists():
            found = _SECRET.search(self.control_plane.run("bootstrap"))
            if found is None:
                raise UnavailableError("controlplane bootstrap printed no key")
            write_secret(key_file, found.group())
        self._report("starting the control plane")
        self.control_plane.start()
        return key_file.read_text()

    def _start_data_plane(self, model_dir: Path, base: BaseDescription, operator_key: str) -> None:
        addresses = self.control_plane.addresses
        node_key_file = self.folder / "node.key"
        settings: dict[str, str | None] = {
            "model_dir": str(model_dir.absolute()),
            "control_plane": addresses.callers,
            "node_key_file": str(node_key_file),
            "redis_url": self.valkey.url(),
            "cache_folder": str(self._folder("cache")),
            "reflection": "true",
            **_AT_ONCE,
            **self._listen(_DATA_PORTS),
            **self._data_settings,
        }
        token = asyncio.run(self._let_in(base, operator_key, addresses.operators, enroll=not node_key_file.exists()))
        known = {name: value for name, value in settings.items() if value is not None}
        self.data_plane.configure(known | ({"enrollment_token": token} if token else {}))
        self.data_plane.start()
        self.data_plane.configure({**known, **self._listen_again()})  # a token works once

    def _listen_again(self) -> dict[str, str]:
        addresses = self.data_plane.addresses
        return {
            "listen_callers": addresses.callers,
            "listen_operators": addresses.operators,
            "listen_metrics": addresses.metrics,
        }

    async def _let_in(self, base: BaseDescription, key: str, operators: str, *, enroll: bool) -> str:
        """Registers the base, and returns a token for a data plane that has no key yet."""
        async with OperatorClient(control=operators, key=key) as operator:
            await operator.register_base(base)
            return (await operator.create_enrollment_token(_NODE)).token if enroll else ""

    async def _create_tenant(self, name: str) -> str:
        async with self.operator() as operator:
            with contextlib.suppress(AlreadyExistsError):
                await operator.create_tenant(name)
            return (await operator.create_key(tenant=name, roles=ALL_ROLES, label="veneer up")).secret

    def _describe(self, base: BaseDescription, operator_key: str) -> StackState:
        control, data = self.control_plane.addresses, self.data_plane.addresses
        return StackState(
            control=control.callers,
            control_operators=control.operators,
            control_metrics=control.metrics,
            data=data.callers,
            data_operators=data.operators,
            data_metrics=data.metrics,
            operator_key=operator_key,
            base_digest=base.digest,
            base_name=base.name,
        )

    def _listen(self, ports: Mapping[str, int]) -> dict[str, str]:
        free = {name: port if self._default_ports and is_free(port) else 0 for name, port in ports.items()}
        return {f"listen_{name}": f"127.0.0.1:{port}" for name, port in free.items()}

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


def _claim(folder: Path) -> Path:
    """Makes the folder ours. One that holds other things is refused, since `remove` would take them along."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark = folder / _MARK
    if not mark.exists():
        if any(folder.iterdir()):
            raise FailedPreconditionError(f"{folder} holds other things and is no local stack: name a new or an empty folder")
        mark.touch()
    return folder
